"""Self-contained checkpoints: one file of plain containers that loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...},
     "tril": {"config", "tokenizer", "eot", "data", "versions", "run", "code", "causality", "init_from"},
     "digests": {entry: sha256}, ...}

Training writes it through Lightning, which adds the state for resuming: "optimizer_states", "loops" and so on. An entry
is verified when it is read, so sampling does not read the optimizer's state.
"""

import contextlib
import errno
import platform
import re
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tril.data.settings import explain
from tril.data.tokenizer import load_tokenizer
from tril.model.atomic_files import atomic_path
from tril.model.config import GPTConfig, check_memory
from tril.model.digest import digest
from tril.model.gpt import GPT
from tril.model.initialization import SkipInit
from tril.model.runs import find_checkpoint

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

DIGESTS = "digests"  # the entry with the sha256 of each other entry
PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # converted to float32
REMEDY = "it is damaged, use another file"
# Attribute of Checkpoint: its key in the "tril" entry, and its type. The first three are in every file.
ENTRY = {
    **{"config": ("config", dict), "tokenizer": ("tokenizer", str), "eot": ("eot", str), "data": ("data", dict)},
    **{"versions": ("versions", dict), "settings": ("run", dict), "code": ("code", str)},
    **{"certificate": ("causality", dict), "lineage": ("init_from", dict)},
}
REQUIRED = ("config", "tokenizer", "eot")


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


def current_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "tokenizers": version("tokenizers")}


