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
from tril.model.interop.hf_config import model_type, to_hf
from tril.model.interop.hf_weights import to_hf_weights

SUFFIXES = (".weight", ".bias")
CLASSES = ("llama", "qwen3")
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
    kind, values = checked_kind(lm), to_hf(lm.config)
    vocabulary = vocabulary_of(lm)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_rope_dimension_count(values["head_dim"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(lm.eot_id)
    writer.add_eos_token_id(lm.eot_id)
    writer.add_add_bos_token(True)  # a text of Tril starts with the end-of-text token
    for tensor_name, tensor in gguf_tensors(lm).items():
        writer.add_tensor(tensor_name, tensor.numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def checked_kind(lm: LanguageModel) -> str:
    """The architecture, one of CLASSES. Raises ValueError for a model that llama.cpp's does not express."""
    kind, values = model_type(lm.config), to_hf(lm.config)
    problems = []
    if kind not in CLASSES:
        problems.append(f"model.pos={lm.config.pos} must be rope")
    if lm.config.bias:
        problems.append("model.bias=true must be false")
    if values.get("use_sliding_window"):
        problems.append(f"model.window={lm.config.window} must be null")
    if problems:
        raise ValueError(f"GGUF does not express the model: {'; '.join(problems)}")
    return kind


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
    """The weights under llama.cpp's names and in its layout, float32 on the CPU."""
    gguf, kind = require_gguf(), checked_kind(lm)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names, tensors = gguf.get_tensor_name_map(architecture, lm.config.n_layers), {}
    heads = {"q_proj": lm.config.n_heads, "k_proj": lm.config.kv_heads}
    for name, tensor in to_hf_weights(kind, lm.model).items():
        part = name.split(".")[-2]
        if kind == "llama" and part in heads:
            tensor = neighbors(tensor, heads[part])
        tensors[names.get_name(name, try_suffixes=SUFFIXES)] = tensor
    return tensors


def neighbors(weight: Tensor, n_heads: int) -> Tensor:
    """Rows (H D, C) of which i and i + D/2 of each head are rotated together, as neighbors 2i and 2i + 1."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def difference(path: Path, lm: LanguageModel) -> str | None:
    """What the file holds other than the model, in words; None: nothing. Every tensor is read back and compared."""
    reader, expected = require_gguf().GGUFReader(path), gguf_tensors(lm)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    if found.keys() != expected.keys():
        return f"other tensors: {', '.join(sorted(found.keys() ^ expected.keys())[:3])}"
    for name, tensor in expected.items():
        stored = torch.from_numpy(found[name].copy())
        if stored.shape != tensor.shape or not torch.equal(stored, tensor):
            return f"the tensor {name} differs"
    return None
