"""A finished run and its validation tokens, for the scripts that measure a trained model again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.scripts.cli.config import data_presets
from tril.scripts.cli.start import read_saved, refuse_foreign
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tril.data.prepared import PreparedTexts
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.text_clusters import TextClusters


@dataclass(frozen=True)
class Run:
    """A checkpoint and the settings of its run.

    Attributes:
        settings: the content of the run's config.yaml.
        steps: optimizer steps before the checkpoint was written; None if it does not record them.
        metadata: the "tril" entry of the checkpoint, with keys such as config, data and tokenizer.
    """

    checkpoint: Path
    settings: dict[str, Any]
    steps: int | None
    metadata: dict[str, Any]


def read_run(checkpoint: Path) -> Run:
    """Reads a checkpoint and the config.yaml of its run.

    Raises:
        FileNotFoundError: the checkpoint is not in a run folder.
    """
    from tril.model.checkpoint import Checkpoint

    settings, stored = read_saved(checkpoint), Checkpoint.read(checkpoint)
    return Run(checkpoint, settings, stored.step, stored.entry())


def prepared_text(run: Run) -> PreparedTexts:
    """The text of a run, or those of its mixture.

    Raises:
        ValueError: it has changed since, or the saved settings name another cache folder or server.
    """
    from tril.data.config import parse

    if run.metadata["data"].get("chat"):
        cause = "was trained on the answers of conversations (data.format=chat), and this command scores whole texts"
        raise ValueError(f"{run.checkpoint} {cause}; its val/loss and val/bpb are in summary.json")
    chosen = [f"data.cache_dir={cache}"] if (cache := os.environ.get("TRIL_CACHE")) else []
    refuse_foreign(run.settings, Typed.of(chosen), groups=("data",))
    prepared = parse(run.settings["data"], data_presets()).prepare()
    fingerprint, expected = prepared.meta["fingerprint"], run.metadata["data"]["fingerprint"]
    if fingerprint != expected:
        raise ValueError(
            f"the text has changed since the run (fingerprint {fingerprint[:12]} instead of {expected[:12]}); "
            "restore it, or train again"
        )
    return prepared


def validation_tokens(run: Run) -> list[np.ndarray]:
    """Token ids of the validation part of each source, (number of tokens,); one without a mixture.

    Raises:
        ValueError: the text has changed since the run.
    """
    return [text.tokens("val") for text in prepared_text(run).texts.values()]


def evenly_spaced_windows(texts: Sequence[np.ndarray], n: int, length: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Picks n whole windows, evenly spaced from the first one of the first text to the last one of the last text.

    Args:
        texts: (number of tokens,) ids of each.
        n: number of windows N, at least 2.
        length: tokens T of a window.

    Returns:
        The numbers of the windows (N,), counted through all texts, their inputs (N, T) and their targets (N, T).

    Raises:
        ValueError: there are fewer than n whole windows.
    """
    import numpy as np
    import torch

    from tril.data.batches import gather

    available = sum(whole_windows(text, length) for text in texts)
    if n > available:
        limit = f"the {available} whole windows of {length} tokens in the validation part"
        raise ValueError(f"windows={n} exceeds {limit}; lower it")
    numbers = np.arange(n) * (available - 1) // (n - 1)
    parts = [gather(text, own, length) for text, own in zip(texts, numbers_in(texts, numbers, length), strict=True)]
    inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers, inputs, targets


def whole_windows(text: np.ndarray, length: int) -> int:
    return (len(text) - 1) // length


def numbers_in(texts: Sequence[np.ndarray], numbers: np.ndarray, length: int) -> list[np.ndarray]:
    """The windows `numbers`, sorted and counted through all texts, as windows of each text."""
    parts, first = [], 0
    for text in texts:
        own = numbers - first
        parts.append(own[(own >= 0) & (own < whole_windows(text, length))])
        first += whole_windows(text, length)
    return parts


def sample_windows(
    run: Run, texts: Sequence[np.ndarray], n: int, eot_id: int
) -> tuple[np.ndarray, TokenWindows, TextClusters]:
    """Picks windows with `evenly_spaced_windows`.

    Args:
        run: it says how long a window is, and whether its documents are separate.
        texts: (number of tokens,) ids of each.
        n: number of windows N.
        eot_id: of the token that opens a document.

    Returns:
        The numbers of the windows (N,), the windows, and the documents in them.
    """
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.text_clusters import TextClusters

    length = run.metadata["config"]["context_length"]
    numbers, ids, targets = evenly_spaced_windows(texts, n, length)
    clusters = TextClusters.of(documents_of_windows(texts, numbers, length, eot_id), targets)
    return numbers, TokenWindows(ids, targets, eot_id if run.settings["data"].get("document_mask") else None), clusters


def documents_of_windows(texts: Sequence[np.ndarray], numbers: np.ndarray, length: int, eot_id: int) -> Tensor:
    """The document of each input of some windows, (N, T) int64; a document opens with the end-of-text token.

    Args:
        texts: (number of tokens,) ids of each.
        numbers: (N,), of the windows, as from `evenly_spaced_windows`.
        length: tokens T of a window.
    """
    import numpy as np
    import torch

    parts, first = [], 0
    for text, own in zip(texts, numbers_in(texts, numbers, length), strict=True):
        positions = own[:, None] * length + np.arange(length)  # (N, T)
        documents = first + np.cumsum(text == eot_id)
        parts.append(documents[positions])
        first = documents[-1] + 1  # no document is in two texts
    return torch.from_numpy(np.concatenate(parts))
