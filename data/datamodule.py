"""The LightningDataModule: prepares the text once, then hands out batches that continue exactly where a checkpoint stopped."""

from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from tokenizers import Tokenizer

from tril.data.batches import Array, TrainWindows, ValWindows, on_device
from tril.data.prepare import PreparedText, prepare, val_bytes_per_token
from tril.data.sources.base import Source
from tril.data.tokenizer import TokenizerConfig

RESIDENT_SHARE = (
    4  # tokens stay on a GPU where they take at most one part in so many of its free memory: the rest is for training
)


class TextDataModule(LightningDataModule):
    """Batches (inputs, targets) of `source`, int64 (B, T) each.

    The training loader keeps its place in a checkpoint. Do not read `trainer.estimated_stepping_batches` in
    `configure_optimizers`: Lightning then makes the loader before the checkpoint is read, and the place is lost.
    On a GPU both parts of the text lie in its memory and batches are made there, unless that would take too much of it.

    Args:
        batch_size: training windows per device and step; `val_batch_size` None takes the same.
        cache_dir, token_budget, val_token_budget: see `data.packing.prepare`.
        document_mask: documents that share a window are to be kept apart, see `document_eot`; the batches are the same.
        seed: decides the order of the training windows.
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
        self.cache_dir, self.token_budget, self.val_token_budget, self.seed = (
            cache_dir,
            token_budget,
            val_token_budget,
            seed,
        )
        self.document_mask = document_mask
        self._packed: PreparedText | None = None
        self._resident: dict[str, Array] = {}

    def prepare_data(self) -> None:
        """Lightning calls this in one process of each machine; the others find what it made."""
        if self._packed is None:
            budgets = {"token_budget": self.token_budget, "val_token_budget": self.val_token_budget}
            self._packed = prepare(self.source, self.tokenizer_config, self.cache_dir, **budgets)

    def setup(self, stage: str | None = None) -> None:
        self.prepare_data()

    @property
    def packed(self) -> PreparedText:
        """What was prepared; prepares it when nobody has."""
        self.prepare_data()
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
        """Id of the token that opens a document where documents are to be kept apart; None where a window is one text."""
        return self.meta["eot_id"] if self.document_mask else None

    @property
    def val_bytes_per_token(self) -> float:
        """See `data.packing.val_bytes_per_token`."""
        return val_bytes_per_token(self.meta)

    def train_dataloader(self) -> TrainWindows:
        return TrainWindows(self._tokens("train"), self.context_length, self.batch_size, self.seed, *self._place())

    def val_dataloader(self) -> ValWindows:
        return ValWindows(self._tokens("val"), self.context_length, self.val_batch_size, *self._place())

    def _tokens(self, split: str) -> Array:
        """Memory-mapped; in a trainer's hands on its GPU, where they fit. They are moved once."""
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if device.type != "cuda":
            return self.packed.tokens(split)
        if split not in self._resident:
            tokens = self.packed.tokens(split)
            fits = tokens.nbytes * RESIDENT_SHARE <= torch.cuda.mem_get_info(device)[0]
            self._resident[split] = on_device(tokens, device) if fits else tokens
        return self._resident[split]

    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks)"""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
