"""What a model predicts for each token of a text, in windows that score each token once.

Letters: B batch, T context length, N stride, M targets (tokens but the first), W windows, C width, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tril.model.generation.generate import TOKENS_PER_BATCH, inference
from tril.model.gpt import GPT
from tril.model.masks import document_options


@dataclass(frozen=True)
class TargetScores:
    """The scored targets in the order of the text, as arrays (M,).

    Attributes:
        inputs: int64, the position in the text of the token before the target.
        columns: int64, the position of that token in its window, from 0: the target's context has columns + 1 tokens.
        nll: float32, the loss in nats.
        confidence: float32, the probability of the most probable token.
        correct: bool, whether the target is the most probable token.
    """

    inputs: np.ndarray
    columns: np.ndarray
    nll: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray


def window_starts(n_targets: int, length: int, stride: int, limit: int | None = None) -> np.ndarray:
    """The position of the first input of each window, (W,) int64.

    The first window scores all its targets, each other one the last `stride` of them. With stride = length the windows
    do not overlap, as in validation.

    Args:
        n_targets: M.
        length: T.
        stride: N, at most T.
        limit: at least 2; take this many windows, evenly spaced from the first to the last; None: all.
    """
    assert 1 <= stride <= length, (stride, length)
    n_windows = 1 + max(0, -(-(n_targets - length) // stride))
    numbers = np.arange(n_windows)
    if limit is not None and limit < n_windows:
        numbers = np.arange(limit) * (n_windows - 1) // (limit - 1)
    return numbers * stride


def score_targets(
    model: GPT, tokens: np.ndarray, starts: np.ndarray, stride: int, *, document_eot: int | None = None
) -> TargetScores:
    """Scores the targets of the windows that begin at `starts`, in evaluation mode, on the device of the model.

    Args:
        tokens: (M + 1,) ids.
        starts: (W,), from `window_starts` for T = `context_length` and the same stride.
        document_eot: id of the token that opens a document, if the model was trained with separate documents; None: a
            window is one text.
    """
    length, n_targets = model.config.context_length, len(tokens) - 1
    size = max(1, TOKENS_PER_BATCH // length)  # B
    parts = []
    with inference(list(model.modules())):
        for first in range(0, len(starts), size):
            begin = starts[first : first + size, None]  # (B, 1)
            inputs = begin + np.arange(length)  # (B, T)
            new = (begin == 0) | (np.arange(length) >= length - stride)  # the others were targets of earlier windows
            rows, columns = np.nonzero(new & (inputs < n_targets))  # (m,) each
            # As in training, the rest of the last window holds tokens from the start; a causal model ignores them.
            ids = torch.from_numpy(tokens[inputs % n_targets].astype(np.int64))
            targets = torch.from_numpy(tokens[inputs[rows, columns] + 1].astype(np.int64))
            predicted = _predict(model, ids, targets, torch.from_numpy(rows), torch.from_numpy(columns), document_eot)
            parts.append((inputs[rows, columns], columns, *predicted))
    return TargetScores(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _predict(
    model: GPT,
    ids: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    document_eot: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """nll, confidence and correctness of the targets (m,) that follow ids[rows, columns]; ids (B, T)."""
    device = model.embed.weight.device
    ids, targets = ids.to(device), targets.to(device)
    hidden = model.hidden(ids, **document_options(ids, document_eot))[rows.to(device), columns.to(device)]  # (m, C)
    logits = model.logits(hidden).float()  # (m, V)
    nll = F.cross_entropy(logits, targets, reduction="none")  # as in GPT.nll
    largest, guess = logits.max(-1)
    confidence = (largest - logits.logsumexp(-1)).exp()
    return nll.cpu().numpy(), confidence.cpu().numpy(), (guess == targets).cpu().numpy()
