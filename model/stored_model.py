"""Builds the model of a checkpoint. Its config is compared with its tensors before memory is taken for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tril.model.gpt import GPT, GPTConfig

PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # converted to the model's on loading
MAX_POSITION_ELEMENTS = 2**28  # context_length * head size: rotary tables of 1 GiB
REMEDY = "it is damaged, use another file"


def build(values: dict[str, Any], state: dict[str, Any], device: torch.device | str) -> GPT:
    """The model with the weights of `state`.

    Args:
        values: the fields of its GPTConfig.
        state: the weights; names begin with PREFIX.

    Raises:
        ValueError: a wrong config, or names, shapes or dtypes that are not exactly those of the model.
    """
    unknown = sorted(map(str, values.keys() - GPTConfig.__dataclass_fields__.keys()))
    if unknown:
        raise ValueError(
            f"its config has the unknown {', '.join(unknown)}, so a newer version of Tril wrote it; update"
        )
    _check_sizes(values, state)
    try:
        config = GPTConfig(**values)
        _check_positions(config, state)
        with torch.device("meta"), SkipInit():  # takes no memory for weights
            one_block = {name: tensor.shape for name, tensor in GPT(replace(config, n_layers=1)).state_dict().items()}
    except (OverflowError, RuntimeError, TypeError) as error:  # sizes beyond 64 bits
        raise ValueError(f"no model can be built from its config ({error}); {REMEDY}") from error
    _check_weights(_all_blocks(one_block, config.n_layers), state)
    with torch.device(device), SkipInit():
        model = GPT(config)
    nn.ModuleDict({PREFIX.rstrip("."): model}).load_state_dict(dict(state))
    return model


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init: the checkpoint replaces all weights, and torch's global generator stays unchanged."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _check_sizes(values: dict[str, Any], state: dict[str, Any]) -> None:
    """Compares the sizes that decide how long it takes to build the model, on any device."""
    embed = state.get(f"{PREFIX}embed.weight")
    if not isinstance(embed, Tensor) or embed.dim() != 2:
        raise ValueError(
            f"its tensors do not match its config ({PREFIX}embed.weight is missing or no matrix); {REMEDY}"
        )
    blocks = {name.split(".")[2] for name in state if str(name).startswith(f"{PREFIX}blocks.")}
    stored = {"n_layers": len(blocks), "vocab_size": embed.shape[0], "dim": embed.shape[1]}
    for key, value in values.items():
        if type(value) is int and value != stored.get(key, value):
            raise ValueError(f"its config has {key}={value}, and its tensors have {stored[key]}; {REMEDY}")
        if type(value) is int and abs(value) >= 2**63:
            raise ValueError(f"its config has {key}={value}, which exceeds 64 bits; {REMEDY}")


def _check_positions(config: GPTConfig, state: dict[str, Any]) -> None:
    """Limits what is allocated without a parameter of that size: rotary tables, slopes of ALiBi, the KV cache."""
    query = state.get(f"{PREFIX}blocks.0.attn.q_proj.weight")
    rows = query.shape[0] if isinstance(query, Tensor) and query.dim() else 0
    if config.n_heads * config.head_size != rows:
        heads = f"n_heads={config.n_heads} with {config.head_size} elements each"
        raise ValueError(f"its config has {heads}, and its tensors have {rows} elements in all heads; {REMEDY}")
    if config.context_length * max(config.head_size, 2) > MAX_POSITION_ELEMENTS:
        limit = MAX_POSITION_ELEMENTS // max(config.head_size, 2)
        raise ValueError(f"its config has context_length={config.context_length}, and the limit is {limit}; {REMEDY}")


def _all_blocks(shapes: dict[str, torch.Size], n_layers: int) -> dict[str, torch.Size]:
    """The shapes of all parameters of a checkpoint, from those of a model with one block."""
    first = "blocks.0."
    names = [
        (name.replace(first, f"blocks.{i}.", 1), shape)
        for i in range(n_layers)
        for name, shape in shapes.items()
        if i == 0 or name.startswith(first)
    ]
    return {PREFIX + name: shape for name, shape in names}


def _check_weights(expected: dict[str, torch.Size], state: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} does not belong to the model" for name in state if name not in expected]
    for name, tensor in state.items():
        shape = expected.get(name)
        if not isinstance(tensor, Tensor):
            problems.append(f"{name} is of type {type(tensor).__name__}")
        elif shape is not None and tensor.shape != shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, and needs {tuple(shape)}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            problems.append(f"{name} is {tensor.dtype}, and must be a floating-point tensor")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"its tensors do not match its config ({'; '.join(problems[:3])}{more}); {REMEDY}")
