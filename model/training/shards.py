"""Parameters that are sharded over processes: torch's DTensors, and what this process has of them.

Plain tensors pass through every function unchanged. DTensor is imported late: it takes most of a second, and a run of
one process has none.
"""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory; call it without gradients."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue] a DTensor


def gather(shard: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which every rank has the shard that it has of `like`; all ranks must call it."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **layout).full_tensor()


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank has of `whole` if that is sharded as `like` is. Nothing is sent."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements).to_local()
