"""The classes of other libraries that GPT expresses, as one table that is read in both directions.

A row says which key of the config and which module of theirs is which field and which module of GPT. `transformers`
is not imported. Llama and Qwen3 rotate the same halves of a head as GPT. What one side cannot express is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from tril.data.settings import explain, typed
from tril.model.gpt import GPT, GPTConfig

REQUIRED = ...  # the default of a key that a config must have
RMSNORM_EPS, LAYERNORM_EPS = torch.finfo(torch.float32).eps, 1e-5  # torch's defaults, of norm_eps=None
# Theirs -> ours. Of several names for one activation, the first is written.
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu": "relu", "relu2": "relu2"}
TRAINING_ONLY = {"init", "backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
ROPE = ("rope_parameters", "rope_scaling")  # objects of versions 5 and 4 of transformers with more keys
QKV = ("q_proj", "k_proj", "v_proj")
HEAD, EMBED, THEIR_HEAD = "head.weight", "embed.weight", "lm_head.weight"
TABLES = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")  # tensors that follow from the config


class Key(NamedTuple):
    """A key of a config.

    Attributes:
        field: of GPTConfig; None: it has none, so only the default can be expressed.
        default: of the class; REQUIRED: none.
        names: theirs -> ours, if the values have other names.
    """

    name: str
    field: str | None
    default: Any = REQUIRED
    names: dict[str, str] = {}


@dataclass(frozen=True)
class Architecture:
    """A class of another library.

    Attributes:
        keys: of its config.
        fixed: fields of GPTConfig that it has with this value only.
        modules: its modules -> the modules of GPT whose parameters they concatenate; {} is the number of a block.
        transposed: ends of the names of modules whose matrices are (in, out).
    """

    class_name: str
    keys: tuple[Key, ...]
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


PLAIN_BLOCKS = {"key_offset": False, "embed_skip": False, "value_embed": False}  # which no class has
# Keys of weights or code that no class here has.
CUSTOM = (Key("auto_map", None, None), Key("quantization_config", None, None))


def _blocks(theirs: str, modules: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {f"{theirs}.{{}}.{name}": tuple(f"blocks.{{}}.{n}" for n in ours.split()) for name, ours in modules.items()}


_GPT2 = Architecture(
    "GPT2LMHeadModel",
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "context_length"),
        Key("n_layer", "n_layers"),
        Key("n_embd", "dim"),
        Key("n_head", "n_heads"),
        Key("n_inner", "mlp_hidden", None),
        Key("activation_function", "mlp", "gelu_new", GELUS),
        Key("layer_norm_epsilon", "norm_eps", LAYERNORM_EPS),
        Key("tie_word_embeddings", "tie_embeddings", True),
        *(Key(f"{name}_pdrop", f"{name}_dropout", 0.1) for name in ("embd", "attn", "resid")),
        Key("scale_attn_weights", None, True),
        Key("scale_attn_by_inverse_layer_idx", None, False),
        Key("add_cross_attention", None, False),
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
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("block_size", "context_length"),
        *_GPT2.keys[2:5],
        Key("bias", "bias", True),  # which old checkpoints do not have
        *(Key("dropout", f"{name}_dropout", 0.0) for name in ("embd", "attn", "resid")),
    ),
    fixed={"pos": "learned", "norm": "layernorm", "qk_norm": "none", "mlp": "gelu_erf", "tie_embeddings": True},
    modules=_GPT2.modules,
)
_LLAMA = Architecture(
    "LlamaForCausalLM",
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "context_length"),
        Key("num_hidden_layers", "n_layers"),
        Key("hidden_size", "dim"),
        Key("num_attention_heads", "n_heads"),
        Key("num_key_value_heads", "n_kv_heads", None),
        Key("head_dim", "head_dim", None),
        Key("intermediate_size", "mlp_hidden"),
        Key("hidden_act", "mlp", "silu", {"silu": "swiglu"}),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("attention_dropout", "attn_dropout", 0.0),
        Key("rope_theta", "rope_base", 1e4),
        Key("rope_type", None, "default"),
        Key("type", None, "default"),
        Key("partial_rotary_factor", None, 1.0),
        Key("pretraining_tp", None, 1),
        Key("mlp_bias", "bias", False),
        Key("attention_bias", "bias", False),
    ),
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
_QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    keys=(
        *(key for key in _LLAMA.keys if key.name not in ("head_dim", "mlp_bias", "attention_bias")),
        Key("head_dim", "head_dim", 128),
        Key("attention_bias", None, False),
    ),
    fixed=_LLAMA.fixed | {"qk_norm": "rmsnorm", "bias": False},
    modules=_LLAMA.modules,
)
HUGGING_FACE = {"gpt2": _GPT2, "llama": _LLAMA, "qwen3": _QWEN3}  # by model_type


def model_type(config: GPTConfig) -> str:
    """The key of HUGGING_FACE that may express a model; `write_config` says whether it does."""
    if config.pos == "learned":
        return "gpt2"
    return "qwen3" if config.qk_norm == "rmsnorm" else "llama"


def write_config(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a model. Dropout that the class does not have is left out, as it is for training only.

    Raises:
        ValueError: names every field that gets lost, because the class cannot express it.
    """
    kind, written = model_type(config), _effective(config)
    architecture = HUGGING_FACE[kind]
    values: dict[str, Any] = {"model_type": kind, "architectures": [architecture.class_name]}
    for key in architecture.keys:
        if key.field is not None:
            names = {ours: theirs for theirs, ours in reversed(key.names.items())}
            value = names.get(written[key.field]) if names else written[key.field]
            values[key.name] = key.default if value is None else value
    if kind == "qwen3":
        window = written["window"]
        values |= {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
        values["layer_types"] = ["full_attention" if window is None else "sliding_attention"] * config.n_layers
    if config.n_heads == 0 or config.mlp == "none":
        wrong = [f"model.n_heads={config.n_heads} must be at least 1, and model.mlp={config.mlp} another one"]
    else:
        read = _effective(read_config(architecture, values))
        lost = [name for name in written if name not in TRAINING_ONLY and read[name] != written[name]]
        wrong = [f"model.{name}={typed(written[name])} must be {typed(read[name])}" for name in lost]
    if wrong:
        raise ValueError(f"{architecture.class_name} cannot express the model: {'; '.join(wrong)}")
    return values


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
    values, problems = dict(values), []
    for name in ROPE:
        rope = values.get(name) or {}
        values |= rope if isinstance(rope, dict) else {"rope_type": rope}
    fields: dict[str, Any] = architecture.fixed | PLAIN_BLOCKS
    for key in (*architecture.keys, *CUSTOM):
        value = values.get(key.name, key.default)
        if key.default is REQUIRED and value in (REQUIRED, None):
            problems.append(f"{key.name} is missing")
        elif key.names and value not in list(key.names):
            problems.append(f"{key.name}={typed(value)} must be one of {', '.join(key.names)}")
        else:
            value = key.names[value] if key.names else value
            expected = key.default if key.field is None else fields.setdefault(key.field, value)
            if value != expected:
                problems.append(f"{key.name}={typed(value)} must be {typed(expected)}")
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


def write_weights(model: GPT) -> dict[str, Tensor]:
    """The weights of a model under the names and in the layout of its `model_type`: copies, in float32 on the CPU."""
    architecture, state, tensors = HUGGING_FACE[model_type(model.config)], model.state_dict(), {}
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
