"""Batches of windows over token arrays: shuffled without replacement for training, in order for validation.

Letters: B windows in a batch, T context length, M targets (tokens but the first), n = ceil(M / T) windows of a text,
N windows in a block, W ranks.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tril.data.mixture import BLOCK

IGNORE = -100  # targets that do not count; the default of torch's cross entropy
MAX_PASSES = 10  # through the text in one batch
COPY_TOKENS = 1 << 26  # tokens per copy, so that the host never holds all of them

Array = np.ndarray | torch.Tensor  # on the host, of any integer type; on a device
Batch = tuple[torch.Tensor, torch.Tensor]


def on_device(tokens: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy of the ids on `device`, where `gather` then makes the batches without copies from the host.

    uint16 becomes int16, since torch indexes signed integers on every device. `gather` reverts that.
    """
    signed = np.int16 if tokens.dtype == np.uint16 else np.int32
    resident = torch.empty(len(tokens), dtype=getattr(torch, signed.__name__), device=device)
    for start in range(0, len(tokens), COPY_TOKENS):
        part = np.asarray(tokens[start : start + COPY_TOKENS]).astype(signed)
        resident[start : start + len(part)].copy_(torch.from_numpy(part))
    return resident


def gather(
    tokens: Array, windows: Array, context_length: int, offset: int | Array = 0, is_target: Array | None = None
) -> Batch:
    """The windows with the given numbers; window i has the inputs at offset + iT ... offset + iT + T - 1, modulo M.

    Args:
        tokens: (M + 1,) ids.
        windows: (B,) numbers, an array or tensor like `tokens`. Targets of a window beyond the M-th, not counting the
            offset, are IGNORE.
        offset: one for all windows, or (B, 1).
        is_target: (M + 1,) bool, like `tokens`; targets where it is False are IGNORE. None: all are targets.

    Returns:
        inputs and targets, int64 (B, T), on the device of the tokens; a target is the token after its input, or IGNORE.
    """
    n_targets = len(tokens) - 1
    if isinstance(tokens, np.ndarray):  # on a CPU twice as fast as torch
        unshifted = windows[:, None] * context_length + np.arange(context_length)  # (B, T)
        positions = (unshifted + offset) % n_targets
        inputs = tokens[positions].astype(np.int64)
        counts = unshifted < n_targets if is_target is None else (unshifted < n_targets) & is_target[positions + 1]
        targets = np.where(counts, tokens[positions + 1].astype(np.int64), IGNORE)
        return torch.from_numpy(inputs), torch.from_numpy(targets)
    arange = torch.arange(context_length, device=tokens.device)
    unshifted = torch.as_tensor(windows)[:, None] * context_length + arange  # (B, T)
    positions = (unshifted + offset) % n_targets
    inputs, targets = tokens[positions].long(), tokens[positions + 1].long()
    if tokens.dtype == torch.int16:
        inputs, targets = inputs & 0xFFFF, targets & 0xFFFF
    ignored = unshifted >= n_targets if is_target is None else (unshifted >= n_targets) | ~is_target[positions + 1]
    return inputs, targets.masked_fill(ignored, IGNORE)


def check_batch_size(batch_size: int, n_windows: int) -> None:
    """Raises ValueError if a batch has more than MAX_PASSES times all windows, which may not even fit into memory."""
    if batch_size > MAX_PASSES * n_windows:
        limit = f"is more than {MAX_PASSES} times the {n_windows:,} windows of the training part"
        raise ValueError(f"data.batch_size={batch_size} {limit}; use at most {n_windows}")


