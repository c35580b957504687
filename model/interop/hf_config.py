"""The config.json of Hugging Face `transformers` <-> GPTConfig, for the classes of GPT-2, Llama and Qwen3.

What one side cannot express is refused with its keys. `transformers` is not imported.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from tril.data.settings import explain
from tril.model.config import GPTConfig
from tril.model.norm import LAYERNORM_EPS
from tril.model.rope import BASE

ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu", "relu": "relu", "relu2": "relu2"}  # ours -> theirs, in GPT-2
SAME_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu"}  # other names of theirs -> ours
RMSNORM_EPS = torch.finfo(torch.float32).eps  # torch's default, of norm_eps=None
ROPE = ("rope_parameters", "rope_scaling")  # keys of transformers 5 and 4
CUSTOM = ("auto_map", "quantization_config")  # keys of weights or code that the classes below do not have


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers`.

    Attributes:
        sizes: field of GPTConfig -> key of config.json, which must have it.
        values: field -> key and the default of `transformers`.
        implied: fields that the class has with this value only.
        required: keys and the only value that GPTConfig can express; it is the default of `transformers`.
    """

    class_name: str
    sizes: dict[str, str]
    values: dict[str, tuple[str, Any]]
    implied: dict[str, Any]
    required: dict[str, Any]


_MODERN_SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "mlp_hidden": "intermediate_size",
}
_MODERN_VALUES = {
    "n_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "attn_dropout": ("attention_dropout", 0.0),
}
_ANY = {"causal": True, "logit_softcap": None}
_MODERN = _ANY | {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu"}

ARCHITECTURES = {  # by model_type
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        sizes={
            "vocab_size": "vocab_size",
            "context_length": "n_positions",
            "n_layers": "n_layer",
            "dim": "n_embd",
            "n_heads": "n_head",
        },
        values={
            "mlp_hidden": ("n_inner", None),
            "norm_eps": ("layer_norm_epsilon", LAYERNORM_EPS),
            "tie_embeddings": ("tie_word_embeddings", True),
            "embd_dropout": ("embd_pdrop", 0.1),
            "attn_dropout": ("attn_pdrop", 0.1),
            "resid_dropout": ("resid_pdrop", 0.1),
        },
        implied=_ANY | {"pos": "learned", "norm": "layernorm", "bias": True, "qk_norm": "none", "window": None},
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": Architecture(
        "LlamaForCausalLM",
        sizes=_MODERN_SIZES,
        values=_MODERN_VALUES | {"bias": ("mlp_bias", False)},
        implied=_MODERN | {"qk_norm": "none", "window": None},
        required={"hidden_act": "silu", "pretraining_tp": 1},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        sizes=_MODERN_SIZES,
        values=_MODERN_VALUES | {"head_dim": ("head_dim", 128)},
        implied=_MODERN | {"qk_norm": "rmsnorm", "bias": False},
        required={"hidden_act": "silu", "attention_bias": False},
    ),
}


def model_type(config: GPTConfig) -> str:
    """The key of ARCHITECTURES that may express a model; `to_hf` says whether it does."""
    if config.pos == "learned":
        return "gpt2"
    return "qwen3" if config.qk_norm == "rmsnorm" else "llama"


