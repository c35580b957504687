"""The classes of other libraries that GPT expresses, as one table that is read in both directions.

A row says which key of the config and which module of theirs is which field and which module of GPT. `transformers`
is not imported. Llama and Qwen3 rotate the same halves of a head as GPT. What one side cannot express is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tril.data.settings import explain, typed
from tril.model.gpt import GPT, GPTConfig

RMSNORM_EPS, LAYERNORM_EPS = torch.finfo(torch.float32).eps, 1e-5  # torch's defaults, of norm_eps=None
TRAINING_ONLY = {"init", "backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
ROPE = ("rope_parameters", "rope_scaling")  # objects of versions 5 and 4 of transformers with more keys
SIZES = ("vocab_size", "context_length", "n_layers", "dim", "n_heads", "mlp_hidden")  # GPT-2 computes the last one
DROPOUT = "embd_dropout attn_dropout resid_dropout"
QKV = ("q_proj", "k_proj", "v_proj")
HEAD, EMBED, THEIR_HEAD = "head.weight", "embed.weight", "lm_head.weight"
TABLES = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")  # tensors that follow from the config
NO_CODE = {"auto_map": None, "quantization_config": None}  # keys of weights or code that no class here has
PLAIN_BLOCKS = {"key_offset": False, "embed_skip": False, "value_embed": False}  # fields that no class has


@dataclass(frozen=True)
class Architecture:
    """A class of another library.

    Attributes:
        sizes: the keys of its config that are the fields SIZES; it has no default for them.
        optional: other keys -> the field, or several, and the default of the class.
        only: keys for which GPT has no field -> the value that it computes with, which is the default.
        activation: the key of the activation, its default, and the values -> `mlp`; the first of several is written.
        fixed: fields of GPTConfig that it has with this value only.
        modules: its modules -> the modules of GPT whose parameters they concatenate; {} is the number of a block.
        transposed: ends of the names of modules whose matrices are (in, out).
    """

    class_name: str
    sizes: tuple[str, ...]
    optional: dict[str, tuple[str, Any]]
    only: dict[str, Any]
    activation: tuple[str, str, dict[str, str]]
    fixed: dict[str, Any]
    modules: Mapping[str, tuple[str, ...]]
    transposed: tuple[str, ...] = ()

    def parameters(self, n_layers: int) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        """The parameters that the class may have: its name, ours, and whether its matrix is (in, out)."""
        for module, ours in self.modules.items():
            for i in range(n_layers if "{}" in module else 1):
                for kind in ("weight", "bias"):
                    names = tuple(f"{name.format(i)}.{kind}" for name in ours)
                    yield f"{module.format(i)}.{kind}", names, kind == "weight" and module.endswith(self.transposed)


def _blocks(theirs: str, modules: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {f"{theirs}.{{}}.{name}": tuple(f"blocks.{{}}.{n}" for n in ours.split()) for name, ours in modules.items()}


_GPT2 = Architecture(
    "GPT2LMHeadModel",
    sizes=("vocab_size", "n_positions", "n_layer", "n_embd", "n_head"),
    optional={
        "n_inner": ("mlp_hidden", None),
        "layer_norm_epsilon": ("norm_eps", LAYERNORM_EPS),
        "tie_word_embeddings": ("tie_embeddings", True),
        **{f"{name.removesuffix('dropout')}pdrop": (name, 0.1) for name in DROPOUT.split()},
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    activation=(
        "activation_function",
        "gelu_new",
        {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu": "relu", "relu2": "relu2"},
    ),
    fixed={"pos": "learned", "norm": "layernorm", "bias": True, "qk_norm": "none"},
    modules={
        "transformer.wte": ("embed",),
        "transformer.wpe": ("pos_embed",),
        **_blocks("transformer.h", {"ln_1": "norm1", "attn.c_attn": " ".join(f"attn.{name}" for name in QKV)}),
        **_blocks("transformer.h", {"attn.c_proj": "attn.o_proj", "ln_2": "norm2"}),
        **_blocks("transformer.h", {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}),
        "transformer.ln_f": ("norm",),
        "lm_head": ("head",),
    },
    transposed=("c_attn", "c_proj", "c_fc"),
)
NANOGPT = Architecture(
    "nanoGPT",
    sizes=("vocab_size", "block_size", "n_layer", "n_embd", "n_head"),
    optional={"bias": ("bias", True), "dropout": (DROPOUT, 0.0)},  # old checkpoints have no bias
    only={},
    activation=("activation", "gelu", {"gelu": "gelu_erf"}),  # no checkpoint has this key
    fixed={"pos": "learned", "norm": "layernorm", "qk_norm": "none", "tie_embeddings": True},
    modules=_GPT2.modules,
)
_LLAMA = Architecture(
    "LlamaForCausalLM",
    sizes=(
        *("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads"),
        "intermediate_size",
    ),
    optional={
        "num_key_value_heads": ("n_kv_heads", None),
        "head_dim": ("head_dim", None),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_embeddings", False),
        "attention_dropout": ("attn_dropout", 0.0),
        "rope_theta": ("rope_base", 1e4),
        "mlp_bias": ("bias", False),
        "attention_bias": ("bias", False),
    },
    only={"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0, "pretraining_tp": 1},
    activation=("hidden_act", "silu", {"silu": "swiglu"}),
    fixed={"pos": "rope", "norm": "rmsnorm", "qk_norm": "none"},
    modules={
        "model.embed_tokens": ("embed",),
        **_blocks("model.layers", {f"self_attn.{x}": f"attn.{x}" for x in (*QKV, "o_proj", "q_norm", "k_norm")}),
        **_blocks("model.layers", {f"mlp.{name}_proj": f"mlp.{name}" for name in ("up", "gate", "down")}),
        **_blocks("model.layers", {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}),
        "model.norm": ("norm",),
        "lm_head": ("head",),
    },
)
_QWEN3 = replace(
    _LLAMA,
    class_name="Qwen3ForCausalLM",
    optional={key: row for key, row in _LLAMA.optional.items() if row[0] != "bias"} | {"head_dim": ("head_dim", 128)},
    only=_LLAMA.only | {"attention_bias": False},
    fixed=_LLAMA.fixed | {"qk_norm": "rmsnorm", "bias": False},
)
HUGGING_FACE = {"gpt2": _GPT2, "llama": _LLAMA, "qwen3": _QWEN3}  # by model_type


def write_config(config: GPTConfig) -> dict[str, Any] | None:
    """The config.json of the class that expresses a model; None: no class does.

    Dropout that the class does not have is left out, as it is for training only.
    """
    fields = _effective(config)
    for kind, architecture in HUGGING_FACE.items():
        values: dict[str, Any] = {"model_type": kind, "architectures": [architecture.class_name]}
        values |= {key: fields[field] for key, field in zip(architecture.sizes, SIZES, strict=False)}
        values |= {key: fields[field] for key, (field, _) in architecture.optional.items()}
        name, _, activations = architecture.activation
        values[name] = next((theirs for theirs, ours in activations.items() if ours == fields["mlp"]), None)
        if kind == "qwen3":
            window = fields["window"]
            values |= {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
            values["layer_types"] = ["full_attention" if window is None else "sliding_attention"] * config.n_layers
        try:
            read = _effective(read_config(architecture, values))
        except ValueError:
            continue
        if config.n_heads > 0 and all(read[name] == fields[name] for name in fields.keys() - TRAINING_ONLY):
            return values
    return None


def _effective(config: GPTConfig) -> dict[str, Any]:
    """The fields with their effective values; those without effect have the values of `GPTConfig.canonical`."""
    default_eps = LAYERNORM_EPS if config.norm == "layernorm" else RMSNORM_EPS
    return config.canonical().to_dict() | {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "mlp_hidden": config.mlp_size,
        "mlp_ratio": None,
        "norm_eps": config.norm_eps or default_eps,
        "qkv_bias": config.bias if config.qkv_bias is None else config.qkv_bias,
    }


def read_config(architecture: Architecture, values: Mapping[str, Any]) -> GPTConfig:
    """The config of the model that a config of another library describes.

    Args:
        values: of a file, which can hold anything.

    Raises:
        ValueError: names every key that GPTConfig cannot express, or that is missing.
    """
    values = dict(values)
    for name in ROPE:
        rope = values.get(name) or {}
        values |= rope if isinstance(rope, dict) else {"rope_type": rope}
    problems = [f"{key} is missing" for key in architecture.sizes if values.get(key) is None]
    fields: dict[str, Any] = architecture.fixed | PLAIN_BLOCKS
    fields |= {field: values.get(key) for key, field in zip(architecture.sizes, SIZES, strict=False)}
    expected = {key: (values.get(key, only), only) for key, only in (architecture.only | NO_CODE).items()}
    for key, (names, default) in architecture.optional.items():
        for field in names.split():
            expected[key] = values.get(key, default), fields.setdefault(field, values.get(key, default))
    problems += [
        f"{key}={typed(value)} must be {typed(only)}" for key, (value, only) in expected.items() if value != only
    ]
    name, default, activations = architecture.activation
    fields["mlp"] = activations.get(str(values.get(name, default)))
    if fields["mlp"] is None:
        problems.append(f"{name}={typed(values[name])} must be one of {', '.join(activations)}")
    if values.get("use_sliding_window"):  # of Qwen3, whose layers may differ
        kinds, fields["window"] = values.get("layer_types"), values.get("sliding_window", 4096)
        if not isinstance(kinds, list) or not kinds or any(each != "sliding_attention" for each in kinds):
            problems.append("sliding_window must be in all layers (layer_types)")
    if problems:
        raise ValueError(f"no config of Tril expresses this {architecture.class_name}: {'; '.join(problems)}")
    if fields.get("mlp_hidden") is None and isinstance(fields["dim"], int):
        fields["mlp_hidden"] = 4 * fields["dim"]
    try:
        return GPTConfig(**fields)
    except ValidationError as error:
        raise ValueError(f"this {architecture.class_name} is not valid: {explain(error)}") from error


def write_weights(architecture: Architecture, model: GPT) -> dict[str, Tensor]:
    """The weights of a model under the names and in the layout of a class that expresses it: copies, on the CPU."""
    state, tensors = model.state_dict(), {}
    if model.config.tie_embeddings:
        del state[HEAD]
    for theirs, ours, transposed in architecture.parameters(model.config.n_layers):
        if parts := [state.pop(name).float().cpu() for name in ours if name in state]:
            whole = torch.cat(parts)  # (out, in), a bias (out,)
            tensors[theirs] = (whole.mT if transposed else whole).contiguous()
    assert not state, f"not exported: {', '.join(sorted(state))}"
    return tensors


def read_weights(architecture: Architecture, config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of GPT from those of the class, which `Checkpoint.model` compares with the config.

    Raises:
        ValueError: tensors do not belong to the class, or a tied head differs from the embedding.
    """
    state: dict[str, Tensor] = {}
    prefix = next(iter(architecture.modules)).partition(".")[0] + "."
    if any(name.startswith(prefix) for name in tensors):  # a model that was saved without its head has none
        prefix = ""
    left = {name if name == THEIR_HEAD else prefix + name: tensor for name, tensor in tensors.items()}
    left = {name: tensor for name, tensor in left.items() if not TABLES.fullmatch(name)}
    for theirs, ours, transposed in architecture.parameters(config.n_layers):
        if (whole := left.pop(theirs, None)) is not None:
            whole = whole.mT if transposed and whole.dim() == 2 else whole
            state |= zip(ours, whole.chunk(len(ours)) if whole.dim() else [whole], strict=False)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ValueError(f"the weights do not match the config ({min(left)} does not belong to the model{more})")
    if config.tie_embeddings and EMBED in state and not torch.equal(state.setdefault(HEAD, state[EMBED]), state[EMBED]):
        raise ValueError(f"{THEIR_HEAD} differs from the embedding, and the config ties both; correct the config")
    return state
