"""What the attention of each head looks like, as numbers.

Letters: B batch, T queries, S keys, H heads, L layers.

Every score is a function of the weights (B, H, T, S), where the last query is aligned with the last key. The reference
is a uniform head, which spreads its weight evenly over the visible keys.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT
from tril.model.heads.attention_maps import TokenWindows, capture_attention
from tril.model.masks import visible_keys

SCORES = {
    "entropy": "nats",
    "entropy_share": "share of the entropy of uniform weights",
    "previous": "weight of the previous token",
    "first": "weight of the first token of the window; with separate documents, of the document",
    "self": "weight of the token itself",
    "distance": "mean distance, tokens back",
    "induction": "weight of the token after the previous occurrence of the same token, in a repeated random sequence",
}
N_REPEATS = 32  # random sequences for the induction score


def entropy(weights: Tensor) -> Tensor:
    """-sum_s w_s ln w_s, in nats: (B, H, T, S) -> (B, H, T)."""
    return torch.special.entr(weights).sum(-1)


def first_token_mass(weights: Tensor, first: Tensor | None = None) -> Tensor:
    """The weight of the first key, or of key `first` (B, T) int64: (B, H, T, S) -> (B, H, T)."""
    if first is None:
        return weights[..., 0]
    return weights.gather(-1, first[:, None, :, None].expand(*weights.shape[:-1], 1)).squeeze(-1)


def self_mass(weights: Tensor) -> Tensor:
    """The weight of the query's own position, for T <= S: (B, H, T, S) -> (B, H, T)."""
    return weights.diagonal(weights.shape[-1] - weights.shape[-2], dim1=-2, dim2=-1)


def previous_token_mass(weights: Tensor) -> Tensor:
    """The weight of the position before the query's, 0 if there is none, for T <= S: (B, H, T, S) -> (B, H, T)."""
    previous = weights.diagonal(weights.shape[-1] - weights.shape[-2] - 1, dim1=-2, dim2=-1)
    return F.pad(previous, (weights.shape[-2] - previous.shape[-1], 0))


def mean_distance(weights: Tensor) -> Tensor:
    """sum_s w_s * (position of the query - position of s), in tokens: (B, H, T, S) -> (B, H, T)."""
    n_queries, n_keys = weights.shape[-2:]
    key = torch.arange(n_keys, dtype=weights.dtype, device=weights.device)
    return weights.sum(-1) * key[n_keys - n_queries :] - weights @ key


def induction_mass(weights: Tensor) -> Tensor:
    """The weight that the second copy of n tokens puts on the token after the previous occurrence of its own.

    That token is n - 1 back. See Olsson et al. 2022, "In-context Learning and Induction Heads".

    Args:
        weights: (B, H, 2n, 2n), of n tokens followed by the same n tokens.

    Returns:
        (B, H, n), for the positions of the second copy.
    """
    n = weights.shape[-1] // 2
    return weights.diagonal(1 - n, dim1=-2, dim2=-1)[..., 1:]  # without the last position of the first copy


@dataclass(frozen=True)
class HeadScores:
    """Means over positions and windows; NaN where there is nothing to average.

    Attributes:
        heads: for each name in SCORES, (L, H) float64.
        uniform: for each name, the score of uniform weights.
        induction_length: n of the repeated sequences.
        copy_losses: mean loss of the first and of the second copy of the repeated sequences, in nats per token, without
            the first token of each, which nothing predicts. Their difference is what the model learns from the first
            copy, the in-context learning of Olsson et al. 2022.
    """

    heads: dict[str, Tensor]
    uniform: dict[str, float]
    induction_length: int
    copy_losses: tuple[float, float]


