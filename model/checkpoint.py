"""Self-contained checkpoints: one file of plain containers that loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...},
     "tril": {"format", "config", "tokenizer", "eot", "data", "versions"},
     "checksums": {"tensors": {path: sha256}, "rest": sha256}, ...}

Training writes it through Lightning, which adds the state for resuming, and adds "causality", the certificate of the
run, to "tril"; `tril.model.binding` says what that belongs to. `save` writes these entries only. `read` verifies the
checksums, see `tril.model.checksums`.
"""

import contextlib
import errno
import platform
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer

from tril.data.settings import explain
from tril.model.atomic_files import atomic_path
from tril.model.binding import add_weights
from tril.model.checksums import checksums
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT
from tril.model.runs import find_checkpoint
from tril.model.stored_model import PREFIX, build
from tril.model.stored_tokenizer import load_tokenizer

FORMAT = 2  # of the "tril" entry. A file of format 1 has no checksums; a format with others needs another key for them
CHECKSUMS = "checksums"  # the entry with them
REQUIRED = {"config": dict, "tokenizer": str, "eot": str}  # in the "tril" entry


class DamagedCheckpoint(ValueError):
    """The file `path` is not what was written. The message names the other checkpoints of its folder, newest first."""

    def __init__(self, path: Path, problem: str):
        self.path = path
        others = []
        for file in path.parent.glob("*.ckpt"):
            with contextlib.suppress(OSError):  # a run that goes on may replace it
                if not file.samefile(path):  # nor is it a hard link to the damaged one
                    others.append((file.stat().st_mtime, file))
        newest = [str(file) for _, file in sorted(others, reverse=True)[:3]]
        remedy = f"use {' or '.join(newest)}" if newest else "restore it from a copy, or train again"
        super().__init__(one_line(f"{path} {problem}; {remedy}"))


def load(path: str | Path = "latest", device: torch.device | str = "cpu") -> LanguageModel:
    """Loads the model, in evaluation mode, and the tokenizer of a checkpoint.

    Weights of another floating-point precision are converted to float32.

    Args:
        path: a checkpoint file, the folder of a run, or "latest"; see `tril.model.runs.find_checkpoint`.

    Raises:
        OSError: there is no checkpoint.
        DamagedCheckpoint: the file is damaged.
        ValueError: the file is not a checkpoint, or its parts do not match.
    """
    path = find_checkpoint(path)
    return language_model(path, read(path, entries=("state_dict", "tril")), device)


