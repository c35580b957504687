"""Attention with linear biases (ALiBi; Press et al. 2022, arXiv:2108.12409): positions without embeddings.

H query heads, T queries, S keys. Each score is reduced in proportion to the distance between query and key.
"""

import torch
from torch import Tensor


def alibi_slopes(n_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, float32 (H,): 2^(-8/H), 2^(-16/H), ..., 2^-8 where H is a power of 2.

    Otherwise the slopes of the next smaller power of 2, P, and then every second one of 2 P, as in the authors' code
    (https://github.com/ofirpress/attention_with_linear_biases).
    """
    power = 1 << (n_heads.bit_length() - 1)  # the largest power of 2 up to H
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes, device=device)


def alibi_bias(slopes: Tensor, n_queries: int, n_keys: int, *, start: Tensor | None = None) -> Tensor:
    """-slope * |position(query) - position(key)|, the `bias` of `tril.model.attention.attention`.

    Distances are counted in columns, as in the causal mask, so left padding and packed documents do not change them.

    Args:
        slopes: (H,).
        start: position of the first query, (1,) int64; None: the last query is at the position of the last key.

    Returns:
        (H, T, S), in the dtype of the slopes.
    """
    first = n_keys - n_queries if start is None else start
    query = torch.arange(n_queries, device=slopes.device)[:, None] + first  # (T, 1)
    distance = (query - torch.arange(n_keys, device=slopes.device)).abs()  # (T, S)
    return -slopes[:, None, None] * distance
