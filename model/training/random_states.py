"""The states of torch's random generators in a checkpoint, of all processes of a run.

n bytes of a state, W processes.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a run on `device` uses, by kind of device: (n,), or (W, n) for W > 1."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device.type).get_rng_state()
    return states if world_size() == 1 else {kind: _of_all(state, device) for kind, state in states.items()}


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Continues the random numbers of this process. If the number of processes has changed, it keeps its own seed's."""
    for kind, state in states.items():
        by_rank = state.view(-1, state.shape[-1])  # (W, n)
        if len(by_rank) == world_size():
            own = by_rank[dist.get_rank() if len(by_rank) > 1 else 0].clone()  # torch reads a row from the wrong place
            torch.set_rng_state(own) if kind == "cpu" else torch.get_device_module(kind).set_rng_state(own)


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _of_all(state: Tensor, device: torch.device) -> Tensor:
    """The states of all processes, (W, n), sent from device to device."""
    own = state.to(device)
    states = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(states, own)
    return torch.stack(states).cpu()
