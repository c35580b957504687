"""What the attention of each head looks like, as numbers.

Letters: B batch, T tokens, H heads, L layers, N windows.

Every score is a function of the weights (B, H, T, T) of each query on each key. The reference is a uniform head, which
spreads its weight evenly over the visible keys.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tril.model.attention import attention
from tril.model.comparison import UNCLEAR, WORSE
from tril.model.generation.generate import inference
from tril.model.gpt import GPT
from tril.model.heads.attention_maps import TokenWindows, capture_attention

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
DOES = {  # what a head does whose score is high
    "previous": "attends to the previous token",
    "first": "attends to the first token",
    "self": "attends to the token itself",
    "induction": "continues repeated text",
}
HIGH = 0.25  # and twice the score of uniform weights


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
    config = model.config
    # The token to attend to must be visible.
    length = min(max_length or 2**63, config.context_length // 2, len(alphabet), config.window or config.context_length)
    heads, uniform, _ = _means(model, text, text_scores)
    if length < 2:  # the token to attend to would be the query itself
        heads["induction"], uniform["induction"] = torch.full((config.n_layers, config.n_heads), math.nan), math.nan
        return HeadScores(heads, uniform, length, (math.nan, math.nan))
    repeats = repeated_tokens(alphabet, length, seed, n_repeats)
    induction, reference, nll = _means(model, TokenWindows(repeats, repeats.roll(-1, 1)), induction_scores)
    losses = nll[:, : length - 1].mean().item(), nll[:, length:-1].mean().item()  # nll: of the next token each
    return HeadScores(heads | induction, uniform | reference, length, losses)


def in_words(heads: Sequence[Mapping[str, Any]], uniform: Mapping[str, float]) -> str:
    """Sentences on what the heads do, and on which of them the loss depends.

    Args:
        heads: the name, the scores, and the change of the loss with its verdict of each head, see `Ablation.rows`.
        uniform: the scores of uniform weights.
    """
    sentences = []
    for row in heads:
        effect = "" if row["verdict"] == UNCLEAR else f"; without it {row['change']:+.2f} nats"
        for name, does in DOES.items():
            if row[name] >= max(HIGH, 2 * uniform[name]):
                score = f"{'induction ' if name == 'induction' else ''}{row[name]:.2f}"
                sentences.append(f"{row['head']} {does} ({score}{effect}).")
    if not sentences:
        sentences.append("No head does mostly one thing.")
    if needed := [row for row in heads if row["verdict"] == WORSE]:
        most = max(needed, key=lambda row: row["change"])
        sentences.append(f"The loss rises most without {most['head']}: by {most['change']:.2f} nats per token.")
    else:
        sentences.append("Without any single head, the loss does not rise measurably.")
    return " ".join(sentences)


def alphabet_of(tokenizer: Tokenizer, eot_id: int) -> Tensor:
    """The ids to draw random sequences from, (n,) int64: all tokens except end-of-text."""
    ids = torch.tensor(sorted(tokenizer.get_vocab().values()))  # may have gaps
    return ids[ids != eot_id]


def repeated_tokens(alphabet: Tensor, length: int, seed: int, n_repeats: int = N_REPEATS) -> Tensor:
    """Sequences of distinct ids, each written twice: (n_repeats, 2 * length) int64."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(len(alphabet), generator=generator)[:length] for _ in range(n_repeats)]
    return alphabet[torch.stack(draws)].repeat(1, 2)


def text_scores(weights: Tensor, uniform: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scores of a text: (B, H, T) each, NaN where only one key is visible.

    Args:
        uniform: the weights of a head with zero queries, spread evenly over the visible keys: (B, 1, T, T).
        options: of `GPT.forward`; the positions count from the start of a document.
    """
    n_visible = (uniform > 0).sum(-1)  # (B, 1, T)
    column = torch.arange(weights.shape[-1], device=weights.device)  # (T,)
    first = (column - options.get("positions", column)).view(-1, 1, len(column), 1)  # (B or 1, 1, T, 1)
    nats = torch.special.entr(weights).sum(-1)
    scores = {
        "entropy": nats,
        "entropy_share": nats / n_visible.log(),
        "previous": F.pad(weights.diagonal(-1, -2, -1), (1, 0)),
        "first": weights.take_along_dim(first, -1).squeeze(-1),
        "self": weights.diagonal(0, -2, -1),
        "distance": weights.sum(-1) * column - weights @ column.to(weights),
    }
    return {name: values.masked_fill(n_visible < 2, math.nan) for name, values in scores.items()}


def induction_scores(weights: Tensor, *_: object) -> dict[str, Tensor]:
    """The weight that the second copy of n tokens puts on the token after the previous occurrence of its own.

    That token is n - 1 back. See Olsson et al. 2022, "In-context Learning and Induction Heads".

    Args:
        weights: (B, H, 2n, 2n), of n tokens followed by the same n tokens.

    Returns:
        (B, H, n), for the positions of the second copy.
    """
    after = weights.diagonal(1 - weights.shape[-1] // 2, -2, -1)  # (B, H, n + 1), from the end of the first copy on
    return {"induction": after[..., 1:]}


def _means(
    model: GPT, text: TokenWindows, score: Callable[..., dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, float], Tensor]:
    """The means of score(weights, uniform weights, options), without NaN, in evaluation mode.

    Returns:
        By name (L, H) of every head, and of uniform weights; and the losses of the targets (N, T), in nats.
    """
    n_layers, n_heads, losses = model.config.n_layers, model.config.n_heads, []
    totals = defaultdict(lambda: torch.zeros(2, n_layers + 1, n_heads, dtype=torch.float64))  # the last: uniform
    for ids, targets, options in text.batches(model.embed.weight.device):
        q = torch.zeros(*ids.shape, 1, device=ids.device)[:, None]  # (B, 1, T, D), as k and v
        masking = {"mask": options.get("mask"), "causal": model.config.causal, "window": model.config.window}
        uniform = attention(q, q, q, need_weights=True, **masking)[1]  # (B, 1, T, T)

        def accumulate(layer: int, weights: Tensor, uniform=uniform, options=options) -> None:
            for name, values in score(weights, uniform, options).items():
                values = values.cpu().double()  # (B, H, T)
                totals[name][0, layer] += values.nansum((0, 2))
                totals[name][1, layer] += (~values.isnan()).sum((0, 2))

        with inference(model), capture_attention(model, accumulate):
            losses.append(model.nll(ids, targets, **options))
            accumulate(n_layers, uniform)
    means = {name: sums / counts for name, (sums, counts) in totals.items()}  # (L + 1, H) each
    heads = {name: each[:-1] for name, each in means.items()}
    reference = {name: each[-1, 0].item() for name, each in means.items()}
    return heads, reference, torch.cat(losses)
