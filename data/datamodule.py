"""The LightningDataModule: prepares the text once, then hands out batches that continue exactly where a checkpoint stopped."""

from pathlib import Path
from typing import Any

from lightning import LightningDataModule
from tokenizers import Tokenizer

from data.packing import Packed, prepare, val_bytes_per_token
from data.sources import Source
from data.tokenizer import TokenizerConfig
from data.windows import TrainWindows, ValWindows


class TextDataModule(LightningDataModule):
    """Batches (inputs, targets) of `source`, int64 (B, T) each.

    The training loader keeps its place in a checkpoint. Do not read `trainer.estimated_stepping_batches` in
    `configure_optimizers`: Lightning then makes the loader before the checkpoint is read, and the place is lost.

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
        self.cache_dir, self.token_budget, self.val_token_budget, self.seed = cache_dir, token_budget, val_token_budget, seed
        self.document_mask = document_mask
        self._packed: Packed | None = None

    def prepare_data(self) -> None:
        """Lightning calls this in one process of each machine; the others find what it made."""
        if self._packed is None:
            budgets = {"token_budget": self.token_budget, "val_token_budget": self.val_token_budget}
            self._packed = prepare(self.source, self.tokenizer_config, self.cache_dir, **budgets)

    def setup(self, stage: str | None = None) -> None:
        self.prepare_data()

    @property
    def packed(self) -> Packed:
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
        return TrainWindows(self.packed.tokens("train"), self.context_length, self.batch_size, self.seed, *self._place())

    def val_dataloader(self) -> ValWindows:
        return ValWindows(self.packed.tokens("val"), self.context_length, self.val_batch_size, *self._place())

    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks)"""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
