"""A checkpoint is one file of plain containers that needs nothing beside it and loads with `weights_only=True`.

    {"state_dict": {"model.<parameter>": tensor, ...}, "tril": {"format", "config", "tokenizer", "eot", "data", "versions"}, ...}

Training writes it through Lightning, which adds what resuming needs, and "causality", the run's certificate, to "tril"; `save` writes these
two entries alone.
"""

import pickle
import platform
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tril.model.files import atomic_path
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig
from tril.model.runs import find_checkpoint

FORMAT = 1  # of the "tril" entry; a reader refuses any other
PREFIX = "model."  # of parameter names: the GPT is the attribute `model` of the module that Lightning saves


def load(path: str | Path = "latest", device: torch.device | str = "cpu") -> LanguageModel:
    """The model and tokenizer of a checkpoint, in evaluation mode; `path` as in `model.runs.find_checkpoint`.

    Raises OSError where there is no checkpoint, ValueError for a file that is none or whose parts do not fit together.
    """
    path = find_checkpoint(path)
    checkpoint = read(path)
    ours = checkpoint["tril"]
    try:
        config = _config(ours["config"])
        tokenizer = _tokenizer(ours["tokenizer"])
        with torch.device(device), SkipInit():
            model = GPT(config)
        _copy_weights(checkpoint["state_dict"], model)
        return LanguageModel(model.eval(), tokenizer, ours["eot"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save(path: str | Path, lm: LanguageModel, **data) -> None:
    """Writes a whole checkpoint or nothing; `data` is plain values that describe the training data."""
    weights = {PREFIX + name: tensor for name, tensor in lm.model.state_dict().items()}
    write(path, {"state_dict": weights, "tril": payload(lm.model, lm.tokenizer, lm.eot, data)})


def write(path: str | Path, content: dict) -> None:
    """The whole file or none of it, and no change to one that is there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        torch.save(content, part)


def payload(model: GPT, tokenizer: Tokenizer, eot: str, data: dict) -> dict:
    """The "tril" entry: everything but the weights that text generation needs, and where the model comes from."""
    return {
        "format": FORMAT,
        "config": model.config.to_dict(),
        "tokenizer": tokenizer.to_str(),
        "eot": eot,
        "data": data,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "tokenizers": tokenizers.__version__,
        },
    }


def read(path: str | Path) -> dict:
    """The raw content of a checkpoint file, its tensors on the CPU and still in the file (memory-mapped), its "tril" entry checked.

    Raises OSError for a file that cannot be read, ValueError for one that is no checkpoint of Tril or of another format.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
    ) as error:  # what torch raises for other files and half ones
        if getattr(error, "filename", None) is not None:  # there is no such file, or it may not be read
            raise
        raise ValueError(
            f"{path} is not a checkpoint, or not all of it (torch.load: {_first_line(error)}); take another file"
        ) from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("tril"), dict)
        or not isinstance(content.get("state_dict"), dict)
    ):
        raise ValueError(
            f"{path} has no state_dict and tril entries, so Tril did not write it; take a .ckpt from a run of train.py"
        )
    ours = content["tril"]
    if ours.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {ours.get('format')} and this version of Tril reads {FORMAT}; use the version that wrote it"
        )
    lacking = [
        key for key, kind in (("config", dict), ("tokenizer", str), ("eot", str)) if not isinstance(ours.get(key), kind)
    ]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)} in its tril entry; it is damaged, take another file")
    return content


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init: weights that a checkpoint replaces need no random numbers, and torch's global generator stays as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in (kwargs or {}) else args[0]
        return func(*args, **(kwargs or {}))


def _config(values: dict) -> GPTConfig:
    unknown = sorted(map(str, values.keys() - GPTConfig.__dataclass_fields__.keys()))
    if unknown:
        raise ValueError(
            f"its config has {', '.join(unknown)}, unknown here; it comes from a newer version of Tril, update to that one"
        )
    if "vocab_size" not in values:
        raise ValueError("its config has no vocab_size; it is damaged, take another file")
    return GPTConfig(**values)


def _tokenizer(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(
            f"its tokenizer cannot be read ({_first_line(error)}); it is damaged, take another file"
        ) from error


def _copy_weights(state: dict[str, Tensor], model: GPT) -> None:
    """Fills the model's parameters; raises ValueError unless names and shapes are exactly the model's."""
    own = {PREFIX + name: tensor.shape for name, tensor in model.state_dict().items()}
    shapes = {name: getattr(tensor, "shape", None) for name, tensor in state.items()}
    differ = [
        f"{name} {_plain(shapes[name])} instead of {_plain(own[name])}"
        for name in own.keys() & shapes.keys()
        if own[name] != shapes[name]
    ]
    problems = {
        "missing": own.keys() - shapes.keys(),
        "unexpected": shapes.keys() - own.keys(),
        "of another shape": differ,
    }
    wrong = [f"{kind}: {_few(names)}" for kind, names in problems.items() if names]
    if wrong:
        raise ValueError(f"its tensors do not fit its config ({'; '.join(wrong)}); it is damaged, take another file")
    model.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in state.items()})


def _few(names, most: int = 3) -> str:
    names = sorted(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _plain(shape) -> tuple | None:
    return None if shape is None else tuple(shape)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
