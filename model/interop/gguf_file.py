"""GGUF files, as llama.cpp reads them, of models with the parts of Llama or Qwen3, in float32.

llama.cpp rotates neighbors (2i and 2i + 1) of a head in its Llama, and halves (i and i + D/2) in its Qwen3. So the rows
of q and k of a Llama are written in another order. The package `gguf` has the names and the format.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tril.model.generation.language_model import LanguageModel
from tril.model.interop.architectures import ARCHITECTURES, model_type, to_hf, to_theirs

KEYS = {  # of config.json -> the methods of the package's writer
    "vocab_size": ["vocab_size"],
    "max_position_embeddings": ["context_length"],
    "hidden_size": ["embedding_length"],
    "num_hidden_layers": ["block_count"],
    "intermediate_size": ["feed_forward_length"],
    "num_attention_heads": ["head_count"],
    "num_key_value_heads": ["head_count_kv"],
    "head_dim": ["key_length", "value_length", "rope_dimension_count"],
    "rope_theta": ["rope_freq_base"],
    "rms_norm_eps": ["layer_norm_rms_eps"],
}
PRE_TOKENIZER = "gpt-2"  # llama.cpp's name of the pattern of GPT-2, which byte-level BPE of Tril has
UNUSED_TOKEN = "[unused{}]"  # a row of a padded embedding, which no text has


def require_gguf() -> Any:
    """The package. Raises ValueError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError('to=gguf needs the library gguf; pip install "tril[gguf]"') from error
    return gguf


def write_gguf(path: Path, lm: LanguageModel, name: str) -> None:
    """Writes the model and its tokenizer into one file.

    Raises:
        OSError: it cannot be written.
        ValueError: the format does not express the model or its tokenizer.
    """
    gguf = require_gguf()
    tensors, vocabulary, values = gguf_tensors(lm), vocabulary_of(lm), to_hf(lm.config)
    writer = gguf.GGUFWriter(path, model_type(lm.config))
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, names in KEYS.items():
        for method in names:
            getattr(writer, f"add_{method}")(values[key])
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(lm.eot_id)
    writer.add_eos_token_id(lm.eot_id)
    writer.add_add_bos_token(True)  # a text of Tril starts with the end-of-text token
    for tensor_name, tensor in tensors.items():
        writer.add_tensor(tensor_name, tensor.numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def vocabulary_of(lm: LanguageModel) -> dict[str, list]:
    """The tokens of all rows of the embedding, their types and the merges.

    Raises:
        ValueError: the tokenizer is not byte-level BPE with GPT-2's pattern.
    """
    types = require_gguf().TokenType
    state = json.loads(lm.tokenizer.to_str())
    pattern, model = state["pre_tokenizer"] or {}, state["model"]
    plain = {"type": "ByteLevel", "add_prefix_space": False}.items() <= pattern.items() and not state["normalizer"]
    if model["type"] != "BPE" or not plain or (model["merges"] and not pattern["use_regex"]):
        raise ValueError("GGUF needs a tokenizer that is byte-level BPE, such as that of data.tokenizer.kind=bpe")
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    names = {i: token for token, i in lm.tokenizer.get_vocab(with_added_tokens=True).items()}
    rows = range(lm.config.vocab_size)
    return {
        "tokens": [names.get(i, UNUSED_TOKEN.format(i)) for i in rows],
        "types": [types.CONTROL if i in special else types.NORMAL if i in names else types.UNUSED for i in rows],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }


def gguf_tensors(lm: LanguageModel) -> dict[str, Tensor]:
    """The weights under llama.cpp's names and in its layout, float32 on the CPU.

    Raises:
        ValueError: llama.cpp's Llama and Qwen3 do not express the model.
    """
    gguf, kind, values = require_gguf(), model_type(lm.config), to_hf(lm.config)
    problems = [f"model.pos={lm.config.pos} must be rope"] * (kind == "gpt2")
    problems += ["model.bias=true must be false"] * (kind != "gpt2" and lm.config.bias)
    problems += [f"model.window={lm.config.window} must be null"] * bool(values.get("use_sliding_window"))
    if problems:
        raise ValueError(f"GGUF does not express the model: {'; '.join(problems)}")
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names, tensors = gguf.get_tensor_name_map(architecture, lm.config.n_layers), {}
    heads = {"q_proj": lm.config.n_heads, "k_proj": lm.config.kv_heads}
    for name, tensor in to_theirs(ARCHITECTURES[kind], lm.model).items():
        module = name.split(".")[-2]
        if kind == "llama" and module in heads:
            tensor = neighbors(tensor, heads[module])
        tensors[names.get_name(name, try_suffixes=(".weight",))] = tensor
    return tensors


def neighbors(weight: Tensor, n_heads: int) -> Tensor:
    """Rows (H D, C) of which i and i + D/2 of each head are rotated together, as neighbors 2i and 2i + 1."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def difference(path: Path, lm: LanguageModel) -> str | None:
    """What the file holds other than the model, in words; None: nothing. Every tensor is read back and compared."""
    expected = gguf_tensors(lm)
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in require_gguf().GGUFReader(path).tensors}
    if found.keys() != expected.keys():
        return f"other tensors: {', '.join(sorted(found.keys() ^ expected.keys())[:3])}"
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    return f"the tensor {wrong[0]} differs" if wrong else None
