"""Loads or builds a causal language model of `transformers`."""

import copy
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

import torch

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def load(name: str, seed: int) -> tuple[str, Any]:
    """The model that `name` stands for, in float32.

    Args:
        name: as in `transformers_cases`.
        seed: of initial weights.

    Returns:
        "trained" or, for a config without weights, "initial"; and the model.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: it cannot be loaded; one line.
    """
    path, key = Path(name), f"hf={name}"
    remedy = "name a folder written by save_pretrained, a config, or a model on the hub"
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{key} is a folder without config.json; {remedy}")
    if not path.exists() and (name.endswith(".json") or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)):
        raise FileNotFoundError(f"{key} does not exist; {remedy}")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{key} needs the library transformers; pip install transformers") from error
    quiet()
    try:
        return _load(name, seed)
    except Exception as error:  # transformers raises many kinds, with many lines
        what = "cannot be loaded" if path.exists() else "does not exist here, and cannot be loaded from the hub"
        raise ValueError(textwrap.shorten(f"{key} {what}: {error}", 300, placeholder=" ...")) from error


def quiet() -> None:
    """`transformers` prints errors only, and no progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _load(name: str, seed: int) -> tuple[str, Any]:
    import transformers

    path = Path(name)
    # trust_remote_code=None would ask on the terminal
    options: dict[str, Any] = {"local_files_only": path.exists(), "trust_remote_code": False}
    config: Any = transformers.AutoConfig.from_pretrained(name, **options)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model for model_type={config.model_type}; name another")
    if path.is_file() or path.is_dir() and not any(any(path.glob(pattern)) for pattern in WEIGHTS):
        return "initial", build(config, seed)
    options |= {"config": config, "dtype": torch.float32, "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(name, **options)  # pyright: ignore[reportGeneralTypeIssues] # a pair with output_loading_info
    if missing := info["missing_keys"]:
        raise ValueError(f"there are no weights for {min(missing)} of {type(model).__name__}; save the whole model")
    return "trained", model


def build(config: Any, seed: int, attention: str | None = None, model_class: Any = None) -> Any:
    """A new model in float32 and evaluation mode, whose initial weights are a function of the seed.

    Args:
        attention: its attention implementation; None: the default of `transformers`.
        model_class: None: the one of the config.
    """
    import transformers

    options = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        config = copy.deepcopy(config)
        create = transformers.AutoModelForCausalLM.from_config if model_class is None else model_class._from_config
        return create(config, dtype=torch.float32, **options).eval()