@dataclass
class Checkpoint:
    """A model, and what is needed to use it and to know where it comes from.

    Attributes:
        weights: by the parameter names of GPT; {} where they were not read.
        tokenizer: the JSON of `tokenizers`.
        eot: the end-of-text token.
        data: meta.json of the text that it was trained on.
        step: optimizer steps before it was written; None: unknown.
        certificate: summary of the causality certificate, see `tril.model.binding`; None: none.
        lineage: where the initial weights come from; None: they were random.
        settings: of the run, as plain values.
        code: sha256 of the source files that decide a run's results.
    """

    config: GPTConfig
    weights: dict[str, Tensor]
    tokenizer: str
    eot: str
    data: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    certificate: dict[str, Any] | None = None
    lineage: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=current_versions)
    code: str | None = None
    path: Path | None = None

    @classmethod
    def read(cls, path: str | Path, *, weights: bool = True) -> "Checkpoint":
        """Reads and verifies a file.

        Raises:
            OSError: the file cannot be read.
            DamagedCheckpoint: it is not what was written.
            ValueError: it is not a checkpoint of Tril.
        """
        entries = ("tril", "global_step", "state_dict") if weights else ("tril", "global_step")
        return cls.of(read_state(path, entries=entries, mmap=True), Path(path))

    @classmethod
    def of(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """The checkpoint in what `read_state` returned for `path`."""
        entry, step = state["tril"], state.get("global_step")
        values = {name: entry[key] for name, (key, _) in ENTRY.items() if key in entry}
        try:
            values["config"] = GPTConfig(**values["config"])
        except (ValueError, TypeError) as error:
            raise _refused(path, error) from error
        weights = {str(name).removeprefix(PREFIX): tensor for name, tensor in state.get("state_dict", {}).items()}
        return cls(**values, weights=weights, step=step if type(step) is int else None, path=path)

    def entry(self) -> dict[str, Any]:
        """The "tril" entry of the file."""
        values = {key: getattr(self, name) for name, (key, _) in ENTRY.items()} | {"config": self.config.to_dict()}
        return {key: value for key, value in values.items() if value is not None}

    def write(self, path: str | Path) -> None:
        """Writes a file without the state of training; see `write_state`."""
        weights = {PREFIX + name: tensor for name, tensor in self.weights.items()}
        step = {} if self.step is None else {"global_step": self.step}
        write_state(path, {"state_dict": weights, "tril": self.entry(), **step})

    def language_model(self, device: torch.device | str = "cpu") -> "LanguageModel":
        """The model, in evaluation mode and in float32, with its tokenizer.

        Raises:
            ValueError: config, weights and tokenizer do not match.
        """
        from tril.model.generation.language_model import LanguageModel

        try:
            model = build(self.config, self.weights, device)
            assert self.config.vocab_size is not None
            return LanguageModel(model.eval(), load_tokenizer(self.tokenizer, self.config.vocab_size), self.eot)
        except ValueError as error:
            raise _refused(self.path, error) from error


def load(path: str | Path = "latest", device: torch.device | str = "cpu") -> "LanguageModel":
    """Loads the model, in evaluation mode, and the tokenizer of a checkpoint.

    Weights of another floating-point precision are converted to float32.

    Args:
        path: a checkpoint file, the folder of a run, or "latest"; see `tril.model.runs.find_checkpoint`.

    Raises:
        OSError: there is no checkpoint.
        DamagedCheckpoint: the file is damaged.
        ValueError: the file is not a checkpoint, or its parts do not match.
    """
    return Checkpoint.read(find_checkpoint(path)).language_model(device)


def save(path: str | Path, lm: "LanguageModel", **data: Any) -> None:
    """Writes a checkpoint atomically; `data` are plain values that describe the training data."""
    weights = lm.model.state_dict()
    Checkpoint(lm.config, dict(weights), lm.tokenizer.to_str(), lm.eot, data=data).write(path)


def build(config: GPTConfig, weights: dict[str, Tensor], device: torch.device | str = "cpu") -> GPT:
    """The model with copies of `weights` in float32.

    The sizes in the config are compared with the tensors before memory is taken for them.

    Raises:
        ValueError: names, shapes or dtypes that are not exactly those of the model.
    """
    problems = [f"{name} is no floating-point tensor" for name, x in weights.items() if not _is_weight(x)]
    if not problems:
        n_stored = sum(x.numel() for name, x in weights.items() if name != "head.weight" or not config.tie_embeddings)
        if config.vocab_size is None or config.n_parameters() != n_stored:
            raise ValueError(f"its tensors have {n_stored:,} elements, and its config {_count(config)}; {REMEDY}")
        check_memory(config)
        with torch.device("meta"), SkipInit():  # takes no memory
            model = GPT(config)
        shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        stored = {name: tuple(x.shape) for name, x in weights.items()}
        names = sorted(shapes.keys() | stored.keys())
        problems = [
            f"{PREFIX}{name} has the shape {stored.get(name)}, and needs {shapes.get(name)}"
            for name in names
            if shapes.get(name) != stored.get(name)
        ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"its tensors do not match its config ({'; '.join(problems[:3])}{more}); {REMEDY}")
    copies = {name: weights[name].to(device, p.dtype, copy=True) for name, p in model.named_parameters()}
    model.load_state_dict(copies, strict=False, assign=True)  # a tied head is not among the copies
    model.tie_head()
    with torch.device(device):
        model.make_tables()
    return model


def _is_weight(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in WEIGHT_DTYPES


def _count(config: GPTConfig) -> str:
    return "no vocab_size" if config.vocab_size is None else f"has {config.n_parameters():,} parameters"


def write_state(path: str | Path, content: dict[str, Any]) -> None:
    """Writes `content` and its digests with `torch.save`, atomically; a new certificate gets that of the weights.

    Args:
        content: plain containers and values, and dense tensors. Nothing may change it meanwhile: the digests are
            computed before the file is written.

    Raises:
        OSError: it cannot be written, with the reason and a remedy; an earlier file is unchanged.
        ValueError: the content has something that `read_state` would refuse.
    """
    path = Path(path)
    content = {key: value for key, value in content.items() if key != DIGESTS}
    weights = digest(content["state_dict"]) if "state_dict" in content else None
    match content.get("tril"):
        case {"causality": {"of": {"weights": None} as of} as certificate} as entry:
            certificate = certificate | {"of": of | {"weights": weights}}
            content["tril"] = entry | {"causality": certificate}
    digests = {key: weights if key == "state_dict" else digest(value) for key, value in content.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part, part.open("wb") as file:
            torch.save(content | {DIGESTS: digests}, file)
    except (OSError, RuntimeError) as error:
        cause = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save replaces the error of a full disk by one of its own
        if cause is None:
            raise
        remedy = "free space, or choose" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
        reason = f"cannot write {path}: {cause.strerror or cause}; {remedy} another folder with hydra.run.dir"
        raise OSError(reason) from error


def read_state(path: str | Path, *, entries: Collection[str] | None = None, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint file, verified; tensors are on the CPU.

    Args:
        entries: those to return and verify; None: all.
        mmap: map the tensors into memory instead of reading them. The file must not change while they are in use.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpoint: it is not what was written.
        ValueError: it is not a checkpoint of Tril.
    """
    path = Path(path)
    content = load_plain(path, mmap=mmap)
    entry = content.get("tril") if isinstance(content, dict) else None
    if not isinstance(entry, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} has no state_dict and tril entries; use a .ckpt file that train.py wrote")
    stored = content.pop(DIGESTS, None)
    if not isinstance(stored, dict) or stored.keys() != content.keys():
        raise DamagedCheckpoint(path, "is damaged, or of another version of Tril: it has no digest of each entry")
    content = {key: value for key, value in content.items() if entries is None or key in entries}
    try:
        size = path.stat().st_size
        wrong = [key for key, value in content.items() if digest(value, max_bytes=size) != stored[key]]
    except (ValueError, RuntimeError) as error:
        raise DamagedCheckpoint(path, f"is damaged: {error}") from error
    if wrong:
        raise DamagedCheckpoint(path, f"is damaged: {wrong[0]} differs from its sha256")
    missing = [key for key in REQUIRED if key not in entry]
    missing += [key for key, kind in ENTRY.values() if key in entry and not isinstance(entry[key], kind)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in its tril entry; {REMEDY}")
    return content


def load_plain(path: Path, *, mmap: bool = True) -> Any:
    """What `torch.load` reads from a file that can run no code; its values are not verified.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpoint: it is not a checkpoint of torch.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("a record is compressed")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # of any kind: the file decides what torch.load meets
        if isinstance(error, OSError) and error.filename is not None:  # no such file, or no permission
            raise
        raise DamagedCheckpoint(path, f"is not a checkpoint, or is truncated{_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of an error, in parentheses. torch advises to allow code, which is not repeated."""
    text = str(error)
    if forbidden := re.search(r"GLOBAL ([\w.]+)", text):
        return f" (it refers to {forbidden[1]}, which no checkpoint needs)"
    lines = text.strip().splitlines()
    return f" ({lines[0]})" if lines and "weights" not in text.lower() else ""


def _refused(path: Path | None, error: Exception) -> ValueError:
    message = explain(error) if isinstance(error, ValidationError) else str(error)
    return ValueError(one_line(f"{path}: {message}" if path else message))


def one_line(text: str) -> str:
    """At most 600 characters without line breaks and control characters, since a file can contain any."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-296:]}"
