"""Training batches of a mixture: windows of several texts in fixed shares, as a function of (seed, index).

Letters: S sources, N windows in a block, B windows in a batch, T context length.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tril.data.batches import Array, Batch, EndlessWindows, WindowOrder, gather, like


class MixtureWindows(EndlessWindows):
    """Training batches of several texts. No window crosses two texts.

    The endless sequence of windows consists of blocks. Each block has a fixed number of windows of every source, in an
    order that depends on (seed, block) alone. So the windows of a source before an index follow from the number of the
    block and from one block, and the k-th of them is window k of the source's own `WindowOrder`: that of `TrainWindows`
    for this text and seed.

    Args:
        tokens: (M + 1,) ids of each source; arrays, or tensors of `on_device` for batches on their device.
        counts: windows of each source in a block, at least 1; their sum is N.
        batch_size, rank, world_size, accumulate: see `EndlessWindows`. One pass has as many windows as all texts.

    Raises:
        ValueError: a source has fewer than context_length + 1 tokens.
    """

    def __init__(
        self,
        tokens: Sequence[Array],
        counts: Sequence[int],
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.tokens, self.counts, self.context_length, self.seed = tokens, counts, context_length, seed
        self.size = sum(counts)  # N
        self._orders = [WindowOrder(len(text), context_length, seed) for text in tokens]
        n_windows = sum(order.n_windows for order in self._orders)
        super().__init__(n_windows, batch_size, rank, world_size, accumulate)
        self._block: tuple[int, Array] | None = None

    def sources(self, block: int) -> np.ndarray:
        """The source of each window of a block, (N,)."""
        # The third number separates this stream from those of `WindowOrder`.
        random = np.random.default_rng([self.seed, block, 1])
        return random.permutation(np.repeat(np.arange(len(self.counts)), self.counts))

    def first_repeat(self) -> tuple[int, int]:
        """The number of windows before a source starts its second epoch, and the source that is the first to do so."""
        found = []
        for source, (order, count) in enumerate(zip(self._orders, self.counts, strict=True)):
            block, before = divmod(order.n_windows, count)
            in_block = np.flatnonzero(self.sources(block) == source)[before]
            found.append((block * self.size + int(in_block), source))
        return min(found)

    def _batch(self, indices: range) -> Batch:
        parts = []
        while indices:
            block, first = divmod(indices.start, self.size)
            part = self._windows(block)[:, first :: indices.step][:, : len(indices)]  # to the end of this block at most
            parts.append(part)
            indices = indices[part.shape[1] :]
        source, windows, offsets = np.concatenate(parts, 1) if isinstance(parts[0], np.ndarray) else torch.cat(parts, 1)
        shape = len(source), self.context_length
        if isinstance(source, np.ndarray):
            inputs, targets = torch.empty(2, *shape, dtype=torch.int64)
            for number, tokens in enumerate(self.tokens):
                rows = np.flatnonzero(source == number)
                inputs[rows], targets[rows] = gather(tokens, windows[rows], shape[1], offsets[rows, None])
            return inputs, targets
        # On a device all rows are read from every source: to select rows, the host would wait for the device.
        inputs, targets = torch.zeros(2, *shape, dtype=torch.int64, device=source.device)
        for number, tokens in enumerate(self.tokens):
            found = gather(tokens, windows, shape[1], offsets[:, None])
            is_here = (source == number)[:, None]
            inputs, targets = torch.where(is_here, found[0], inputs), torch.where(is_here, found[1], targets)
        return inputs, targets

    def _windows(self, block: int) -> Array:
        """Source, number and offset of each window of a block, (3, N); caches the last block."""
        if self._block is None or self._block[0] != block:
            table = np.empty((3, self.size), np.int64)
            table[0] = self.sources(block)
            for source, (order, count) in enumerate(zip(self._orders, self.counts, strict=True)):
                table[1:, table[0] == source] = _numbers(order, block * count, count)
            self._block = block, like(self.tokens[0], table)
        return self._block[1]


def _numbers(order: WindowOrder, start: int, n: int) -> np.ndarray:
    """Number and offset of the windows start ... start + n - 1 of a source, (2, n)."""
    parts = []
    while n:
        epoch, first = divmod(start, order.n_windows)
        offset, numbers = order.epoch(epoch)
        part = numbers[first : first + n]
        parts.append(np.stack([part, np.full_like(part, offset)]))
        start, n = start + len(part), n - len(part)
    return np.concatenate(parts, 1)
