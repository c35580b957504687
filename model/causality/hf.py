"""A causal language model of `transformers` as a `Model`: a folder, a name on the hub, or a config without weights.

It is tested with its own attention, cache and masks. The expected windows come from the config.
"""

import functools
import logging
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tril.model.causality.interface import CONTEXTS, as_model
from tril.model.causality.model import Model, visible_by_windows

MAX_LENGTH = 256  # longest input; the certificate says nothing about longer ones
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def hf_model(name: str, *, device: str = "cpu") -> Model:
    """The `Model` that `name` stands for, see `load`."""
    model = load(name)
    config = model.config.get_text_config(decoder=True)
    names = (*CONTEXTS, "seq_length", "max_target_positions")
    sizes = [n for key in names if isinstance(n := getattr(config, key, None), int) and n > 0]  # -1: no limit
    subject = as_model(
        model,
        vocab_size=config.vocab_size,
        context_length=min([MAX_LENGTH, *sizes]),
        special_ids=special_ids(config),
        device=device,
        name=name,
    )
    note = f"no text is longer than {MAX_LENGTH} tokens" if min(sizes, default=MAX_LENGTH + 1) > MAX_LENGTH else ""
    visible = functools.partial(visible_by_windows, windows=windows(config))
    notes = "; ".join(filter(None, (subject.note, note)))
    return replace(subject, visible=visible, twin=eager_experts, note=notes)


def eager_experts(model: Any) -> Any:
    """The grouped kernels of experts have no float64."""
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def windows(config: Any) -> list[int | None]:
    """Number of positions that each layer sees, its own included, from the config; None: all."""
    window = (getattr(config, "sliding_window", None) or None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * getattr(config, "num_hidden_layers", 1)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def special_ids(config: Any) -> list[int]:
    """Ids of the config that have a meaning of their own, such as end-of-text."""
    values = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
    return [i for i in ids if isinstance(i, int) and 0 <= i < config.vocab_size]


def load(name: str) -> Any:
    """The model that `name` stands for, in float32.

    Args:
        name: a folder written by `save_pretrained`, a name on the hub, or a config alone (a folder or .json), whose
            model gets initial weights, the same ones each time.

    Raises:
        ValueError: it cannot be loaded; one line.
    """
    try:
        import transformers

        quiet()
        path = Path(name)
        options: dict[str, Any] = {"trust_remote_code": False}  # None would ask on the terminal
        config: Any = transformers.AutoConfig.from_pretrained(name, **options)
        if path.is_file() or path.is_dir() and not any(any(path.glob(pattern)) for pattern in WEIGHTS):
            with torch.random.fork_rng([]):
                torch.manual_seed(0)
                return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        options |= {"config": config, "dtype": torch.float32, "output_loading_info": True}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(name, **options)  # pyright: ignore[reportGeneralTypeIssues] # a pair with output_loading_info
        if missing := info["missing_keys"]:
            raise ValueError(f"there are no weights for {min(missing)} of {type(model).__name__}")
        return model
    except ImportError as error:
        raise ValueError(f"hf={name} needs the library transformers; pip install transformers") from error
    except Exception as error:  # transformers raises many kinds, with many lines
        remedy = "name a folder written by save_pretrained, a config.json, or a model on the hub"
        message = f"hf={name} cannot be loaded; {remedy} ({error})"
        raise ValueError(textwrap.shorten(message, 300, placeholder=" ...")) from error


def quiet() -> None:
    """`transformers` prints errors only, and no progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
