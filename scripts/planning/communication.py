"""Bytes that one device sends in a step. B windows, T context length, C width, V vocabulary, L layers.

Of n ranks and a tensor of S bytes, a ring sends (n - 1) / n S per rank to gather or to reduce-scatter it, and twice as
much to all-reduce it (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
"""

from tril.model.training.optim import param_groups
from tril.scripts.planning.rank_memory import RankModel


def ring(ranks: int, n_bytes: float) -> float:
    """Bytes that a rank sends to gather `n_bytes` over the ranks, or to reduce-scatter them."""
    return (ranks - 1) / ranks * n_bytes


def sent_per_step(rank: RankModel, accumulate: int) -> dict[str, float]:
    """What is sent -> bytes per step and device.

    Args:
        accumulate: micro-batches per step.
    """
    if not rank.grid.sharded:  # Li et al. 2020 (PyTorch Distributed): all gradients, once per step
        gradients = rank.weight_bytes * rank.parts.n_parameters()
        return {"gradients": 2 * ring(rank.grid.world_size, gradients)}
    sent = {"weights": accumulate * gathered_weights(rank)}
    sent["gradients"] = ring(rank.grid.world_size, rank.weight_bytes * rank.parts.n_parameters())
    sent["Muon's matrices"] = ring(rank.grid.world_size, muon_bytes(rank))
    return sent


def gathered_weights(rank: RankModel) -> float:
    """FSDP2's gathers of a micro-batch: blocks for the forward and again for the backward pass, the rest once.

    Zhao et al. 2023 (https://arxiv.org/abs/2304.11277), section 3; gathered in the dtype of the weights.
    """
    return ring(rank.grid.world_size, 2 * rank.block * rank.config.n_layers + rank.root)


def muon_bytes(rank: RankModel) -> int:
    """The matrices that `MuonAdamW` gathers whole on every rank, once per step."""
    local = [p for group in param_groups(rank.parts, rank.optim) if group["kind"] == "muon" for p in group["params"]]
    return rank.weight_bytes * sum(p.numel() for p in local)
