"""SHA-256 checksums of the content of a checkpoint: one for the bytes of each tensor, and one for everything else.

The content is a tree of plain containers and values with dense tensors, as `torch.load(weights_only=True)` reads it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

MAPPINGS = (dict, OrderedDict)
SEQUENCES = (list, tuple, torch.Size)
VALUES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
MAX_DEPTH = 100  # Lightning's checkpoints have 8 levels of containers


def checksums(
    content: dict[str, Any], entries: Collection[str] | None = None, *, max_bytes: int | None = None
) -> dict[str, Any]:
    """{"tensors": {path: sha256}, "rest": sha256}, in hexadecimal digits.

    The checksum of a tensor is that of its values in row-major order. "rest" covers the containers, all other values,
    and the path, dtype and shape of each tensor.

    Args:
        entries: keys of `content` whose tensors are hashed; None: all. "rest" always covers the whole content.
        max_bytes: limit of the bytes to hash, so that a small file cannot stand for terabytes.

    Raises:
        ValueError: the content has an object that is not plain, a tensor that is not dense, or too many bytes.
    """
    rest, tensors = split(content)
    chosen = {path: tensor for path, tensor in tensors.items() if entries is None or path.split("/")[0] in entries}
    distinct = {_memory(tensor): tensor for tensor in chosen.values()}  # tied weights are hashed once
    n_bytes = sum(tensor.nbytes for tensor in distinct.values())
    if max_bytes is not None and n_bytes > max_bytes:
        raise ValueError(f"its tensors have {n_bytes} bytes, more than the {max_bytes} of the file")
    with ThreadPoolExecutor() as pool:  # hashlib releases the global interpreter lock
        digests = dict(zip(distinct, pool.map(_sha256, distinct.values()), strict=True))
    return {"tensors": {path: digests[_memory(tensor)] for path, tensor in chosen.items()}, "rest": rest}


def split(content: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """The checksum of everything but the values of the tensors, and the tensors by their path, keys joined with "/".

    Raises:
        ValueError: the content has an object that is not plain, or a tensor that is not dense.
    """
    lines: list[str] = []  # one for each object, in depth-first order
    tensors: dict[str, Tensor] = {}
    visited: dict[int, int] = {}  # containers by id, since a pickle can refer to one many times
    stack: list[tuple[tuple, Any]] = [((), content)]  # not recursive: the file decides how deep it is
    while stack:
        keys, value = stack.pop()
        path, kind = "/".join(map(str, keys)), type(value)
        if isinstance(value, Tensor):
            _check_dense(value, path)
            if path in tensors:
                raise ValueError(f"it has two tensors {path}")
            tensors[path] = value
            lines.append(f"tensor {ascii(path)} {value.dtype} {tuple(value.shape)} {value.requires_grad}")
        elif kind in VALUES:
            lines.append(f"{kind.__name__} {ascii(value)}")  # unlike repr, ascii is the same in every version of Python
        elif kind not in MAPPINGS + SEQUENCES:
            raise ValueError(f"{path} is of type {kind.__name__}, and must be a plain value or a tensor")
        elif id(value) in visited:
            lines.append(f"container {visited[id(value)]}")
        elif len(keys) > MAX_DEPTH:
            raise ValueError(f"its containers have more than {MAX_DEPTH} levels")
        else:
            visited[id(value)] = len(visited)
            lines.append(f"{kind.__name__} {_keys(value, path)}")
            stack.extend(reversed([((*keys, key), part) for key, part in _parts(value)]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest(), tensors


def _keys(value: Any, path: str) -> str:
    """What a line says of a container: the keys of a mapping, the length of a sequence."""
    if type(value) in SEQUENCES:
        return str(len(value))
    wrong = [type(key).__name__ for key in value if type(key) not in VALUES]
    if wrong:
        raise ValueError(f"{path} has a key of type {wrong[0]}, and must have plain keys")
    return ascii(list(value))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if type(value) in SEQUENCES:
        return list(enumerate(value))
    attributes = [("__dict__", vars(value))] if type(value) is OrderedDict else []  # _metadata of a state_dict
    return [*value.items(), *attributes]


def _check_dense(tensor: Tensor, path: str) -> None:
    """Raises ValueError unless the tensor is what a state_dict holds: real numbers, each with memory of its own."""
    problem = None
    if type(tensor) not in (Tensor, nn.Parameter) or vars(tensor):
        problem = f"a {type(tensor).__name__} with other content than its values"
    elif tensor.layout != torch.strided or tensor.is_nested:
        problem = f"of the layout {tensor.layout}"
    elif tensor.is_meta:
        problem = "on the device meta, without values"
    elif tensor.is_quantized or tensor.is_complex() or tensor.is_neg():
        problem = f"a quantized, complex or negated tensor of {tensor.dtype}"
    elif _overlaps(tensor):
        problem = f"of the strides {tensor.stride()}, which use the same memory for several elements"
    if problem:
        raise ValueError(f"{path} is {problem}; a checkpoint holds dense real tensors")


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory. Strides of no contiguous tensor with permuted dimensions may count as well."""
    end = 1  # elements from the first to the last of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end += stride * (size - 1)
    return False


def _memory(tensor: Tensor) -> tuple:
    """Equal for tensors that show the same memory in the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sha256(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()
