"""Models with random weights as transformers and nanoGPT write them, without code of Tril."""

import functools
import json
import pickle
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.model.tokenizers import byte_tokenizer

DROP = "a value that no file has"
V, T = 264, 24  # rows of the embedding, seven more than the tokenizer has ids; context
IDS = {"vocab_size": V, "eos_token_id": 256, "bos_token_id": 256}
GPT2 = IDS | {"n_positions": T, "n_layer": 2, "n_embd": 32, "n_head": 4}
EXACT = {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 50, "layer_norm_epsilon": 0.1}
MODERN = IDS | {"max_position_embeddings": T, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
MODERN |= {"intermediate_size": 44}
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "rope_theta": 50.0, "rms_norm_eps": 0.1}
TIED = MODERN | {"num_key_value_heads": 2, "tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
MODELS = {
    "GPT-2": ("gpt2", GPT2),
    "GPT-2, untied, exact gelu": ("gpt2", GPT2 | EXACT),
    "Llama": ("llama", MODERN | BIASED),
    "SmolLM": ("llama", TIED),
    "Qwen3": ("qwen3", TIED | WINDOW | {"head_dim": 6}),
}
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) there


def random_model(kind: str, **values):
    """A model of transformers in which every parameter is random, biases and gains too."""
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


@functools.cache
def reference(name: str):
    """A model of MODELS."""
    kind, values = MODELS[name]
    return random_model(kind, **values)


def folder_of(name: str, folder: Path, **options) -> Path:
    """Writes a model of MODELS and a tokenizer; options are those of save_pretrained."""
    reference(name).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
    return folder


def change_json(path: Path, **values) -> None:
    """Replaces values of a JSON file; the value DROP removes the key."""
    content = {} if not path.exists() else json.loads(path.read_text(encoding="utf-8"))
    content = {key: value for key, value in (content | values).items() if value != DROP}
    path.write_text(json.dumps(content), encoding="utf-8")


def nanogpt_model(vocab_size: int):
    """A GPT-2 of transformers with nanoGPT's activation."""
    return random_model("gpt2", **GPT2 | {"vocab_size": vocab_size, "activation_function": "gelu"})


def write_nanogpt(path: Path, model, *, dataset: object = "text", bias: bool = True, old: bool = False) -> Path:
    """What torch.save of nanoGPT's train.py writes: its names are those of transformers, its matrices transposed.

    Args:
        bias: False: the biases of the model become zero, and the file has none.
        old: as in its first months, with masks among the weights and no bias in model_args; and of a compiled model.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        if bias or not name.endswith(".bias"):
            weights[name] = tensor.T.contiguous() if name.endswith(MATRICES) else tensor.clone()
        else:
            tensor.zero_()
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": model.config.vocab_size}
    if old:
        weights |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, T, T).tril() for i in range(2)}
        weights = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    else:
        arguments["bias"] = bias
    content = {
        "model": weights,
        "optimizer": {"state": {0: {"step": torch.tensor(2000.0)}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "model_args": arguments | {"dropout": 0.25},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": dataset, "device": "cpu", "compile": old},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def write_meta(path: Path, characters: str) -> Path:
    """The meta.pkl of nanoGPT's data/shakespeare_char/prepare.py."""
    tables = {"itos": dict(enumerate(characters)), "stoi": {c: i for i, c in enumerate(characters)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"vocab_size": len(characters)} | tables))
    return path