def to_hf(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a model. Dropout that the class does not have is left out, as it is for training only.

    Raises:
        ValueError: names every key that no class of ARCHITECTURES can express.
    """
    kind = model_type(config)
    architecture = ARCHITECTURES[kind]
    # Fields that are None by default, with their effective value; a window as long as the context hides nothing.
    default_eps = LAYERNORM_EPS if config.norm == "layernorm" else RMSNORM_EPS
    window = None if config.window is None or config.window >= config.context_length else config.window
    effective = config.to_dict() | {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "mlp_hidden": config.mlp_size,
        "norm_eps": default_eps if config.norm_eps is None else config.norm_eps,
        "window": window,
    }
    if problems := _not_expressed(config, kind, effective):
        raise ValueError(f"{architecture.class_name} cannot express the model: {'; '.join(problems)}")
    values = {"model_type": kind, "architectures": [architecture.class_name]} | architecture.required
    values |= {key: effective[field] for field, key in architecture.sizes.items()}
    values |= {key: effective[field] for field, (key, _) in architecture.values.items()}
    if kind == "gpt2":
        return values | {"activation_function": ACTIVATIONS[config.mlp]}
    values |= {"rope_theta": config.rope_base, "rope_scaling": None}
    if kind == "llama":
        return values | {"attention_bias": config.bias}
    layers = ["full_attention" if window is None else "sliding_attention"] * config.n_layers
    windows = {"sliding_window": window, "max_window_layers": config.n_layers if window is None else 0}
    return values | {"use_sliding_window": window is not None, "layer_types": layers} | windows


def _not_expressed(config: GPTConfig, kind: str, effective: dict[str, Any]) -> list[str]:
    """What a class lacks of a model; each text names a key and the value that it must have."""
    wrong = {field: value for field, value in ARCHITECTURES[kind].implied.items() if effective[field] != value}
    if config.pos not in ("rope", "learned"):
        wrong["pos"] = "rope or learned"
    if config.n_heads == 0:
        wrong["n_heads"] = "at least 1"
    if config.qkv_bias not in (None, config.bias):
        wrong["qkv_bias"] = config.bias
    if kind == "gpt2":
        needed = {"n_kv_heads": config.n_heads, "head_dim": config.dim / config.n_heads if config.n_heads else 0}
        wrong |= {field: value for field, value in needed.items() if effective[field] != value}
        if config.mlp not in ACTIVATIONS:
            wrong["mlp"] = f"one of {', '.join(ACTIVATIONS)}"
    return [f"model.{field}={_shown(effective[field])} must be {_shown(value)}" for field, value in wrong.items()]


def from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """The config of the model that a config.json describes.

    Raises:
        ValueError: names every key that GPTConfig cannot express, or that is missing.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type={_shown(kind)} must be one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    fields: dict[str, Any] = {field: values.get(key) for field, key in architecture.sizes.items()}
    problems = [f"{key} is missing" for key in architecture.sizes.values() if values.get(key) is None]
    fields |= {field: values.get(key, default) for field, (key, default) in architecture.values.items()}
    required = architecture.required | dict.fromkeys(CUSTOM)
    problems += [
        f"{key}={_shown(values[key])} must be {_shown(value)}"
        for key, value in required.items()
        if values.get(key, value) != value
    ]
    fields |= architecture.implied | _special_fields(kind, values, problems)
    if problems:
        raise ValueError(f"no config of Tril expresses this {kind} model: {'; '.join(problems)}")
    if fields["mlp_hidden"] is None:  # only of GPT-2
        fields["mlp_hidden"] = 4 * fields["dim"]
    try:
        return GPTConfig(**fields)
    except ValidationError as error:
        raise ValueError(f"the {kind} model is not valid: {explain(error)}") from error


def _special_fields(kind: str, values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields that follow from several keys, or from other values; adds to `problems`."""
    if kind == "gpt2":
        name = values.get("activation_function", "gelu_new")
        ours = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | SAME_ACTIVATIONS
        if name not in list(ours):
            problems.append(f"activation_function={_shown(name)} must be one of {', '.join(ours)}")
        return {"mlp": ours.get(str(name))}
    special: dict[str, Any] = {"rope_base": _rope_base(values, problems)}
    if kind == "llama" and values.get("attention_bias", False) != values.get("mlp_bias", False):
        both = ", ".join(f"{key}={_shown(values.get(key, False))}" for key in ("attention_bias", "mlp_bias"))
        problems.append(f"{both} must be equal")
    return special | ({"window": _window(values, problems)} if kind == "qwen3" else {})


def _rope_base(values: Mapping[str, Any], problems: list[str]) -> Any:
    base = values.get("rope_theta", BASE)
    for key in ROPE:
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            problems.append(f"{key}={_shown(rope)} must be null or an object")
            continue
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            problems.append(f"{key}.rope_type={_shown(scaling)} must be default")
        base = rope.get("rope_theta", base)
        if base != values.get("rope_theta", base):  # versions 4 and 5 of transformers read another one
            problems.append(f"rope_theta={_shown(values['rope_theta'])} must be that of {key}, {_shown(base)}")
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1:
            problems.append(f"{key}.partial_rotary_factor={_shown(part)} must be 1.0")
    if (part := values.get("partial_rotary_factor", 1.0)) != 1:
        problems.append(f"partial_rotary_factor={_shown(part)} must be 1.0")
    return base


def _window(values: Mapping[str, Any], problems: list[str]) -> Any:
    """The window of Qwen3's layers, all or none of which may have one."""
    if not values.get("use_sliding_window", False):
        return None
    n_layers, first, kinds = values.get("num_hidden_layers"), values.get("max_window_layers", 28), None
    if isinstance(values.get("layer_types"), list):
        kinds = {_shown(kind) for kind in values["layer_types"]}
    elif isinstance(n_layers, int) and isinstance(first, int):
        kinds = {"sliding_attention"} if first <= 0 else {"full_attention"}
        kinds = kinds | {"sliding_attention"} if first < n_layers else kinds
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"}:
        return values.get("sliding_window", 4096)
    problems.append("sliding_window must be in all layers or in none (layer_types, max_window_layers)")
    return None


def _shown(value: Any) -> str:
    """A value as in the file, short."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