def score_heads(
    model: GPT,
    text: TokenWindows,
    *,
    alphabet: Tensor,
    seed: int,
    n_repeats: int = N_REPEATS,
    max_length: int | None = None,
) -> HeadScores:
    """All scores, in evaluation mode.

    The scores over the text skip positions that see only one key: the first of a window, or of each separate document.
    The induction score uses sequences of distinct tokens.

    Args:
        alphabet: (n,) int64, the ids to draw the sequences from.
        seed: of these draws.
        n_repeats: number of sequences.
        max_length: of a copy; None: half of the context.
    """
    config, losses = model.config, [math.nan, math.nan]
    # The token to attend to must be visible.
    length = min(max_length or 2**63, config.context_length // 2, len(alphabet), config.window or config.context_length)
    repeats, nll = repeated_tokens(alphabet, length, seed, n_repeats), list[Tensor]()
    with inference(list(model.modules())):
        heads, uniform = _means(model, text, _text_scores, lambda ids, _, options: model.hidden(ids, **options))
        if length > 1:
            means = _means(
                model,
                TokenWindows(repeats, repeats.roll(-1, 1)),
                lambda weights, *_: {"induction": induction_mass(weights)},
                lambda ids, targets, _: nll.append(model.nll(ids, targets)),
            )
            of_tokens = torch.cat(nll)  # (n_repeats, 2n), of the next token each
            losses = [of_tokens[:, start : start + length - 1].mean().item() for start in (0, length)]
        else:  # the token to attend to would be the query itself
            means = {"induction": torch.full((config.n_layers, config.n_heads), math.nan)}, {"induction": math.nan}
    return HeadScores(heads | means[0], uniform | means[1], length, (losses[0], losses[1]))


def alphabet_of(tokenizer: Tokenizer, eot_id: int) -> Tensor:
    """The ids to draw random sequences from, (n,) int64: all tokens except end-of-text."""
    ids = torch.tensor(sorted(tokenizer.get_vocab().values()))  # may have gaps
    return ids[ids != eot_id]


def repeated_tokens(alphabet: Tensor, length: int, seed: int, n_repeats: int = N_REPEATS) -> Tensor:
    """Sequences of distinct ids, each written twice: (n_repeats, 2 * length) int64."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(len(alphabet), generator=generator)[:length] for _ in range(n_repeats)]
    return alphabet[torch.stack(draws)].repeat(1, 2)


def uniform_weights(visible: Tensor) -> Tensor:
    """Weights spread evenly over the visible keys: (B, T, S) bool -> (B, 1, T, S)."""
    return (visible / visible.sum(-1, keepdim=True))[:, None]


def _text_scores(weights: Tensor, visible: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
    """(B, H, T) each; NaN where only one key is visible."""
    n_visible = visible.sum(-1)[:, None]  # (B, 1, T)
    first = None
    if "positions" in options:  # within documents
        first = torch.arange(weights.shape[-2], device=weights.device) - options["positions"]  # (B, T)
    nats = entropy(weights)
    scores = {
        "entropy": nats,
        "entropy_share": nats / n_visible.log(),
        "previous": previous_token_mass(weights),
        "first": first_token_mass(weights, first),
        "self": self_mass(weights),
        "distance": mean_distance(weights),
    }
    return {name: values.masked_fill(n_visible < 2, math.nan) for name, values in scores.items()}


def _means(
    model: GPT, text: TokenWindows, score: Callable[..., dict[str, Tensor]], run: Callable[..., Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The means of score(weights, visible, options), without NaN: (L, H) of every head, and of uniform weights.

    Args:
        run: passes a batch through the model, given ids, targets and options.
    """
    n_layers = model.config.n_layers
    sums: list[dict[str, Any]] = [defaultdict(float) for _ in range(n_layers + 1)]  # the last is for uniform weights
    counts: list[dict[str, Any]] = [defaultdict(int) for _ in range(n_layers + 1)]
    for ids, targets, options in text.batches(model.embed.weight.device):
        visible = _visible(model, ids, options)

        def accumulate(layer: int, weights: Tensor, visible=visible, options=options) -> None:
            for name, values in score(weights, visible, options).items():
                values = values.cpu().double()  # (B, H, T)
                sums[layer][name] += values.nansum((0, 2))
                counts[layer][name] += (~values.isnan()).sum((0, 2))

        with capture_attention(model, accumulate):
            run(ids, targets, options)
        accumulate(n_layers, uniform_weights(visible))
    means = {name: [s[name] / c[name] for s, c in zip(sums, counts, strict=True)] for name in sums[0]}  # L + 1 of (H,)
    heads = {name: torch.stack(layers[:-1]) for name, layers in means.items()}  # (L, H) each
    return heads, {name: layers[-1].item() for name, layers in means.items()}


def _visible(model: GPT, ids: Tensor, options: dict[str, Tensor]) -> Tensor:
    """Which keys each query may attend to: (B, T, T) bool."""
    (batch, length), config = ids.shape, model.config
    visible = visible_keys(
        length,
        length,
        mask=options.get("mask"),
        bias=None,
        causal=config.causal,
        window=config.window,
        device=ids.device,
    )
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=ids.device)
    return visible.expand(batch, 1, length, length)[:, 0]
