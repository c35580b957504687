"""Independent computations that several tests compare Tril with: generated tokens, and intervals of losses.

Letters: N repetitions, V variants with the baseline, S seeds, G documents.
"""

import math

import numpy as np
import torch
from scipy import stats

SIZES = np.array([5, 10, 15, 20, 25, 30, 40, 60, 75, 100, 120, 140])  # targets of 12 documents


def cr2(means, sizes):
    """Variance of the mean over documents (..., G) to (...), and its degrees of freedom, from the regression's matrices
    (Bell and McCaffrey 2002)."""
    share = sizes / sizes.sum()
    residual_maker = np.eye(len(share)) - np.sqrt(np.outer(share, share))
    form = np.sqrt(share / np.diag(residual_maker))[:, None] * residual_maker
    return np.sum((np.sqrt(share) * means @ form.T) ** 2, -1), np.sum(form**2) ** 2 / np.sum((form @ form.T) ** 2)


def text_part(differences, sizes, runs=None):
    """Variance of the choice of the text for differences (..., S, G), less that of single runs; its df.

    Args:
        runs: the losses (..., S, G) of baseline and variants, if they are not paired.
    """
    seeds, mean = differences.shape[-2], differences.mean(-2)
    if len(sizes) == 1:
        return np.zeros(mean.shape[:-1]), math.inf
    variance, df = cr2(mean, sizes)
    for rows in runs or [differences]:
        rest = cr2(rows - rows.mean(-2, keepdims=True), sizes)[0]
        variance = variance - rest.sum(-1) / (seeds * (seeds - 1))
    return np.maximum(variance, 0), df


def intervals(losses, sizes, level, paired=True):
    """Means and half widths (N, V - 1) of the differences of losses (N, V, S, G), whose seeds are complete."""
    differences = losses[:, 1:] - losses[:, :1]
    n, k, seeds, _ = differences.shape
    of_runs = (losses @ sizes / sizes.sum()).var(-1, ddof=1)  # (N, V)
    by_seed = differences @ sizes / sizes.sum()  # (N, V - 1, S)
    own = by_seed.var(-1, ddof=1) if paired else of_runs[:, 1:] + of_runs[:, :1]
    pooled, df = own.mean(1, keepdims=True), 4 * k / (k + 3) * (seeds - 1)
    if not paired:
        squares = k**2 * of_runs[:, :1] ** 2 + (of_runs[:, 1:] ** 2).sum(1, keepdims=True)
        df = (seeds - 1) * own.sum(1, keepdims=True) ** 2 / squares
    text, text_df = text_part(differences, sizes, None if paired else [losses[:, :1], losses[:, 1:]])
    parts = stats.t.isf(level / k / 2, df) ** 2 * np.maximum(own, pooled) / seeds
    return by_seed.mean(-1), np.sqrt(parts + stats.t.isf(level / k / 2, text_df) ** 2 * text)


def following(context, token, limit):
    """The ids that the model sees after the next token: a full context continues with its newer half."""
    context = [*context, token]
    return context if len(context) <= limit else context[-max(1, limit // 2) :]


@torch.no_grad()
def full_passes(model, prompt, new, **options):
    """(len(new) + 1, V): logits by one full pass of one row before each of the new tokens and after the last."""
    limit, logits = model.config.context_length, []
    context = prompt[-limit:]
    for token in [*new, None]:
        logits.append(model(torch.tensor([context]), **options)[:, -1])
        context = following(context, token, limit)
    return torch.cat(logits)


def most_probable(scores, ids, n, limit, end):
    """The new tokens, at most n, of which `end` is the last; scores(context, new tokens) are (V,)."""
    context, new = ids[-limit:], []
    while len(new) < n and end not in new:
        new.append(int(scores(context, new).argmax()))
        context = following(context, new[-1], limit)
    return new
