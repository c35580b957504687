"""Runs code in float64, also where it names float32: a twin of a model whose roundings are 10^9 times smaller."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOWER = (torch.float32, torch.bfloat16, torch.float16)


class Float64Mode(TorchFunctionMode):
    """Gives every function of torch float64 tensors and dtypes for lower ones, and returns float64.

    Functions that change a tensor in place run unchanged. Modules that compare dtypes, such as nn.LSTM, need float64
    weights in addition.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16"):  # these methods take no dtype
            return args[0].double()
        return tree_map(_raised, func(*tree_map(_raised, args), **tree_map(_raised, kwargs)))


def _raised(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype in LOWER:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value
