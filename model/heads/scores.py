"""What the attention of each head looks like, in figures.

B batch, T queries, S keys, H heads, L layers. Every figure is a function of the weights (B, H, T, S), the last query standing at the last
key. Beside the heads stands one that spreads its weight evenly over the keys that it may see.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.attention import visible_keys
from tril.model.generation.generate import inference
from tril.model.gpt import GPT
from tril.model.heads.attention_maps import Text, observed_weights

SCORES = {
    "entropy": "nats",
    "entropy_share": "of the entropy of even weights",
    "previous": "mass on the token before",
    "first": "mass on the first token of the window; with documents kept apart, of the document",
    "self": "mass on the token itself",
    "distance": "mean distance, tokens back",
    "induction": "mass on the token after the previous occurrence of the same token, in a repeated random sequence",
}
N_REPEATS = 32  # random sequences for the induction score


def entropy(weights: Tensor) -> Tensor:
    """-sum_s w_s ln w_s, in nats: (B, H, T, S) -> (B, H, T)"""
    return torch.special.entr(weights).sum(-1)


def first_token_mass(weights: Tensor, first: Tensor | None = None) -> Tensor:
    """The weight of the first key; with `first`, int64 (B, T), of the key with that number: (B, H, T, S) -> (B, H, T)"""
    if first is None:
        return weights[..., 0]
    return weights.gather(-1, first[:, None, :, None].expand(*weights.shape[:-1], 1)).squeeze(-1)


def self_mass(weights: Tensor) -> Tensor:
    """The weight of the query's own position; T <= S: (B, H, T, S) -> (B, H, T)"""
    return weights.diagonal(weights.shape[-1] - weights.shape[-2], dim1=-2, dim2=-1)


def previous_token_mass(weights: Tensor) -> Tensor:
    """The weight of the position before the query's own, 0 where there is none; T <= S: (B, H, T, S) -> (B, H, T)"""
    before = weights.diagonal(weights.shape[-1] - weights.shape[-2] - 1, dim1=-2, dim2=-1)
    return F.pad(before, (weights.shape[-2] - before.shape[-1], 0))


def mean_distance(weights: Tensor) -> Tensor:
    """sum_s w_s * (position of the query - position of s), in tokens back: (B, H, T, S) -> (B, H, T)"""
    n_queries, n_keys = weights.shape[-2:]
    key = torch.arange(n_keys, dtype=weights.dtype, device=weights.device)
    return weights.sum(-1) * key[n_keys - n_queries :] - weights @ key


def induction_mass(weights: Tensor) -> Tensor:
    """Of a sequence of n tokens and the same n again, the weight that each position of the second copy puts on the token after the previous
    occurrence of its own (Olsson et al. 2022, "In-context Learning and Induction Heads"), n - 1 back: (B, H, 2n, 2n) -> (B, H, n)
    """
    n = weights.shape[-1] // 2
    return weights.diagonal(1 - n, dim1=-2, dim2=-1)[..., 1:]  # without the last position of the first copy


@dataclass(frozen=True)
class HeadScores:
    """Means over positions and windows; NaN where there is nothing to take the mean of.

    heads             for each name in SCORES float64 (L, H)
    uniform           for each name the same of weights that are spread evenly over the visible keys
    induction_length  n of the repeated sequences
    """

    heads: dict[str, Tensor]
    uniform: dict[str, float]
    induction_length: int

    def cells(self) -> list[list[str]]:
        """As the cells of a table, line by line; even weights come last."""
        lines = [["head", *SCORES]]
        for layer, head in itertools.product(*map(range, self.heads["entropy"].shape)):
            lines.append([f"L{layer}H{head}", *(f"{self.heads[name][layer, head]:.3f}" for name in SCORES)])
        return [*lines, ["uniform", *(f"{self.uniform[name]:.3f}" for name in SCORES)]]


def score_heads(model: GPT, text: Text, *, alphabet: Tensor, seed: int) -> HeadScores:
    """All scores, in evaluation mode.

    Over the text, positions that may see one key alone are left out: the first of a window, or of a document where those are kept apart.
    The induction score is over `N_REPEATS` sequences of different tokens, drawn with `seed` from the ids `alphabet` (n,).
    """
    config = model.config
    length = min(
        config.context_length // 2, len(alphabet), config.window or config.context_length
    )  # the token to be found must be visible
    repeats = repeated_tokens(alphabet, length, seed)
    heads, uniform = text_scores(model, text)
    with inference(list(model.modules())):
        if length > 1:  # else the token to be found is the query itself
            found = _means(
                model, Text(repeats, repeats), lambda weights, visible, options: {"induction": induction_mass(weights)}
            )
        else:
            found = {"induction": torch.full((config.n_layers, config.n_heads), math.nan)}, {"induction": math.nan}
    return HeadScores(heads | found[0], uniform | found[1], length)


def text_scores(model: GPT, text: Text) -> tuple[dict[str, Tensor], dict[str, float]]:
    """All scores but that of induction, as the `heads` and `uniform` of `HeadScores`, in evaluation mode."""
    with inference(list(model.modules())):
        return _means(model, text, _text_scores)


def repeated_tokens(alphabet: Tensor, length: int, seed: int) -> Tensor:
    """`N_REPEATS` sequences of different ids, each written twice: int64 (N_REPEATS, 2 * length)"""
    generator = torch.Generator().manual_seed(seed)
    once = torch.stack(
        [alphabet[torch.randperm(len(alphabet), generator=generator)[:length]] for _ in range(N_REPEATS)]
    )
    return once.repeat(1, 2)


def even_weights(visible: Tensor) -> Tensor:
    """Spread over the visible keys, bool (B, T, S) -> (B, 1, T, S)"""
    return (visible / visible.sum(-1, keepdim=True))[:, None]


def _text_scores(weights: Tensor, visible: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each (B, H, T), NaN where there is nothing to choose."""
    n_visible = visible.sum(-1)[:, None]  # (B, 1, T)
    first = None
    if "positions" in options:  # of the documents
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
    model: GPT, text: Text, score: Callable[..., dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The means of score(weights, visible, options) over what is not NaN: of every head (L, H), and of even weights."""
    n_layers = model.config.n_layers
    sums = [defaultdict(float) for _ in range(n_layers + 1)]  # the last one for even weights
    counts = [defaultdict(int) for _ in range(n_layers + 1)]
    for ids, _, options in text.batches(model.embed.weight.device):
        visible = _visible(model, ids, options)

        def see(layer: int, weights: Tensor, visible=visible, options=options) -> None:
            for name, values in score(weights, visible, options).items():
                values = values.cpu().double()  # (B, H, T)
                sums[layer][name] += values.nansum((0, 2))
                counts[layer][name] += (~values.isnan()).sum((0, 2))

        with observed_weights(model, see):
            model.hidden(ids, **options)
        see(n_layers, even_weights(visible))
    means = [
        {name: total / count[name] for name, total in its.items()} for its, count in zip(sums, counts)
    ]  # (H,) each
    heads = {name: torch.stack([its[name] for its in means[:-1]]) for name in means[0]}  # (L, H) each
    return heads, {name: value.item() for name, value in means[-1].items()}


def _visible(model: GPT, ids: Tensor, options: dict[str, Tensor]) -> Tensor:
    """Which keys each query may see: bool (B, T, T)"""
    (batch, length), config = ids.shape, model.config
    visible = visible_keys(
        length, length, mask=options.get("mask"), causal=config.causal, window=config.window, device=ids.device
    )
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=ids.device)
    return visible.expand(batch, 1, length, length)[:, 0]
