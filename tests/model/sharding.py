"""Local heads: the part of an attention module that one rank of a tensor-parallel group computes.

H query heads, G key/value heads, D head size, D_v size of a value.
"""

import copy

import torch
from torch import nn

from tril.model.attention import MultiHeadAttention


@torch.no_grad()
def shard_heads(attn: MultiHeadAttention, rank: int, world_size: int) -> MultiHeadAttention:
    """The module of one rank, with H / world_size query heads and G / world_size key/value heads (Shoeybi et al. 2019).

    The sum of the outputs over all ranks is the output of the full module; without an output projection, their
    concatenation is. The bias of the output projection belongs to rank 0. The shards have no residual dropout: the
    caller applies it to the sum. The caller also slices a mask, bias or gate that has a dimension of heads, and adds up
    the gradients of the gains of `q_norm` and `k_norm`, which all heads share.

    Args:
        attn: the full module, which stays unchanged; the shard has copies of its slices.
        rank: 0 to world_size - 1.

    Raises:
        ValueError: world_size does not divide H and G, or a rank out of range.
    """
    for name, count in {"n_heads": attn.n_heads, "n_kv_heads": attn.n_kv_heads}.items():
        if world_size < 1 or count % world_size:
            raise ValueError(f"world_size={world_size} must divide {name}={count}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
    shard = copy.deepcopy(attn)
    shard.n_heads, shard.n_kv_heads = attn.n_heads // world_size, attn.n_kv_heads // world_size
    for projection in (shard.q_proj, shard.k_proj, shard.v_proj):
        _keep(projection, rank, world_size, dim=0)
    if isinstance(shard.o_proj, nn.Linear):
        _keep(shard.o_proj, rank, world_size, dim=1)
        if shard.o_proj.bias is not None and rank > 0:
            shard.o_proj.register_parameter("bias", None)
    shard.resid_dropout = nn.Dropout(0.0)
    return shard


def _keep(linear: nn.Linear, rank: int, world_size: int, *, dim: int) -> None:
    """Keeps one of `world_size` equal parts of the weight along `dim`; with dim=0 of the bias as well."""
    names = ("weight", "bias") if dim == 0 else ("weight",)
    for name in names:
        full = getattr(linear, name)
        if full is not None:
            part = full.chunk(world_size, dim=dim)[rank].clone()
            setattr(linear, name, nn.Parameter(part, requires_grad=full.requires_grad))
    linear.out_features, linear.in_features = linear.weight.shape
