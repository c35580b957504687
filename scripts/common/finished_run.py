"""A finished run and its validation tokens, for the scripts that measure a trained model again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import run_folder
from tril.scripts.common.cli import plain

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tril.data.prepare import PreparedText
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
    from tril.model.checkpoint import read

    path = run_folder(checkpoint) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, so the data of {checkpoint} are unknown; name a run's folder")
    content, settings = read(checkpoint, entries=("tril", "global_step")), OmegaConf.load(path)
    assert isinstance(settings, DictConfig)
    return Run(checkpoint, plain(settings), content.get("global_step"), content["tril"])


def validation_text(run: Run) -> PreparedText:
    """The text of a run.

    Raises:
        ValueError: it has changed since, or it is a mixture.
    """
    from tril.data.config import parse
    from tril.data.prepare import PreparedText

    prepared = parse(run.settings["data"]).prepare()
    if not isinstance(prepared, PreparedText):
        texts = f"the validation parts of its sources, {', '.join(prepared.texts)}, are separate texts"
        raise ValueError(f"{run.checkpoint} was trained on a mixture: {texts}; name a run on one text")
    fingerprint, expected = prepared.meta["fingerprint"], run.metadata["data"]["fingerprint"]
    if fingerprint != expected:
        raise ValueError(
            f"the text has changed since the run (fingerprint {fingerprint[:12]} instead of {expected[:12]}); "
            "restore it, or train again"
        )
    return prepared


def validation_tokens(run: Run) -> np.ndarray:
    """Token ids of the validation part, (number of tokens,). Raises as `validation_text`."""
    return validation_text(run).tokens("val")


def evenly_spaced_windows(tokens: np.ndarray, n: int, length: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Picks n whole windows, evenly spaced from the first to the last one.

    Args:
        tokens: (number of tokens,) ids.
        n: number of windows N, at least 2.
        length: tokens T of a window.

    Returns:
        The numbers of the windows (N,), their inputs (N, T) and their targets (N, T).

    Raises:
        ValueError: there are fewer than n whole windows.
    """
    import numpy as np

    from tril.data.batches import gather

    available = (len(tokens) - 1) // length
    if n > available:
        limit = f"the {available} whole windows of {length} tokens in the validation part"
        raise ValueError(f"windows={n} exceeds {limit}; lower it")
    numbers = np.arange(n) * (available - 1) // (n - 1)
    return numbers, *gather(tokens, numbers, length)


def sample_windows(run: Run, tokens: np.ndarray, n: int, eot_id: int) -> tuple[np.ndarray, TokenWindows, TextClusters]:
    """Picks windows with `evenly_spaced_windows`.

    Args:
        run: it says how long a window is, and whether its documents are separate.
        tokens: (number of tokens,) ids.
        n: number of windows N.
        eot_id: of the token that opens a document.

    Returns:
        The numbers of the windows (N,), the windows, and the documents in them.
    """
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.text_clusters import TextClusters

    length = run.metadata["config"]["context_length"]
    numbers, ids, targets = evenly_spaced_windows(tokens, n, length)
    clusters = TextClusters.of(documents_of_windows(tokens, numbers, length, eot_id), targets)
    return numbers, TokenWindows(ids, targets, eot_id if run.settings["data"].get("document_mask") else None), clusters


def documents_of_windows(tokens: np.ndarray, numbers: np.ndarray, length: int, eot_id: int) -> Tensor:
    """The document of each input of some windows, (N, T) int64; a document opens with the end-of-text token.

    Args:
        tokens: (number of tokens,) ids.
        numbers: (N,), of the windows, as from `evenly_spaced_windows`.
        length: tokens T of a window.
    """
    import numpy as np
    import torch

    positions = numbers[:, None] * length + np.arange(length)  # (N, T)
    return torch.from_numpy(np.cumsum(tokens == eot_id)[positions])
