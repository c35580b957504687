"""A finished run and its validation tokens, for the scripts that measure a trained model again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.scripts.cli.config import unflatten

if TYPE_CHECKING:
    import numpy as np

    from tril.data.config import DataConfig
    from tril.data.prepare import PreparedText
    from tril.model.checkpoint import Checkpoint
    from tril.model.evaluation.subject import EvaluatedText, Part, Subject
    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.text_clusters import TextClusters


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint of a run and the settings below `data:` that the run was trained with."""

    checkpoint: "Checkpoint"
    data: dict[str, Any]


def read_run(path: Path) -> TrainedRun:
    """Reads a checkpoint file, which has the settings of its run."""
    from tril.model.checkpoint import Checkpoint

    checkpoint = Checkpoint.read(path)
    return TrainedRun(checkpoint, unflatten(checkpoint.settings).get("data", {}))


def prepared_text(run: TrainedRun) -> "PreparedText":
    """The text of a run.

    Raises:
        ValueError: it has changed since, or the checkpoint does not name it.
    """
    from tril.data.config import parse

    if not run.data:
        raise ValueError(f"{run.checkpoint.path} does not say on which text it was trained; name a run")
    prepared = parse(run.data).prepare()
    now, before = prepared.meta["fingerprint"][:12], run.checkpoint.data["fingerprint"][:12]
    if now != before:
        changed = f"the text has changed since the run (fingerprint {now} instead of {before})"
        raise ValueError(f"{changed}; restore it, or train again")
    return prepared


def evaluated_texts(subjects: "Sequence[Subject]", source: "DataConfig | None", part: "Part") -> "list[EvaluatedText]":
    """A text in the tokens of each checkpoint.

    Args:
        source: the text; None: that of the run of the first checkpoint.

    Raises:
        ValueError: it has changed since the run, or is too short.
    """
    from tril.data.config import parse
    from tril.model.evaluation.subject import EvaluatedText

    first, prepared, of = subjects[0], None, "the run"
    if source is None:
        run = read_run(Path(str(first.checkpoint.path)))
        prepared, source = prepared_text(run), parse(run.data)
    else:
        of = f"data.source={source.source.name}"
    name = f"the {'validation part' if part == 'val' else 'whole text'} of {of}"
    return [
        EvaluatedText.of(prepared, part, name)
        if prepared is not None and subject.same_tokenizer(first)
        else subject.read_text(source, part, name)
        for subject in subjects
    ]


def validation_tokens(run: TrainedRun) -> "np.ndarray":
    """Token ids of the validation part, (number of tokens,).

    Raises:
        ValueError: the text has changed since the run.
    """
    return prepared_text(run).tokens("val")


def sample_windows(run: TrainedRun, tokens: "np.ndarray", n: int) -> "tuple[np.ndarray, TokenWindows, TextClusters]":
    """Picks n whole windows, evenly spaced from the first one of a text to the last one.

    Args:
        tokens: (number of tokens,) ids of the text.
        n: number of windows N, at least 2.

    Returns:
        The numbers of the windows (N,); the windows; and the documents in them.

    Raises:
        ValueError: there are fewer than n whole windows.
    """
    import numpy as np
    import torch

    from tril.model.heads.attention_maps import TokenWindows
    from tril.model.text_clusters import TextClusters

    length, eot = run.checkpoint.config.context_length, run.checkpoint.data["eot_id"]  # T
    n_whole = (len(tokens) - 1) // length
    if n > n_whole:
        limit = f"the {n_whole} whole windows of {length} tokens in the validation part"
        raise ValueError(f"windows={n} exceeds {limit}; lower it")
    numbers = np.arange(n) * (n_whole - 1) // (n - 1)
    positions = length * numbers[:, None] + np.arange(length + 1)  # (N, T + 1)
    ids = torch.from_numpy(tokens[positions].astype(np.int64))
    opens = tokens == eot  # a document opens with the end-of-text token
    documents = torch.from_numpy(np.cumsum(opens)[positions[:, :-1]])  # (N, T)
    windows = TokenWindows(ids[:, :-1], ids[:, 1:], eot if run.data.get("document_mask") else None)
    return numbers, windows, TextClusters.of(documents, windows.targets)
