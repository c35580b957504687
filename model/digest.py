"""SHA-256 of plain containers and values with tensors in them, as `torch.load(weights_only=True)` reads them."""

import hashlib
import math
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

MAPPINGS = (dict, OrderedDict)
SEQUENCES = (list, tuple, torch.Size)
VALUES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
MAX_DEPTH = 100  # Lightning's checkpoints have 8 levels of containers


def digest(content: Any, *, max_bytes: float = math.inf) -> str:
    """sha256 of all containers and values of `content`, and of the dtype, shape and numbers of each tensor.

    Args:
        max_bytes: of all tensors, so that a small file cannot stand for terabytes.

    Raises:
        ValueError: an object that is not plain, a tensor that is not dense, too deep, or too many bytes.
    """
    lines: list[str] = []  # one for each object, in depth-first order
    tensors: list[Tensor] = []
    visited: dict[int, int] = {}  # containers by id, since a pickle can refer to one many times
    stack: list[tuple[Any, int]] = [(content, 0)]  # not recursive: the file decides how deep it is
    while stack:
        value, depth = stack.pop()
        kind = type(value)
        if isinstance(value, Tensor):
            _check_dense(value)
            tensors.append(value)
            lines.append(f"tensor {value.dtype} {tuple(value.shape)}")
        elif kind in VALUES:
            lines.append(f"{kind.__name__} {value!a}")
        elif kind not in MAPPINGS + SEQUENCES:
            raise ValueError(f"it has a {kind.__name__}, and must have plain values and tensors")
        elif id(value) in visited:
            lines.append(f"container {visited[id(value)]}")
        elif depth > MAX_DEPTH:
            raise ValueError(f"its containers have more than {MAX_DEPTH} levels")
        else:
            visited[id(value)] = len(visited)
            is_mapping = kind in MAPPINGS
            parts = [part for item in value.items() for part in item] if is_mapping else list(value)
            lines.append(f"{'mapping' if is_mapping else kind.__name__} {len(parts)}")
            stack.extend((part, depth + 1) for part in reversed(parts))
    return hashlib.sha256("\n".join([*lines, *_digests(tensors, max_bytes)]).encode()).hexdigest()


def _digests(tensors: list[Tensor], max_bytes: float) -> list[str]:
    """sha256 of the numbers of each tensor in row-major order; tied weights are hashed once."""
    memory = [(x.device, x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors]
    distinct = dict(zip(memory, tensors, strict=True))
    n_bytes = sum(tensor.nbytes for tensor in distinct.values())
    if n_bytes > max_bytes:
        raise ValueError(f"its tensors have {n_bytes} bytes, more than the {max_bytes} of the file")
    with ThreadPoolExecutor() as pool:  # hashlib releases the global interpreter lock
        found = dict(zip(distinct, pool.map(_sha256, distinct.values()), strict=True))
    return [found[key] for key in memory]


def _sha256(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(numbers.numpy().data).hexdigest()


def _check_dense(x: Tensor) -> None:
    is_other = x.is_meta or x.is_nested or x.is_quantized or x.is_complex() or x.is_neg()
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or is_other:
        raise ValueError(f"it has a tensor of {x.dtype} and {x.layout} that is not dense and real")
