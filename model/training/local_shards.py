"""Parameters that are divided over processes: torch's DTensors, and what this process has of them.

Plain tensors pass through every function unchanged. DTensor is imported late: it takes most of a second, and a run of
one process has none.
"""

from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory; call it without gradients."""
    return tensor.to_local() if is_divided(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue] a DTensor


def local_gradients(params: list[Tensor]) -> list[Tensor]:
    """What this rank has of each gradient, divided as its parameter is; parameters without a gradient are left out."""
    for p in params:
        assert getattr(p.grad, "placements", None) in (None, getattr(p, "placements", None)), "see place_gradients"
    return [local(p.grad) for p in params if p.grad is not None]


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which every rank has the part that it has of `like`; all ranks must call it."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **layout).full_tensor()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank has of the tensor `like`. Nothing is sent."""
    if not is_divided(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()
