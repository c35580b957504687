"""The LightningDataModule: prepares the text once, and its training batches continue exactly after a checkpoint."""

from collections.abc import Callable, Iterable

import torch
from lightning import LightningDataModule

from tril.data.batches import Batch, Tokens, TrainWindows, ValWindows, on_device
from tril.data.prepare import prepare
from tril.data.sources.base import Source, Split

MAX_RESIDENT = 1 / 4  # share of a GPU's free memory that the tokens may take; the rest is for training


class TextDataModule(LightningDataModule):
    """Batches (inputs, targets) of a text, int64 (B, T) each.

    The state of the training loader is part of a checkpoint. Do not read `trainer.estimated_stepping_batches` in
    `configure_optimizers`: Lightning would create the loader before it reads the checkpoint and lose the state.
    On a GPU with enough memory, tokens are copied to it and batches are made there.

    Args:
        source: the text, its tokenizer and the batches.
        context_length: tokens per window T.
        seed: of the order of the training windows.

    Attributes:
        text: prepared; of several processes, one does it. `meta` and `tokenizer` are those of the text.
        lengths: see `Source.window_lengths`.

    Raises:
        ValueError: the text is too short for the windows.
    """

    def __init__(self, source: Source, *, context_length: int, seed: int = 0) -> None:
        super().__init__()
        self.source, self.context_length, self.seed = source, context_length, seed
        self.lengths = source.window_lengths(context_length)
        self.batch_size, self.val_batch_size = source.batch_size, source.val_batch_size or source.batch_size
        self.text = prepare(source)
        self.meta, self.tokenizer = self.text.meta, self.text.tokenizer
        for loader in (self.train_dataloader, self.val_dataloader):
            loader()  # raises

    def train_dataloader(self) -> TrainWindows:
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        return self._train_windows(self._tokens("train"), accumulate, length_at=self.length_at)

    def length_at(self, step: int) -> int:
        """Tokens in a training window at an optimizer step."""
        steps = self.trainer.max_steps if self.trainer else 0
        return next((length for length, end in self.lengths.items() if step < end * steps), self.context_length)

    def val_dataloader(self) -> ValWindows:
        return ValWindows(self._tokens("val"), self.context_length, self.val_batch_size, *self._ranks())

    def windows_of(self, tokens: torch.Tensor) -> dict[str, Iterable[Batch]]:
        """Training windows of each length and validation windows of another text (N,), as those of this process; for
        tests of both."""
        ids, parts = tokens.numpy(), dict[str, Iterable[Batch]]()
        for length in self.lengths:
            name = "train" if length == self.context_length else f"train of {length} tokens"
            parts[name] = self._train_windows(ids, length_at=lambda _, length=length: length)
        return parts | {"val": ValWindows(ids, self.context_length, self.val_batch_size, *self._ranks())}

    def first_val_windows(self, n_windows: int) -> Batch:
        """Inputs and targets (n, T) of the first validation windows, the same in every process."""
        return next(iter(ValWindows(self._tokens("val"), self.context_length, n_windows)))

    def _train_windows(self, tokens: Tokens, accumulate: int = 1, *, length_at: Callable[[int], int]) -> TrainWindows:
        shape = (self.context_length, self.batch_size, self.seed, *self._ranks(), accumulate)
        return TrainWindows(tokens, *shape, length_at=length_at)

    def _tokens(self, split: Split) -> Tokens:
        """The tokens of one part: memory-mapped, or a copy on the trainer's GPU if they fit."""
        tokens, device = self.text.tokens(split), self.trainer.strategy.root_device if self.trainer else None
        if device and device.type == "cuda" and 4 * len(tokens) <= MAX_RESIDENT * torch.cuda.mem_get_info(device)[0]:
            return on_device(tokens, device)
        return tokens

    def _ranks(self) -> tuple[int, int]:
        """Rank of this process, and the number of processes, which have different batches."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
