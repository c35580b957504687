"""The validation losses of one pass, kept on the device. B batch, N windows, T context length, W ranks, M targets."""

import math

import torch
from torch import Tensor

from tril.model.gpt import IGNORE

NO_TARGET = -math.inf  # in place of the loss of an ignored target, which no target has


class ValidationLosses:
    """Collects the loss of every target.

    One tensor that doubles when it is full: small tensors between the large ones of each batch would fragment gigabytes
    of a CPU's memory, and numbers would wait for a GPU.
    """

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # (capacity, T + 1): the losses of a window, then the number of its targets
        self._n = 0

    def add(self, nll: Tensor, targets: Tensor) -> None:
        """Adds a batch of windows: nll (B, T) in nats, 0 where the target is IGNORE; targets (B, T)."""
        ignored = targets == IGNORE
        counts = (~ignored).sum(1, keepdim=True)  # (B, 1)
        rows = torch.cat([nll.float().masked_fill(ignored, NO_TARGET), counts.float()], 1)  # (B, T + 1)
        if self._rows is None:
            self._rows, self._n = rows.new_empty(4 * len(rows), rows.shape[1]), 0
        if self._n + len(rows) > len(self._rows):
            self._rows = torch.cat([self._rows, torch.empty_like(self._rows)])
        self._rows[self._n : self._n + len(rows)] = rows
        self._n += len(rows)

    def take(self) -> Tensor:
        """All rows (N, T + 1) of this rank; starts again without any."""
        assert self._rows is not None
        rows, self._rows = self._rows[: self._n], None
        return rows


def in_order(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The windows of all ranks in the order of the text.

    Args:
        rows: (W, N, T + 1) from `ValidationLosses.take`; the ranks alternate.

    Returns:
        nats and number of targets of each window that has targets, float64 (2, N); nats of each target, float32 (M,).
        Both on the CPU.
    """
    rows = rows.transpose(0, 1).flatten(0, 1).cpu()  # (N * W, T + 1)
    rows = rows[rows[:, -1] > 0]
    nll, counts = rows[:, :-1], rows[:, -1].double()
    is_target = nll != NO_TARGET
    windows = torch.stack([nll.double().masked_fill(~is_target, 0).sum(1), counts])
    return windows, nll[is_target]
