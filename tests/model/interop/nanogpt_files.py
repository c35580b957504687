"""Checkpoints with nanoGPT's names and layout, without its code, and the same model as a GPT-2 of transformers."""

import pickle
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tril.model.causality.hf import quiet

T = 32  # context
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) there


def reference(vocab_size: int) -> GPT2LMHeadModel:
    """A model with random weights and nanoGPT's activation."""
    quiet()
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=T, n_layer=2, n_embd=32, n_head=4, activation_function="gelu"
    )
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def write_checkpoint(path: Path, model: GPT2LMHeadModel, *, dataset: object = "text", old: bool = False) -> Path:
    """What torch.save of nanoGPT's train.py writes.

    `old`: as in its first months, with masks among the weights and no bias in model_args; and of a compiled model.
    """
    config = model.config
    weights = {
        name: tensor.T.contiguous() if name.endswith(MATRICES) else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": config.vocab_size}
    if old:
        mask = torch.ones(1, 1, T, T).tril()
        weights |= {f"transformer.h.{i}.attn.bias": mask for i in range(2)}
        weights = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    else:
        arguments["bias"] = True
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