def language_model(path: Path, content: dict[str, Any], device: torch.device | str = "cpu") -> LanguageModel:
    """The model and the tokenizer of what `read` returned for `path`; raises ValueError if its parts do not match."""
    entry = content["tril"]
    try:
        model = build(entry["config"], content["state_dict"], device)
        tokenizer = load_tokenizer(entry["tokenizer"], model.config.vocab_size)
        return LanguageModel(model.eval(), tokenizer, entry["eot"])
    except ValueError as error:
        message = explain(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(one_line(f"{path}: {message}")) from error


def save(path: str | Path, lm: LanguageModel, **data) -> None:
    """Writes a checkpoint atomically; `data` are plain values that describe the training data."""
    weights = {PREFIX + name: tensor for name, tensor in lm.model.state_dict().items()}
    write(path, {"state_dict": weights, "tril": payload(lm.model, lm.tokenizer, lm.eot, data)})


def write(path: str | Path, content: dict[str, Any]) -> None:
    """Writes `content` and its checksums with `torch.save`, atomically; a new certificate gets the weights' hash.

    Args:
        content: plain containers and values, and dense tensors. Nothing may change it meanwhile: the checksums are
            computed before the file is written.

    Raises:
        OSError: it cannot be written, with the reason and a remedy; an earlier file is unchanged.
        ValueError: the content has something that `read` would refuse.
    """
    path = Path(path)
    values = {key: value for key, value in content.items() if key != CHECKSUMS}
    tensors = checksums(values)["tensors"]
    values = add_weights(values, tensors)
    complete = values | {CHECKSUMS: {"tensors": tensors, "rest": checksums(values, ())["rest"]}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part, part.open("wb") as file:
            torch.save(complete, file)
    except (OSError, RuntimeError) as error:
        cause = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save replaces the error of a full disk by one of its own
        if cause is None:
            raise
        remedy = "free space, or choose" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
        reason = f"cannot write {path}: {cause.strerror or cause}; {remedy} another folder with hydra.run.dir"
        raise OSError(reason) from error


def payload(model: GPT, tokenizer: Tokenizer, eot: str, data: dict) -> dict:
    """The "tril" entry: what text generation needs besides the weights, and the origin of the model."""
    versions = {"torch": str(torch.__version__), "tokenizers": tokenizers.__version__}
    return {
        "format": FORMAT,
        "config": model.config.to_dict(),
        "tokenizer": tokenizer.to_str(),
        "eot": eot,
        "data": data,
        "versions": {"python": platform.python_version(), **versions},
    }


def read(path: str | Path, *, entries: Collection[str] | None = None, mmap: bool = True) -> dict[str, Any]:
    """Reads the content of a checkpoint file and verifies it; tensors are on the CPU.

    Args:
        entries: the entries to return, with "tril" always checked; None: all but the checksums. Only the tensors of
            these entries are verified, and all other values of the file.
        mmap: map the tensors into memory instead of reading them. The file must not change while they are in use.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpoint: it is not what was written.
        ValueError: it is not a checkpoint of Tril, or has another format.
    """
    path = Path(path)
    content = load_plain(path, mmap=mmap)
    if not isinstance(content, dict) or not content.keys() & {CHECKSUMS, "tril"}:
        raise ValueError(f"{path} has no state_dict and tril entries; use a .ckpt file that train.py wrote")
    stored = content.pop(CHECKSUMS, None)
    if problem := _difference(path, content, entries, stored):
        raise DamagedCheckpoint(path, f"is damaged: {problem}")
    _check_entries(path, content)
    return {key: value for key, value in content.items() if entries is None or key in entries}


def load_plain(path: Path, *, mmap: bool = True) -> Any:
    """What `torch.load` reads from a file that can run no code; its values are not verified.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpoint: it is not a checkpoint of torch.
    """
    try:
        _check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # of any kind: the file decides what torch.load meets
        if isinstance(error, OSError) and error.filename is not None:  # no such file, or no permission
            raise
        raise DamagedCheckpoint(path, f"is not a checkpoint, or is truncated{_reason(error)}") from error


def _check_archive(path: Path) -> None:
    """Raises ValueError if the file states sizes that it does not have: no record may be compressed."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("a record is compressed")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise ValueError("its records are larger than the file")


def _difference(path: Path, content: dict[str, Any], entries: Collection[str] | None, stored: Any) -> str | None:
    """What differs from what was written: by its checksums or, of a file of format 1, by those of the zip archive."""
    try:
        found = checksums(content, entries, max_bytes=path.stat().st_size)
    except ValueError as error:
        return str(error)
    entry = content.get("tril")
    if stored is None and isinstance(entry, dict) and entry.get("format") == 1:
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except zipfile.BadZipFile as error:
            bad = error
        return bad and f"the CRC-32 of {bad} differs"
    if not isinstance(stored, dict) or not isinstance(stored.get("tensors"), dict):
        return "it has no checksums"
    if stored.get("rest") != found["rest"]:
        return "its values other than tensors differ from their sha256"
    wrong = [name for name, digest in found["tensors"].items() if stored["tensors"].get(name) != digest]
    return f"{len(wrong)} tensors differ from their sha256, the first is {wrong[0]}" if wrong else None


def _check_entries(path: Path, content: dict[str, Any]) -> None:
    """Checks what is common to all checkpoints of Tril."""
    entry = content.get("tril")
    if not isinstance(entry, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} has no state_dict and tril entries; use a .ckpt file that train.py wrote")
    if entry.get("format") not in (1, FORMAT):
        remedy = f"this version of Tril reads 1 to {FORMAT}; use the version that wrote it"
        raise ValueError(one_line(f"{path} has format {entry.get('format')}; {remedy}"))
    missing = [key for key, kind in REQUIRED.items() if not isinstance(entry.get(key), kind)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in its tril entry; it is damaged, use another file")


def _reason(error: Exception) -> str:
    """The first line of an error, in parentheses. torch advises to allow code, which is not repeated."""
    text = str(error)
    if forbidden := re.search(r"GLOBAL ([\w.]+)", text):
        return f" (it refers to {forbidden[1]}, which no checkpoint needs)"
    lines = text.strip().splitlines()
    return f" ({lines[0]})" if lines and "weights" not in text.lower() else ""


def one_line(text: str) -> str:
    """At most 600 characters without line breaks and control characters, since a file can contain any."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-296:]}"
