"""`from tril import load`: `load("latest")` is the model of the newest run, with its tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from tril.model.callable_module import make_callable

if TYPE_CHECKING:
    import torch

    from tril.model.generation.language_model import LanguageModel


def load(path: str | Path = "latest", device: "torch.device | str" = "cpu") -> "LanguageModel":
    """Loads a model in evaluation mode, and its tokenizer, as `tril.model.load` does.

    Args:
        path: a checkpoint file, the folder of a run, or "latest": the newest run below outputs/ and multirun/.

    Raises:
        OSError: there is no checkpoint.
        ValueError: the file is damaged, or is not a checkpoint.
    """
    from tril.model.checkpoint import load

    return load(path, device)


make_callable(__name__, load)  # `from tril import load` gives this module
