"""Self-contained checkpoints: one file of plain values and tensors that loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...}, "global_step": optimizer steps,
     "tril": {the other attributes of Checkpoint}, ...}

Training writes it through Lightning, which adds the state for resuming: "optimizer_states", "loops" and so on. The file
is a zip archive, which has a CRC-32 of each record. Reading verifies them, since `torch.load` does not.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import torch
from pydantic import ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from tril.data.settings import explain, strict_settings
from tril.model.atomic_files import atomic_path
from tril.model.config import GPTConfig, check_memory
from tril.model.gpt import GPT
from tril.model.initialization import SkipInit
from tril.model.runs import find_checkpoint

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves
PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = ("train.py", "model/**/*.py", "data/**/*.py")  # the code that decides a run's results


@dataclass(frozen=True, config=strict_settings() | {"arbitrary_types_allowed": True})
class Checkpoint:
    """A model, and what is needed to use it and to know where it comes from.

    Attributes:
        weights: by the parameter names of GPT.
        tokenizer: the JSON of `tokenizers`.
        eot: the end-of-text token.
        data: meta.json of the text that it was trained on.
        step: optimizer steps before it was written; None: unknown.
        certificate: summary of the causality certificate, see `verdict`; None: none.
        lineage: where the initial weights come from; None: they were random.
        settings: of the run, as plain values.
        code: sha256 of the source files that decide a run's results.
        torch_version: that wrote the file.
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
    code: str | None = None
    torch_version: str = str(torch.__version__)
    path: Path | None = None

    @classmethod
    def read(cls, path: str | Path) -> "Checkpoint":
        """Reads and verifies a file without the state of training. Raises as `read_state`."""
        return cls.of(read_state(path, training=False), Path(path))

    @classmethod
    def of(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """The checkpoint in what `read_state` returned for `path`. Raises ValueError if its values are wrong."""
        weights = {str(name).removeprefix(PREFIX): tensor for name, tensor in state["state_dict"].items()}
        with named(path):
            config = state["tril"].get("config", {})
            # What the file does not say has a default, with which it may be another model.
            if absent := {field.name for field in fields(GPTConfig)} - config.keys():
                raise ValueError(f"it has no model.{min(absent)}, so another version of Tril wrote it; train again")
            entry = state["tril"] | {"config": GPTConfig(**config)}
            return cls(**entry, weights=weights, step=state.get("global_step"), path=path)

    def entry(self) -> dict[str, Any]:
        """The "tril" entry of the file."""
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in ("weights", "step", "path")}
        return values | {"config": self.config.to_dict()}

    def write(self, path: str | Path) -> None:
        """Writes a file without the state of training; see `write_state`."""
        weights = {PREFIX + name: tensor for name, tensor in self.weights.items()}
        write_state(path, {"state_dict": weights, "global_step": self.step, "tril": self.entry()})

    def language_model(self, device: torch.device | str = "cpu") -> "LanguageModel":
        """The model, in evaluation mode, with its tokenizer.

        Raises:
            ValueError: config, weights and tokenizer do not match.
        """
        from tril.model.generation.language_model import LanguageModel

        with named(self.path):
            return LanguageModel(self.model(device).eval(), self.tokenizer, self.eot)

    def model(self, device: torch.device | str = "cpu") -> GPT:
        """The model with copies of the weights in float32; nothing is allocated before sizes and names are compared.

        Raises:
            ValueError: names or shapes that are not those of the model, or more memory than the machine has.
        """
        config, weights = self.config, dict(self.weights)
        if config.tie_embeddings:  # the head is the embedding
            weights.pop("head.weight", None)
        n_stored, n_needed = sum(x.numel() for x in weights.values()), config.vocab_size and config.n_parameters()
        if n_stored != n_needed:  # a model of many blocks takes long to build
            raise ValueError(f"its tensors have {n_stored:,} elements, and its config has {n_needed or 0:,} parameters")
        check_memory(config)
        with torch.device("meta"), SkipInit():
            model = GPT(config)
        needed, stored = (
            {(name, x.shape, x.is_floating_point()) for name, x in tensors}
            for tensors in (model.named_parameters(), weights.items())  # a tied head is in neither
        )
        if wrong := sorted(needed ^ stored):
            raise ValueError(f"{wrong[0][0]} is missing, unknown, of another shape, or no floating-point tensor")
        copies = {name: x.to(device, torch.float32, copy=True) for name, x in weights.items()}
        model.load_state_dict(copies, assign=True, strict=False)
        model.tie_head()
        with torch.device(device):
            model.make_tables()
        return model


