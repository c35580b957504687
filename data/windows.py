"""Batches of windows over a token array: shuffled without replacement for training, in order for validation.

Letters: B windows in a batch, T context length, M targets (tokens but the first), n = ceil(M / T) windows, W ranks.
"""

from collections.abc import Iterator

import numpy as np
import torch

IGNORE = -100  # targets that do not count; what torch's cross entropy ignores by default

Batch = tuple[torch.Tensor, torch.Tensor]


def gather(tokens: np.ndarray, windows: np.ndarray, context_length: int, offset: int = 0) -> Batch:
    """The windows with the given numbers; window i has the inputs at offset + iT ... offset + iT + T - 1, modulo M.

    Args:
        tokens: (M + 1,) ids of any integer type.
        windows: (B,) numbers; what a window reaches beyond M targets, not counting the offset, is ignored.

    Returns:
        inputs and targets, int64 (B, T); a target is the token after its input, or IGNORE.
    """
    n_targets = len(tokens) - 1
    unshifted = windows[:, None] * context_length + np.arange(context_length)  # (B, T)
    positions = (unshifted + offset) % n_targets
    inputs = tokens[positions].astype(np.int64)
    targets = np.where(unshifted < n_targets, tokens[positions + 1].astype(np.int64), IGNORE)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class TrainWindows:
    """Training batches: a function of (seed, epoch, index) whose whole state is one counter.

    In every epoch over the tokens the windows start from a new offset and come in a new order, so that each of the M targets is
    seen exactly once. Batches are cut from the endless sequence of epochs, hence always full. One pass over this object is
    len(self) batches from wherever the last one stopped.

    Args:
        tokens: (M + 1,) ids, typically memory-mapped.
        batch_size: windows B that one rank gets at a time; rank r of W takes r, r + W, ... of each W * B.

    Raises:
        ValueError: fewer than context_length + 1 tokens.
    """

    def __init__(
        self, tokens: np.ndarray, context_length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if len(tokens) <= context_length:
            raise ValueError(
                f"the training part has {len(tokens)} tokens, a window needs context_length + 1 = {context_length + 1}; "
                "give more text or lower context_length"
            )
        self.tokens, self.context_length, self.batch_size = tokens, context_length, batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.n_windows = -(-(len(tokens) - 1) // context_length)
        self.consumed = 0  # windows, of all ranks
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Full batches in one epoch, at least 1."""
        return max(1, self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            start = self.consumed
            # Counted before it is handed out: a checkpoint written while it is trained on resumes with the next one
            self.consumed += self.batch_size * self.world_size
            yield self._batch(np.arange(start + self.rank, self.consumed, self.world_size))

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def _batch(self, places: np.ndarray) -> Batch:
        """The windows at `places` (B,), ascending, of the endless sequence; they may lie in several epochs."""
        epochs = places // self.n_windows
        parts = []
        for epoch in range(epochs[0], epochs[-1] + 1):
            offset, order = self._shuffle(epoch)
            windows = order[places[epochs == epoch] % self.n_windows]
            parts.append(gather(self.tokens, windows, self.context_length, offset))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _shuffle(self, epoch: int) -> tuple[int, np.ndarray]:
        """The offset and the order (n,) of one epoch; the last one is remembered."""
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._epoch = epoch, int(random.integers(len(self.tokens) - 1)), random.permutation(self.n_windows)
        return self._epoch[1:]


class ValWindows:
    """Validation batches: every target once, windows in order, rank r of W takes windows r, r + W, ...

    Every batch has B rows and every rank the same number of batches, so that a compiled model sees one shape and no rank waits;
    what is missing are rows whose targets are all IGNORE.

    Raises:
        ValueError: fewer than 2 tokens.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if len(tokens) < 2:
            raise ValueError(f"the validation part has {len(tokens)} tokens, at least 2 are needed; raise data.val_fraction")
        self.tokens, self.context_length, self.batch_size = tokens, context_length, batch_size
        self.rank, self.world_size = rank, world_size
        self.n_windows = -(-(len(tokens) - 1) // context_length)

    def __len__(self) -> int:
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        step = self.batch_size * self.world_size
        for start in range(0, len(self) * step, step):
            yield gather(self.tokens, np.arange(start + self.rank, start + step, self.world_size), self.context_length)
