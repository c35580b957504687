"""What a model predicts for the tokens of texts, in windows of which only the last tokens are scored.

Letters: B batch, T longest window without its last token, M targets, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tril.model.generation.generate import TOKENS_PER_BATCH, inference
from tril.model.gpt import GPT, IGNORE
from tril.model.masks import document_options

Ids = Sequence[int] | np.ndarray


class Scores(NamedTuple):
    """The targets of a window, as arrays (M,).

    Attributes:
        nll: float32, the loss in nats.
        correct: bool, whether the target is the most probable token.
    """

    nll: np.ndarray
    correct: np.ndarray


def score_windows(
    model: GPT, windows: Sequence[tuple[Ids, int]], *, n_ids: int | None = None, document_eot: int | None = None
) -> list[Scores]:
    """The scores of each window, computed on the device of the model; with a progress bar on a terminal.

    Args:
        windows: the ids of each, at most `context_length` + 1, and how many of them, at its end, are targets.
        n_ids: rows of the vocabulary from this one on have no token and are never the most probable one, as in
            generation; None: all may be.
        document_eot: id of the token that opens a document, if the model was trained with separate documents; None: a
            window is one text.
    """
    device, modules = model.embed.weight.device, list(model.modules())
    left = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))  # a batch has windows of similar length
    scores: dict[int, Scores] = {}
    bar = tqdm(total=len(windows), desc="scored windows", disable=None, leave=False)
    while left:
        longest = len(windows[left[0]][0]) - 1  # T
        size = max(1, TOKENS_PER_BATCH // longest)
        batch, left = left[:size], left[size:]
        ids, targets = np.zeros((len(batch), longest), int), np.full((len(batch), longest), IGNORE)
        for row, (window, n_targets) in enumerate(windows[i] for i in batch):
            end = len(window) - 1
            ids[row, :end] = window[:-1]  # after it is padding, which a causal model ignores
            targets[row, end - n_targets : end] = window[-n_targets:]
        with inference(modules):
            inputs, expected = torch.from_numpy(ids).to(device), torch.from_numpy(targets).to(device)  # (B, T)
            scored = expected != IGNORE
            hidden = model.hidden(inputs, **document_options(inputs, document_eot))[scored]  # (M, C)
            logits, expected = model.logits(hidden).float(), expected[scored]  # (M, V), (M,)
            nll = F.cross_entropy(logits, expected, reduction="none")  # as in GPT.nll
            found = nll, logits[:, :n_ids].argmax(-1) == expected
        ends = np.cumsum((targets != IGNORE).sum(1))[:-1]
        scores |= zip(batch, map(Scores, *(np.split(values.cpu().numpy(), ends) for values in found)), strict=True)
        bar.update(len(batch))
    bar.close()
    return [scores[i] for i in range(len(windows))]
