"""Bytes that one device sends in a step. B windows, T context length, C width, V vocabulary, L layers.

Of n ranks and a tensor of S bytes, a ring sends (n - 1) / n S per rank to gather or to reduce-scatter it, and twice as
much to all-reduce it (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
"""

from tril.model.autocast import AUTOCAST
from tril.model.training.optim import param_groups
from tril.scripts.planning.rank_memory import RankModel


def ring(ranks: int, n_bytes: float) -> float:
    """Bytes that a rank sends to gather `n_bytes` over the ranks, or to reduce-scatter them."""
    return (ranks - 1) / ranks * n_bytes


def sent_per_step(rank: RankModel, batch_size: int, accumulate: int) -> dict[str, float]:
    """What is sent -> bytes per step and device.

    Args:
        batch_size: windows per micro-batch.
        accumulate: micro-batches per step.
    """
    if not rank.grid.sharded:  # Li et al. 2020 (PyTorch Distributed): all gradients, once per step
        gradients = rank.weight_bytes * rank.parts.n_parameters()
        return {"gradients": 2 * ring(rank.grid.world_size, gradients)}
    sent = {"weights": accumulate * gathered_weights(rank)}
    sent["gradients"] = ring(rank.grid.data_ranks, rank.weight_bytes * rank.parts.n_parameters())
    sent["Muon's matrices"] = ring(rank.grid.world_size, muon_bytes(rank))
    sent["activations"] = accumulate * tensor_parallel(rank, batch_size)
    return sent


def gathered_weights(rank: RankModel) -> float:
    """FSDP2's gathers of a micro-batch: blocks for the forward and again for the backward pass, the rest once.

    Zhao et al. 2023 (https://arxiv.org/abs/2304.11277), section 3; gathered in the dtype of the weights.
    """
    return ring(rank.grid.data_ranks, 2 * rank.block * rank.config.n_layers + rank.root)


def muon_bytes(rank: RankModel) -> int:
    """The matrices that `MuonAdamW` gathers whole on every rank, once per step."""
    local = [p for group in param_groups(rank.parts, rank.optim) if group["kind"] == "muon" for p in group["params"]]
    return rank.weight_bytes * rank.grid.tensor_ranks * sum(p.numel() for p in local)


def tensor_parallel(rank: RankModel, batch_size: int) -> float:
    """All-reduces of (B, T, C) and the gathered logits (B, T, V) of a micro-batch, see `split_matrices`.

    Forward: one after attention and one after the FFN of each block (Shoeybi et al. 2019, section 3), one after the
    embedding. Backward: one for the input of each matrix that is divided by rows: q, k, v, up and gate, and the head.
    """
    config, ranks = rank.config, rank.grid.tensor_ranks
    if ranks == 1:
        return 0.0
    has_attn, has_mlp = config.n_heads > 0, config.mlp != "none"
    forward = (has_attn + has_mlp) * config.n_layers
    if config.checkpoint_activations:  # computing a block again stops before its last sum, which nothing needs
        forward += (has_attn + has_mlp - 1) * config.n_layers
    backward = (3 * has_attn + has_mlp + (config.mlp == "swiglu")) * config.n_layers + 1
    size = 2 if rank.hardware.precision in AUTOCAST else rank.weight_bytes  # of an output under autocast
    positions = batch_size * config.context_length
    sums = positions * config.dim * (size * forward + rank.weight_bytes * (1 + backward))
    return 2 * ring(ranks, sums) + ring(ranks, positions * config.vocab_size * size)
