"""Self-contained checkpoints: one file of plain values and tensors that loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...}, "global_step": optimizer steps,
     "tril": {the other attributes of Checkpoint}, ...}

Training writes it through Lightning, which adds the state for resuming: "optimizer_states", "loops" and so on. The file
is a zip archive with a CRC-32 of each record, which `torch.load` does not verify.
"""

import contextlib
import functools
import hashlib
import math
import pickletools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from pydantic import ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from tril.data.settings import explain, one_line, strict_settings
from tril.model.atomic_files import atomic_path, check_archive, reading
from tril.model.config import GPTConfig
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, check_memory

PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves
MAX_PATHS = 1_000_000  # to one value of a checkpoint
PLAIN = ("BINUNICODE", "GLOBAL", "SHORT_BINSTRING")  # after which a pickle keeps a value that has no others
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
        """Reads and verifies a file. Raises as `read_state`."""
        return cls.of(read_state(path), Path(path))

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
            check_weights(entry["config"], weights)
            return cls(**entry, weights=weights, step=state.get("global_step"), path=path)

    def entry(self) -> dict[str, Any]:
        """The "tril" entry of the file."""
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in ("weights", "step", "path")}
        return values | {"config": self.config.to_dict()}

    def language_model(self, device: torch.device | str = "cpu") -> LanguageModel:
        """The model, in evaluation mode, with its tokenizer.

        Raises:
            ValueError: config, weights and tokenizer do not match.
        """
        with named(self.path):
            return LanguageModel(self.model(device).eval(), self.tokenizer, self.eot, source=self.path)

    def model(self, device: torch.device | str = "cpu") -> GPT:
        """The model with copies of the weights in float32.

        Raises:
            ValueError: names or shapes that are not those of the model.
        """
        check_weights(self.config, self.weights)
        weights = dict(self.weights)
        if self.config.tie_embeddings:  # the head is the embedding
            weights.pop("head.weight", None)
        model = GPT.without_values(self.config)
        needed, stored = (
            {(name, x.shape, x.is_floating_point()) for name, x in tensors}
            for tensors in (model.named_parameters(), weights.items())  # a tied head is in neither
        )
        if wrong := sorted(needed ^ stored):
            raise ValueError(f"{wrong[0][0]} is missing, unknown, of another shape, or no floating-point tensor")
        check_memory(self.config)  # tables of positions are not in the file
        copies = {name: x.to(device, torch.float32, copy=True) for name, x in weights.items()}
        model.load_state_dict(copies, assign=True, strict=False)
        model.tie_head()
        with torch.device(device):
            model.pos_embed.make_tables()
        return model


def check_weights(config: GPTConfig, weights: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that are too few for the layers, or for what is no plain tensor: sparse, quantized
    or nested, without data, or of repeated data.

    A file of some bytes can say that a tensor repeats one number 2^40 times, or has no data.
    """
    if len(weights) < config.n_layers:  # before thousands of blocks are built
        raise ValueError(f"model.n_layers={config.n_layers} needs more than {len(weights)} weights")
    for name, x in weights.items():
        is_plain = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and not x.is_quantized
        if is_plain and x.is_floating_point():
            is_plain = x.dtype.itemsize > 1  # torch compares no numbers of 8 bits
        if not is_plain or x.is_meta or x.nbytes > x.untyped_storage().nbytes():
            raise ValueError(f"{name} is no dense tensor of usual numbers; use another file")


def save(path: str | Path, lm: LanguageModel, **data: Any) -> None:
    """Writes a model without the state of training; `data` are plain values that describe its training data."""
    entry = Checkpoint(lm.config, {}, lm.tokenizer.to_str(), lm.eot, data=data).entry()
    weights = {PREFIX + name: tensor for name, tensor in lm.model.state_dict().items()}
    write_state(path, {"state_dict": weights, "tril": entry})


def write_state(path: str | Path, content: dict[str, Any]) -> None:
    """Writes plain containers, values and tensors with `torch.save`, atomically.

    Raises:
        OSError: they cannot be written; an earlier file is unchanged.
        ValueError: the content has something that `read_state` would not load.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        try:
            torch.save(content, part)
        except RuntimeError as error:  # of torch's writer, such as on a full disk
            raise OSError(f"cannot write {path} ({error})") from error
        load_plain(part)


def read_state(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, verified.

    Its tensors are on the CPU and mapped from the file, which another one may replace (`write_state`), but which must
    not be written to while they are in use.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or is not a checkpoint of Tril.
    """
    content = load_plain(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("state_dict", "tril")):
        remedy = "use a .ckpt file that train.py wrote, or train on from one of nanoGPT with init_from=nanogpt:FILE"
        raise ValueError(f"{path} has no state_dict and tril entries; {remedy}")
    return content


def load_plain(path: str | Path) -> Any:
    """What `torch.load` reads without running code from a file whose CRC-32s are right. Raises as `read_state`."""
    with reading(Path(path)):
        with ZipFile(path) as archive:
            check_archive(archive)
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    check_pickle(archive.read(name))
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError:  # whose message advises to allow code
            raise ValueError("it has more than plain values and tensors") from None


def check_pickle(content: bytes) -> None:
    """Raises BadZipFile if the containers of a pickle share each other so that hashing or printing one may not end.

    600 bytes can hold 60 tuples, each of which has the one before twice, so that there are 2^60 paths to the first.
    """
    steps = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(content)]
    is_put = [(before, key) for (before, _), (name, key) in pairwise(steps) if name.endswith("PUT")]
    texts = {key for before, key in is_put if before in PLAIN} - {key for before, key in is_put if before not in PLAIN}
    shared = Counter(key for name, key in steps if name.endswith("GET") and key not in texts)
    if math.prod(1 + n for n in shared.values()) > MAX_PATHS:
        raise BadZipFile(f"{len(shared)} of its containers are shared")


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