class WindowOrder:
    """The windows of one text in the endless sequence of its epochs: a function of (seed, epoch, index).

    In every epoch the windows start from a new offset and have a new order, so that each of the M targets occurs
    exactly once.

    Args:
        n_tokens: M + 1.

    Raises:
        ValueError: fewer than context_length + 1 tokens.
    """

    def __init__(self, n_tokens: int, context_length: int, seed: int) -> None:
        if n_tokens <= context_length:
            raise ValueError(
                f"the training part has {n_tokens} tokens, a window needs context_length + 1 = "
                f"{context_length + 1}; give more text or lower context_length"
            )
        self.n_targets, self.seed = n_tokens - 1, seed
        self.n_windows = -(-self.n_targets // context_length)
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """The offset and the order (n,) of one epoch; caches the last one."""
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._epoch = epoch, int(random.integers(self.n_targets)), random.permutation(self.n_windows)
        return self._epoch[1:]

    def windows(self, start: int, n: int) -> np.ndarray:
        """Number and offset of the windows start ... start + n - 1, (2, n)."""
        parts = []
        while n:
            epoch, first = divmod(start, self.n_windows)
            offset, numbers = self.epoch(epoch)
            part = numbers[first : first + n]
            parts.append(np.stack([part, np.full_like(part, offset)]))
            start, n = start + len(part), n - len(part)
        return np.concatenate(parts, 1)


class TrainWindows:
    """Training batches of one or more texts, in fixed shares. No window crosses two texts.

    The endless sequence of windows consists of blocks. Each block has a fixed number of windows of every text, in an
    order that depends on (seed, block) alone. So the windows of a text before an index follow from the number of the
    block and from one block, and the k-th of them is window k of the text's own `WindowOrder`. Batches are always full:
    one may hold the end of an epoch and the next. The state is one counter.

    One pass over this object yields len(self) batches, about as many as all texts have, and starts where the last one
    stopped.

    Args:
        texts: (M + 1,) ids of each, typically memory-mapped; tensors of `on_device` give the same batches on their
            device. A single text may be given without a list.
        batch_size: windows B per batch of a rank; rank r of W takes r, r + W, ... of each W * B.
        accumulate: batches per optimizer step. A pass has complete steps, since Lightning ends a step with the pass.
        counts: windows of each text in a block, at least 1; their sum is N.
        is_target: of each text, see `gather`.

    Raises:
        ValueError: a text has fewer than context_length + 1 tokens.
    """

    def __init__(
        self,
        texts: Array | Sequence[Array],
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        *,
        counts: Sequence[int] = (BLOCK,),
        is_target: Sequence[Array | None] | None = None,
    ) -> None:
        self.texts = [texts] if isinstance(texts, Array) else [*texts]
        self.counts, self.context_length, self.batch_size, self.seed = counts, context_length, batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.is_target = is_target or [None] * len(self.texts)
        self._orders = [WindowOrder(len(text), context_length, seed) for text in self.texts]
        self.n_windows = sum(order.n_windows for order in self._orders)
        self.block_size = sum(counts)  # N
        self.consumed = 0  # windows of all ranks
        self._block: tuple[int, Array] | None = None

    def __len__(self) -> int:
        """The batches of the complete optimizer steps in one pass, at least of one step."""
        step = self.batch_size * self.world_size * self.accumulate  # windows
        return max(1, self.n_windows // step) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            start = self.consumed
            # Counted before the yield: a checkpoint written during the batch resumes with the next one.
            self.consumed += self.batch_size * self.world_size
            yield self._batch(range(start + self.rank, self.consumed, self.world_size))

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def _batch(self, indices: range) -> Batch:
        """The B windows at `indices` of the endless sequence."""
        parts = []
        while indices:
            block, first = divmod(indices.start, self.block_size)
            part = self._windows(block)[:, first :: indices.step][:, : len(indices)]  # to the end of this block at most
            parts.append(part)
            indices = indices[part.shape[1] :]
        text, windows, offsets = np.concatenate(parts, 1) if isinstance(parts[0], np.ndarray) else torch.cat(parts, 1)
        length, offsets = self.context_length, offsets[:, None]
        if len(self.texts) == 1:
            return gather(self.texts[0], windows, length, offsets, self.is_target[0])
        shape = (2, len(text), length)
        if isinstance(text, np.ndarray):
            inputs, targets = torch.empty(shape, dtype=torch.int64)
            for number, (tokens, flags) in enumerate(zip(self.texts, self.is_target, strict=True)):
                rows = np.flatnonzero(text == number)
                inputs[rows], targets[rows] = gather(tokens, windows[rows], length, offsets[rows], flags)
            return inputs, targets
        # On a device all rows are read from every text: to select rows, the host would wait for the device.
        inputs, targets = torch.zeros(shape, dtype=torch.int64, device=text.device)
        for number, (tokens, flags) in enumerate(zip(self.texts, self.is_target, strict=True)):
            batch = gather(tokens, windows, length, offsets, flags)
            is_here = (text == number)[:, None]
            inputs, targets = torch.where(is_here, batch[0], inputs), torch.where(is_here, batch[1], targets)
        return inputs, targets

    def _texts_of(self, block: int) -> np.ndarray:
        """The text of each window of a block, (N,)."""
        # The third number separates this stream from those of `WindowOrder`.
        random = np.random.default_rng([self.seed, block, 1])
        return random.permutation(np.repeat(np.arange(len(self.counts)), self.counts))

    def _windows(self, block: int) -> Array:
        """Text, number and offset of each window of a block, (3, N); caches the last block."""
        if self._block is None or self._block[0] != block:
            table = np.empty((3, self.block_size), np.int64)
            table[0] = self._texts_of(block)
            for text, (order, count) in enumerate(zip(self._orders, self.counts, strict=True)):
                table[1:, table[0] == text] = order.windows(block * count, count)
            device = None if isinstance(self.texts[0], np.ndarray) else self.texts[0].device
            self._block = block, table if device is None else torch.from_numpy(table).to(device)
        return self._block[1]


class ValWindows:
    """Validation batches: every target once, windows in order, rank r of W takes windows r, r + W, ...

    Every batch has B rows and every rank has the same number of batches, so that a compiled model gets one shape and
    no rank waits. They are filled up with rows whose targets are all IGNORE.

    Raises:
        ValueError: fewer than 2 tokens.
    """

    def __init__(
        self,
        tokens: Array,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        is_target: Array | None = None,
    ) -> None:
        if len(tokens) < 2:
            raise ValueError(
                f"the validation part has {len(tokens)} tokens, at least 2 are needed; raise data.val_fraction"
            )
        self.tokens, self.context_length, self.batch_size = tokens, context_length, batch_size
        self.rank, self.world_size, self.is_target = rank, world_size, is_target
        self.n_windows = -(-(len(tokens) - 1) // context_length)

    def __len__(self) -> int:
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        windows = np.arange(self.rank, len(self) * self.batch_size * self.world_size, self.world_size)
        if isinstance(self.tokens, torch.Tensor):
            windows = torch.from_numpy(windows).to(self.tokens.device)
        for start in range(0, len(windows), self.batch_size):
            part = windows[start : start + self.batch_size]
            yield gather(self.tokens, part, self.context_length, is_target=self.is_target)
