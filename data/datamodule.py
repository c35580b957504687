"""The LightningDataModule: prepares the text once, and its training batches continue exactly after a checkpoint."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from tokenizers import Tokenizer

from tril.data.batches import Array, Batch, TrainWindows, ValWindows, check_batch_size, on_device
from tril.data.mixture import Mixture, PreparedMixture, prepare_source
from tril.data.mixture_windows import MixtureWindows
from tril.data.prepared import PreparedText, val_bytes, val_bytes_per_token
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig

MAX_RESIDENT = 1 / 4  # share of a GPU's free memory that the tokens may take; the rest is for training


class TextDataModule(LightningDataModule):
    """Batches (inputs, targets) of `source`, int64 (B, T) each.

    The state of the training loader is part of a checkpoint. Do not read `trainer.estimated_stepping_batches` in
    `configure_optimizers`: Lightning would create the loader before it reads the checkpoint and lose the state.
    On a GPU with enough memory, tokens are copied to it and batches are made there.

    A mixture has a validation loader for each source, so that no window crosses two of them, and a limit of Lightning
    on validation batches is one for each.

    Args:
        source: the text, or a mixture of several.
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
        source: Source | Mixture,
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
        self._packed: PreparedText | PreparedMixture | None = None
        self._resident: dict[Split, tuple[list[Array], Array | None]] = {}
        self._val_bytes: dict[str, tuple[int, int]] = {}  # of each source: number of targets, and their bytes

    def prepare_data(self) -> None:
        """Prepares the text. Lightning calls this in one process of each machine; the others use the cache."""
        if self._packed is None:
            self._packed = prepare_source(
                self.source,
                self.tokenizer_config,
                self.cache_dir,
                token_budget=self.token_budget,
                val_token_budget=self.val_token_budget,
            )

    def setup(self, stage: str | None = None) -> None:
        self.prepare_data()

    @property
    def packed(self) -> PreparedText | PreparedMixture:
        """The prepared text; prepares it on the first call."""
        self.prepare_data()
        assert self._packed is not None
        return self._packed

    @property
    def texts(self) -> dict[str, PreparedText]:
        """The prepared text of each source of a mixture; a single text has the name ""."""
        return self.packed.texts

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

    @property
    def val_bytes(self) -> dict[str, Callable[[int], int]]:
        """For each source the UTF-8 bytes of its first n validation targets, given n, see `data.prepare.val_bytes`."""
        return {name: partial(self._bytes_of, name) for name in self.texts}

    def _bytes_of(self, name: str, n_targets: int) -> int:
        """The last result is kept, since each validation asks for the same part."""
        if self._val_bytes.get(name, (None,))[0] != n_targets:
            self._val_bytes[name] = n_targets, val_bytes(self.texts[name], n_targets)
        return self._val_bytes[name][1]

    def val_documents(self, *n_targets: int) -> np.ndarray:
        """The document of each of the first validation targets, n of each source: (sum of n,), counted from 0.

        A target belongs to the document of its input, see `PreparedText.documents`.
        """
        parts, first = [], 0
        for text, n in zip(self.texts.values(), n_targets, strict=True):
            documents, targets = text.documents("val"), text.targets("val")
            documents = documents if targets is None else documents[:-1][targets[1:]]
            parts.append(first + documents[:n])
            first = parts[-1][-1] + 1
        return np.concatenate(parts)

    @property
    def val_bytes_per_token(self) -> float:
        """See `data.prepare.val_bytes_per_token`."""
        return val_bytes_per_token(self.meta)

    def train_dataloader(self) -> TrainWindows | MixtureWindows:
        tokens, is_target = self._tokens("train")
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        windows = self._train_windows(tokens, accumulate, is_target)
        check_batch_size(self.batch_size, windows.n_windows)
        return windows

    def val_dataloader(self) -> ValWindows | list[ValWindows]:
        texts, is_target = self._tokens("val")
        place = (self.context_length, self.val_batch_size, *self._ranks())
        loaders = [ValWindows(tokens, *place, is_target=is_target) for tokens in texts]
        return loaders if isinstance(self.source, Mixture) else loaders[0]

    def windows_of(self, tokens: torch.Tensor) -> dict[str, Iterable[Batch]]:
        """Training and validation windows of another text (N,), as those of this process; for tests of both."""
        ids, length, ranks = tokens.numpy(), self.context_length, self._ranks()
        train = self._train_windows([ids] * len(self.texts))
        return {"train": train, "val": ValWindows(ids, length, self.val_batch_size, *ranks)}

    def first_val_windows(self, n_windows: int) -> Batch:
        """Inputs and targets (n, T) of the first validation windows, the same in every process.

        Of a mixture about the same number of each source, of the first ones in the order of their names; of a chat, all
        tokens are targets.
        """
        texts, _ = self._tokens("val")
        each = -(-n_windows // len(texts))
        batches = [next(iter(ValWindows(tokens, self.context_length, each))) for tokens in texts]
        inputs, targets = (torch.cat(part)[:n_windows] for part in zip(*batches, strict=True))
        return inputs, targets

    def _train_windows(
        self, tokens: list[Array], accumulate: int = 1, is_target: Array | None = None
    ) -> TrainWindows | MixtureWindows:
        common = (self.context_length, self.batch_size, self.seed, *self._ranks(), accumulate)
        if isinstance(self.source, Mixture):
            return MixtureWindows(tokens, [member.count for member in self.source.members.values()], *common)
        return TrainWindows(tokens[0], *common, is_target=is_target)

    def _tokens(self, split: Split) -> tuple[list[Array], Array | None]:
        """The tokens of each source, and which are targets of a chat, which has one source; None: all.

        They are memory-mapped, or copied to the trainer's GPU, once, if all fit.
        """
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if device.type == "cuda" and split in self._resident:
            return self._resident[split]
        tokens = [text.tokens(split) for text in self.texts.values()]
        targets = next(iter(self.texts.values())).targets(split)
        if device.type != "cuda":
            return [*tokens], targets
        fit = sum(text.nbytes for text in tokens) <= MAX_RESIDENT * torch.cuda.mem_get_info(device)[0]
        if fit:
            on_gpu = None if targets is None else torch.from_numpy(targets).to(device)
            self._resident[split] = [on_device(text, device) for text in tokens], on_gpu
        else:
            self._resident[split] = [*tokens], targets
        return self._resident[split]

    def _ranks(self) -> tuple[int, int]:
        """Rank of this process among those with different batches, and their number."""
        sizes = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None
        return (sizes["rank"], sizes["num_replicas"]) if sizes else (0, 1)
