"""Batches of windows over a token array: shuffled without replacement for training, in order for validation.

Letters: B windows in a batch, T context length, M targets (tokens but the first), n = ceil(M / T) windows of the text,
W ranks.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # targets that do not count; the default of torch's cross entropy

Tokens = np.ndarray | Tensor  # ids on the host, of any integer type; on a device as from `on_device`
Batch = tuple[Tensor, Tensor]


def on_device(tokens: Tokens, device: torch.device | str) -> Tensor:
    """The ids as int32 on `device`, where `gather` then makes the batches without copies from the host.

    A GPU does not index the unsigned types of the file.
    """
    return torch.as_tensor(tokens).to(torch.int32).to(device)


def gather(tokens: Tokens, windows: Tokens, context_length: int, offset: int | Tensor = 0) -> Batch:
    """The windows with the given numbers; window i has the inputs at offset + iT ... offset + iT + T - 1, modulo M.

    Args:
        tokens: (M + 1,) ids.
        windows: (B,) numbers. Targets of a window beyond the M-th, not counting the offset, are IGNORE.
        offset: one for all windows, or (B, 1).

    Returns:
        inputs and targets, int64 (B, T), on the device of the tokens; a target is the token after its input, or IGNORE.
    """
    tokens, n_targets = torch.as_tensor(tokens), len(tokens) - 1
    columns = torch.arange(context_length, device=tokens.device)
    unshifted = torch.as_tensor(windows, device=tokens.device)[:, None] * context_length + columns  # (B, T)
    positions = (unshifted + offset) % n_targets
    inputs, targets = tokens[positions].long(), tokens[positions + 1].long()
    return inputs, targets.masked_fill(unshifted >= n_targets, IGNORE)


class TrainWindows:
    """Training batches: an endless sequence of windows, which is a function of (seed, epoch, index).

    In every epoch the windows start from a new offset and have a new order, so that each of the M targets occurs
    exactly once. Batches are always full: one may hold the end of an epoch and the next. The state is one counter.

    One pass over this object yields len(self) batches, about as many as an epoch has, and starts where the last one
    stopped.

    Args:
        tokens: (M + 1,) ids, typically memory-mapped; a tensor of `on_device` gives the same batches on its device.
        batch_size: windows B per batch of a rank; rank r of W takes r, r + W, ... of each W * B.
        accumulate: batches per optimizer step. A pass has complete steps, since Lightning ends a step with the pass.
        length_at: optimizer step -> length of its windows, a divisor of T: each window is cut into such, which are
            rows of the same batch. None: T.

    Raises:
        ValueError: fewer than context_length + 1 tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        *,
        length_at: Callable[[int], int] | None = None,
    ) -> None:
        if len(tokens) <= context_length:
            raise ValueError(
                f"the training part has {len(tokens)} tokens, a window needs context_length + 1 = "
                f"{context_length + 1}; give more text or lower context_length"
            )
        self.tokens, self.context_length, self.batch_size = torch.as_tensor(tokens), context_length, batch_size
        self.seed, self.rank, self.world_size, self.accumulate = seed, rank, world_size, accumulate
        self.length_at = length_at
        self.n_targets = len(tokens) - 1
        self.n_windows = -(-self.n_targets // context_length)
        self.consumed = 0  # windows of all ranks
        self._last = -1, torch.empty(0)

    def __len__(self) -> int:
        """The batches of the complete optimizer steps in one pass, at least of one step."""
        return max(1, self.n_windows // self.step_size) * self.accumulate

    @property
    def step_size(self) -> int:
        """Windows of an optimizer step."""
        return self.batch_size * self.world_size * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            start, n = self.consumed, self.batch_size * self.world_size
            # Counted before the yield: a checkpoint written during the batch resumes with the next one.
            self.consumed += n
            windows, offsets = self._windows(start, n)[:, self.rank :: self.world_size]  # (B,) each
            inputs, targets = gather(self.tokens, windows, self.context_length, offsets[:, None])
            length = self.length_at(start // self.step_size) if self.length_at else self.context_length
            yield inputs.view(-1, length), targets.view(-1, length)

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def _windows(self, start: int, n: int) -> Tensor:
        """Number and offset of the windows start ... start + n - 1 of the endless sequence, (2, n)."""
        epochs = range(start // self.n_windows, -(-(start + n) // self.n_windows))
        starts = {epoch: start - epoch * self.n_windows for epoch in epochs}
        return torch.cat([self._order(epoch)[:, max(first, 0) : first + n] for epoch, first in starts.items()], 1)

    def _order(self, epoch: int) -> Tensor:
        """The numbers of all windows in the order of one epoch, and their offset, (2, n); keeps the last one."""
        if self._last[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            offset, order = int(random.integers(self.n_targets)), torch.from_numpy(random.permutation(self.n_windows))
            self._last = epoch, torch.stack([order, torch.full_like(order, offset)]).to(self.tokens.device)
        return self._last[1]


class ValWindows:
    """Validation batches: every target once, windows in order, rank r of W takes windows r, r + W, ...

    Every batch has B rows and every rank has the same number of batches, so that a compiled model gets one shape and
    no rank waits. They are filled up with rows whose targets are all IGNORE.

    Raises:
        ValueError: fewer than 2 tokens.
    """

    def __init__(
        self, tokens: Tokens, context_length: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if len(tokens) < 2:
            raise ValueError(
                f"the validation part has {len(tokens)} tokens, at least 2 are needed; raise data.val_fraction"
            )
        self.tokens, self.context_length, self.batch_size = torch.as_tensor(tokens), context_length, batch_size
        self.rank, self.world_size = rank, world_size
        self.n_windows = -(-(len(tokens) - 1) // context_length)

    def __len__(self) -> int:
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        end = len(self) * self.batch_size * self.world_size
        windows = torch.arange(self.rank, end, self.world_size, device=self.tokens.device)
        for part in windows.split(self.batch_size):
            yield gather(self.tokens, part, self.context_length)