def load(path: str | Path = "latest", device: torch.device | str = "cpu") -> "LanguageModel":
    """Loads the model, in evaluation mode, and the tokenizer of a checkpoint.

    Weights of another floating-point precision are converted to float32.

    Args:
        path: a checkpoint file, the folder of a run, or "latest"; see `tril.model.runs.find_checkpoint`.

    Raises:
        OSError: there is no checkpoint.
        ValueError: the file is damaged or not a checkpoint, or its parts do not match.
    """
    return Checkpoint.read(find_checkpoint(path)).language_model(device)


def save(path: str | Path, lm: "LanguageModel", **data: Any) -> None:
    """Writes a checkpoint atomically; `data` are plain values that describe the training data."""
    Checkpoint(lm.config, dict(lm.model.state_dict()), lm.tokenizer.to_str(), lm.eot, data=data).write(path)


def write_state(path: str | Path, content: dict[str, Any]) -> None:
    """Writes `content` with `torch.save`, atomically.

    Args:
        content: plain containers and values, and tensors.

    Raises:
        OSError: it cannot be written, with the reason and a remedy; an earlier file is unchanged.
        ValueError: the content has something that `read_state` would refuse.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            torch.save(content, part)
            load_plain(part)
    except (OSError, RuntimeError) as error:  # RuntimeError: of torch's writer
        reason = f"cannot write {path} ({error.strerror if isinstance(error, OSError) else error})"
        raise OSError(one_line(f"{reason}; free space, or choose another folder with hydra.run.dir")) from error


def read_state(path: str | Path, *, training: bool = True) -> dict[str, Any]:
    """The content of a checkpoint file, verified; tensors are on the CPU.

    Args:
        training: the state of training is needed too. Otherwise all tensors are mapped into memory, so the file must
            not change while they are in use.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or is not a checkpoint of Tril.
    """
    content = load_plain(path, mmap=not training)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("state_dict", "tril")):
        remedy = "use a .ckpt file that train.py wrote, or train on from one of nanoGPT with init_from=nanogpt:FILE"
        raise ValueError(f"{path} has no state_dict and tril entries; {remedy}")
    return content


def load_plain(path: str | Path, *, mmap: bool = True) -> Any:
    """What `torch.load` reads from a file that can run no code, with its CRC-32s verified. Raises as `read_state`."""
    try:
        with ZipFile(path) as archive:
            if sum(record.file_size for record in archive.infolist()) > Path(path).stat().st_size:
                raise BadZipFile("its records are larger than the file")
            if archive.testzip() is not None:
                raise BadZipFile("a CRC-32 differs")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # the file decides which of many kinds torch and zipfile raise
        if isinstance(error, OSError) and error.filename is not None:  # no such file, or no permission
            raise
        ours = isinstance(error, BadZipFile | ValueError)  # torch's messages advise to allow code
        reason = str(error) if ours else type(error).__name__
        remedy = "use another checkpoint of its folder, restore it from a copy, or train again"
        raise ValueError(one_line(f"{path} is damaged, or is not a checkpoint ({reason}); {remedy}")) from error


@contextlib.contextmanager
def named(path: Path | None) -> Iterator[None]:
    """Puts the path before the message of a ValueError, in one line."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = explain(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(one_line(f"{path}: {message}" if path else message)) from error


@functools.cache
def code_sha256() -> str:
    """sha256 of the source files that decide a run's results, with their paths."""
    content = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in PACKAGE.glob(pattern)}):
        content.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()


def verdict(checkpoint: Checkpoint) -> str:
    """One line: whether the certificate passed, and whether it tested the weights of this step with the code of today.

    It tested the weights of the step "certified_at_step", or random weights.
    """
    certificate = checkpoint.certificate or {}
    passed, step = certificate.get("passed"), certificate.get("certified_at_step")
    if not isinstance(passed, bool):
        return "none"
    when = "before training, with random weights" if step is None else f"at step {step}"
    verb = "belongs" if (step, checkpoint.code) == (checkpoint.step, code_sha256()) else "does not belong"
    return one_line(f"{'passed' if passed else 'FAILED'} {when}; {verb} to this step and code")


def one_line(text: str) -> str:
    """At most 600 characters without line breaks and control characters, since a file can contain any."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-296:]}"
