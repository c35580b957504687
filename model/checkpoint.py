"""Self-contained checkpoints: one file of plain containers that loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...},
     "tril": {"format", "config", "tokenizer", "eot", "data", "versions"}, ...}

Training writes it through Lightning, which adds the state for resuming, and adds "causality", the certificate of the
run, to "tril". `save` writes these two entries only.
"""

import pickle
import platform
import textwrap
from pathlib import Path

import tokenizers
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tril.model.atomic_files import atomic_path
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig
from tril.model.runs import find_checkpoint
from tril.model.validation import explain

FORMAT = 1  # of the "tril" entry
PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves
REQUIRED = {"config": dict, "tokenizer": str, "eot": str}  # in the "tril" entry


def load(path: str | Path = "latest", device: torch.device | str = "cpu") -> LanguageModel:
    """Loads the model, in evaluation mode, and the tokenizer of a checkpoint.

    Args:
        path: a checkpoint file, the folder of a run, or "latest"; see `tril.model.runs.find_checkpoint`.

    Raises:
        OSError: there is no checkpoint.
        ValueError: the file is not a checkpoint, or its parts do not match.
    """
    path = find_checkpoint(path)
    checkpoint = read(path)
    entry = checkpoint["tril"]
    try:
        config = _config(entry["config"])
        tokenizer = _tokenizer(entry["tokenizer"])
        with torch.device(device), SkipInit():
            model = GPT(config)
        _copy_weights(checkpoint["state_dict"], model)
        return LanguageModel(model.eval(), tokenizer, entry["eot"])
    except ValueError as error:
        message = explain(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{path}: {message}") from error


def save(path: str | Path, lm: LanguageModel, **data) -> None:
    """Writes a checkpoint atomically; `data` are plain values that describe the training data."""
    weights = {PREFIX + name: tensor for name, tensor in lm.model.state_dict().items()}
    write(path, {"state_dict": weights, "tril": payload(lm.model, lm.tokenizer, lm.eot, data)})


def write(path: str | Path, content: dict) -> None:
    """Writes `content` with `torch.save`, atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        torch.save(content, part)


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


def read(path: str | Path) -> dict:
    """Reads the content of a checkpoint file and checks its "tril" entry; tensors are memory-mapped on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a checkpoint of Tril, or has another format.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        if getattr(error, "filename", None) is not None:  # no such file, or no permission
            raise
        reason = f"torch.load: {_first_line(error)}"
        raise ValueError(f"{path} is not a checkpoint, or is truncated ({reason}); use another file") from error
    content = content if isinstance(content, dict) else {}
    if not all(isinstance(content.get(key), dict) for key in ("tril", "state_dict")):
        raise ValueError(f"{path} has no state_dict and tril entries; use a .ckpt file that train.py wrote")
    entry = content["tril"]
    if entry.get("format") != FORMAT:
        remedy = f"this version of Tril reads {FORMAT}; use the version that wrote it"
        raise ValueError(f"{path} has format {entry.get('format')}; {remedy}")
    missing = [key for key, kind in REQUIRED.items() if not isinstance(entry.get(key), kind)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in its tril entry; it is damaged, use another file")
    return content


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init: the checkpoint replaces all weights, and torch's global generator stays unchanged."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _config(values: dict) -> GPTConfig:
    unknown = sorted(map(str, values.keys() - GPTConfig.__dataclass_fields__.keys()))
    if unknown:
        raise ValueError(
            f"its config has the unknown {', '.join(unknown)}, so a newer version of Tril wrote it; update"
        )
    return GPTConfig(**values)


def _tokenizer(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exceptions
        reason = _first_line(error)
        raise ValueError(f"its tokenizer cannot be read ({reason}); it is damaged, use another file") from error


def _copy_weights(state: dict[str, Tensor], model: GPT) -> None:
    """Fills the model's parameters; raises ValueError unless names and shapes are exactly those of the model."""
    try:
        nn.ModuleDict({PREFIX.rstrip("."): model}).load_state_dict(state)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition(":")[2], 300, placeholder=" ...")
        raise ValueError(f"its tensors do not match its config ({reason}); it is damaged, use another file") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
