"""The LightningDataModule: prepares the text once, and its training batches continue exactly after a checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from tokenizers import Tokenizer

from tril.data.batches import Array, Batch, TrainWindows, ValWindows, on_device
from tril.data.prepare import prepare
from tril.data.prepared import PreparedText, val_bytes, val_bytes_per_token
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig

MAX_RESIDENT = 1 / 4  # share of a GPU's free memory that the tokens may take; the rest is for training


class TextDataModule(LightningDataModule):
    """Batches (inputs, targets) of `source`, int64 (B, T) each.

    The state of the training loader is part of a checkpoint. Do not read `trainer.estimated_stepping_batches` in
    `configure_optimizers`: Lightning would create the loader before it reads the checkpoint and lose the state.
    On a GPU with enough memory, tokens are copied to it and batches are made there.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        context_length: tokens per window T.
        batch_size: training windows per device and micro-batch B.
        val_batch_size: validation windows per batch; None: `batch_size`.
        cache_dir: see `data.prepare.prepare`, as for `token_budget` and `val_token_budget`.
        document_mask: documents in a window do not attend to each other, see `document_eot`; the batches are the same.
        seed: of the order of the training windows.
    """

    def __init__(
        self,
        *,
        source: Source,
        tokenizer: TokenizerConfig,
        context_length: int,
        batch_size: int,
        val_batch_size: int | None = None,
        cache_dir: str | Path | None = None,
        token_budget: int | None = None,
        val_token_budget: int | None = None,
        document_mask: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source, self.tokenizer_config, self.context_length = source, tokenizer, context_length
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.cache_dir, self.seed, self.document_mask = cache_dir, seed, document_mask
        self.token_budget, self.val_token_budget = token_budget, val_token_budget
        self._packed: PreparedText | None = None
        self._resident: dict[str, tuple[Array, Array | None]] = {}
        self._val_bytes: tuple[int, int] | None = None  # number of targets, and their bytes

    def prepare_data(self) -> None:
        """Prepares the text. Lightning calls this in one process of each machine; the others use the cache."""
        if self._packed is None:
            self._packed = prepare(
                self.source,
                self.tokenizer_config,
                self.cache_dir,
                token_budget=self.token_budget,
                val_token_budget=self.val_token_budget,
            )

    def setup(self, stage: str | None = None) -> None:
        self.prepare_data()

    @property
    def packed(self) -> PreparedText:
        """The prepared text; prepares it on the first call."""
        self.prepare_data()
        assert self._packed is not None
        return self._packed

    @property
    def tokenizer(self) -> Tokenizer:
        return self.packed.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.packed.meta["vocab_size"]

    @property
    def meta(self) -> dict[str, Any]:
        """The content of meta.json."""
        return self.packed.meta

    @property
    def document_eot(self) -> int | None:
        """Id of the token that opens a document if `document_mask`; None: a window is one text."""
        return self.meta["eot_id"] if self.document_mask else None

    def val_bytes(self, n_targets: int) -> int:
        """See `data.prepare.val_bytes`; the last result is kept, since each validation asks for the same part."""
        if self._val_bytes is None or self._val_bytes[0] != n_targets:
            self._val_bytes = n_targets, val_bytes(self.packed, n_targets)
        return self._val_bytes[1]

    def val_documents(self, n_targets: int) -> np.ndarray:
        """The document of each of the first `n_targets` validation targets, counted from 0: (n_targets,).

        A target belongs to the document of its input, see `PreparedText.documents`.
        """
        targets = self.packed.targets("val")
        if targets is None:
            return self.packed.documents("val")[:n_targets]
        return self.packed.documents("val")[:-1][targets[1:]][:n_targets]

    @property
    def val_bytes_per_token(self) -> float:
        """See `data.prepare.val_bytes_per_token`."""
        return val_bytes_per_token(self.meta)

    def train_dataloader(self) -> TrainWindows:
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        (tokens, is_target), ranks = self._tokens("train"), self._ranks()
        return TrainWindows(
            tokens, self.context_length, self.batch_size, self.seed, *ranks, accumulate, is_target=is_target
        )

    def val_dataloader(self) -> ValWindows:
        tokens, is_target = self._tokens("val")
        return ValWindows(tokens, self.context_length, self.val_batch_size, *self._ranks(), is_target=is_target)

    def windows_of(self, tokens: torch.Tensor) -> dict[str, Iterable[Batch]]:
        """Training and validation windows of another text (N,), as those of this process; for tests of both."""
        ids, length, ranks = tokens.numpy(), self.context_length, self._ranks()
        train = TrainWindows(ids, length, self.batch_size, self.seed, *ranks)
        return {"train": train, "val": ValWindows(ids, length, self.val_batch_size, *ranks)}

    def first_val_windows(self, n_windows: int) -> Batch:
        """Inputs and targets (n, T) of the first validation windows, the same in every process; of a chat, all tokens
        are targets."""
        return next(iter(ValWindows(self._tokens("val")[0], self.context_length, n_windows)))

    def _tokens(self, split: Split) -> tuple[Array, Array | None]:
        """The tokens and which are targets: memory-mapped, or copied to the trainer's GPU, once, if they fit."""
        if split not in self._resident:
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            tokens, targets = self.packed.tokens(split), self.packed.targets(split)
            if device.type != "cuda":
                return tokens, targets
            if tokens.nbytes <= MAX_RESIDENT * torch.cuda.mem_get_info(device)[0]:
                tokens = on_device(tokens, device)
                targets = None if targets is None else torch.from_numpy(targets).to(device)
            self._resident[split] = tokens, targets
        return self._resident[split]

    def _ranks(self) -> tuple[int, int]:
        """Rank of this process among those with different batches, and their number."""
        sizes = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None
        return (sizes["rank"], sizes["num_replicas"]) if sizes else (0, 1)
