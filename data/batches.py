"""Batches of windows over token arrays: shuffled without replacement for training, in order for validation.

Letters: B windows in a batch, T context length, M targets (tokens but the first), n = ceil(M / T) windows of a text,
N windows in a block, W ranks.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tril.data.sources.base import BLOCK

IGNORE = -100  # targets that do not count; the default of torch's cross entropy
MAX_PASSES = 10  # through the text in one batch
COPY_TOKENS = 1 << 26  # tokens per copy, so that the host never holds all of them

Tokens = np.ndarray | Tensor  # ids on the host, of any integer type; on a device as from `on_device`
Batch = tuple[Tensor, Tensor]


def as_tensor(tokens: Tokens) -> Tensor:
    """The same memory, as signed integers, since torch indexes no others on every device; `gather` reverts that."""
    if isinstance(tokens, Tensor):
        return tokens
    with warnings.catch_warnings():  # a file that is mapped read-only; nothing writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(tokens.view(tokens.dtype.str.replace("u", "i")))


def on_device(tokens: Tokens, device: torch.device | str) -> Tensor:
    """A copy of the ids on `device`, where `gather` then makes the batches without copies from the host."""
    host = as_tensor(tokens)
    resident = torch.empty_like(host, device=device)
    for start in range(0, len(host), COPY_TOKENS):
        resident[start : start + COPY_TOKENS].copy_(host[start : start + COPY_TOKENS])
    return resident


def gather(tokens: Tokens, windows: Tokens, context_length: int, offset: int | Tensor = 0) -> Batch:
    """The windows with the given numbers; window i has the inputs at offset + iT ... offset + iT + T - 1, modulo M.

    Args:
        tokens: (M + 1,) ids.
        windows: (B,) numbers. Targets of a window beyond the M-th, not counting the offset, are IGNORE.
        offset: one for all windows, or (B, 1).

    Returns:
        inputs and targets, int64 (B, T), on the device of the tokens; a target is the token after its input, or IGNORE.
    """
    tokens, n_targets = as_tensor(tokens), len(tokens) - 1
    columns = torch.arange(context_length, device=tokens.device)
    unshifted = torch.as_tensor(windows, device=tokens.device)[:, None] * context_length + columns  # (B, T)
    positions = (unshifted + offset) % n_targets
    inputs, targets = tokens[positions].long(), tokens[positions + 1].long()
    if tokens.dtype == torch.int16:
        inputs, targets = inputs & 0xFFFF, targets & 0xFFFF
    return inputs, targets.masked_fill(unshifted >= n_targets, IGNORE)


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
        length_at: optimizer step -> length of its windows, a divisor of T: each window is cut into such, which are
            rows of the same batch. None: T.

    Raises:
        ValueError: a text has fewer than context_length + 1 tokens.
    """

    def __init__(
        self,
        texts: Tokens | Sequence[Tokens],
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        *,
        counts: Sequence[int] = (BLOCK,),
        length_at: Callable[[int], int] | None = None,
    ) -> None:
        self.texts = [as_tensor(text) for text in ([texts] if isinstance(texts, Tokens) else texts)]
        self.counts, self.context_length, self.batch_size, self.seed = counts, context_length, batch_size, seed
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self.length_at = length_at
        self._orders = [WindowOrder(len(text), context_length, seed) for text in self.texts]
        self.n_windows = sum(order.n_windows for order in self._orders)
        self.block_size = sum(counts)  # N
        self.consumed = 0  # windows of all ranks
        self._block: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """The batches of the complete optimizer steps in one pass, at least of one step."""
        return max(1, self.n_windows // self.step_size) * self.accumulate

    @property
    def step_size(self) -> int:
        """Windows of an optimizer step."""
        return self.batch_size * self.world_size * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            start = self.consumed
            # Counted before the yield: a checkpoint written during the batch resumes with the next one.
            self.consumed += self.batch_size * self.world_size
            inputs, targets = self._batch(range(start + self.rank, self.consumed, self.world_size))
            length = self.length_at(start // self.step_size) if self.length_at else self.context_length
            yield inputs.view(-1, length), targets.view(-1, length)

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def _batch(self, indices: range) -> Batch:
        """The B windows at `indices` of the endless sequence."""
        first = indices.start // self.block_size
        blocks = [self._windows(block) for block in range(first, indices[-1] // self.block_size + 1)]
        table = torch.cat(blocks, 1)[:, indices.start - first * self.block_size :: indices.step]
        numbers, windows, offsets = table[:, : len(indices)]  # (B,) each
        batches = [gather(tokens, windows, self.context_length, offsets[:, None]) for tokens in self.texts]
        # Every row is read from every text: to select rows on a GPU, the host would wait for it.
        inputs, targets = batches[0]
        for number, batch in enumerate(batches[1:], start=1):
            is_here = (numbers == number)[:, None]
            inputs, targets = torch.where(is_here, batch[0], inputs), torch.where(is_here, batch[1], targets)
        return inputs, targets

    def _windows(self, block: int) -> Tensor:
        """Text, number and offset of each window of a block, (3, N); caches the last block."""
        if self._block is None or self._block[0] != block:
            table = np.empty((3, self.block_size), np.int64)
            # The third number separates this stream from those of `WindowOrder`.
            random = np.random.default_rng([self.seed, block, 1])
            table[0] = random.permutation(np.repeat(np.arange(len(self.counts)), self.counts))
            for text, (order, count) in enumerate(zip(self._orders, self.counts, strict=True)):
                table[1:, table[0] == text] = order.windows(block * count, count)
            self._block = block, torch.from_numpy(table).to(self.texts[0].device)
        return self._block[1]


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
        self.tokens, self.context_length, self.batch_size = as_tensor(tokens), context_length, batch_size
        self.rank, self.world_size = rank, world_size
        self.n_windows = -(-(len(tokens) - 1) // context_length)

    def __len__(self) -> int:
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        end = len(self) * self.batch_size * self.world_size
        windows = torch.arange(self.rank, end, self.world_size, device=self.tokens.device)
        for part in windows.split(self.batch_size):
            yield gather(self.tokens, part, self.context_length)
