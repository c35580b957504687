"""GGUF files, as llama.cpp reads them, of models with the parts of Llama or Qwen3, in float32.

llama.cpp rotates neighbors (2i and 2i + 1) of a head in its Llama, and halves (i and i + D/2) in its Qwen3. So the rows
of q and k of a Llama are written in another order. The package `gguf` has the names and the format.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tril.data.settings import typed
from tril.model.atomic_files import atomic_path
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.architectures import model_type, write_config, write_weights

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


def write_gguf(path: Path, lm: LanguageModel) -> None:
    """Writes the model and its tokenizer into one file.

    Raises:
        OSError: it cannot be written.
        ValueError: the format does not express the model or its tokenizer.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError('to=gguf needs the library gguf; pip install -e ".[gguf]"') from error
    kind, values, tokenizer = model_type(lm.config), write_config(lm.config), json.loads(lm.tokenizer.to_str())
    if kind == "gpt2" or lm.config.bias or values.get("use_sliding_window"):
        refused = f"model.pos={lm.config.pos} must be rope, model.bias={typed(lm.config.bias)} false"
        raise ValueError(f"GGUF does not express the model: {refused}, model.window={typed(lm.config.window)} null")
    pattern, model = tokenizer["pre_tokenizer"] or {}, tokenizer["model"]
    plain = {"type": "ByteLevel", "add_prefix_space": False}.items() <= pattern.items() and not tokenizer["normalizer"]
    if model["type"] != "BPE" or not plain or (model["merges"] and not pattern["use_regex"]):
        raise ValueError("GGUF needs a tokenizer that is byte-level BPE, such as that of data.tokenizer.kind=bpe")

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        writer = gguf.GGUFWriter(part, kind)
        writer.add_name(path.stem)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        for key, names in KEYS.items():
            for method in names:
                getattr(writer, f"add_{method}")(values[key])
        _add_tokenizer(writer, lm, tokenizer)
        for name, tensor in gguf_tensors(lm).items():
            writer.add_tensor(name, tensor.numpy())
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _add_tokenizer(writer: Any, lm: LanguageModel, tokenizer: dict[str, Any]) -> None:
    """The tokens of all rows of the embedding, their types and the merges."""
    from gguf import TokenType

    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    names = {i: token for token, i in lm.tokenizer.get_vocab(with_added_tokens=True).items()}
    rows, merges = range(lm.config.vocab_size or 0), tokenizer["model"]["merges"]
    kinds = (TokenType.CONTROL if i in special else TokenType.NORMAL if i in names else TokenType.UNUSED for i in rows)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([names.get(i, UNUSED_TOKEN.format(i)) for i in rows])
    writer.add_token_types(list(kinds))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(lm.eot_id)
    writer.add_eos_token_id(lm.eot_id)
    writer.add_add_bos_token(True)  # a text of Tril starts with the end-of-text token


def gguf_tensors(lm: LanguageModel) -> dict[str, Tensor]:
    """The weights under llama.cpp's names and in its layout, float32 on the CPU."""
    import gguf

    kind = model_type(lm.config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names, tensors = gguf.get_tensor_name_map(architecture, lm.config.n_layers), {}
    heads = {"q_proj": lm.config.n_heads, "k_proj": lm.config.kv_heads}
    for name, tensor in write_weights(lm.model).items():
        module = name.split(".")[-2]
        if kind == "llama" and module in heads:
            tensor = neighbors(tensor, heads[module])
        tensors[names.get_name(name, try_suffixes=(".weight",))] = tensor
    return tensors


def neighbors(weight: Tensor, n_heads: int) -> Tensor:
    """Rows (H D, C) of which i and i + D/2 of each head are rotated together, as neighbors 2i and 2i + 1."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
