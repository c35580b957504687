"""The parameters of Hugging Face `transformers` <-> those of GPT, for the classes of `tril.model.interop.hf_config`.

GPT-2 stores its matrices as (in, out), and one matrix for q, k and v. Llama and Qwen3 differ in their names only: they
rotate the same halves of a head as `tril.model.rope`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tril.model.gpt import GPT, GPTConfig
from tril.model.interop.hf_config import ARCHITECTURES
from tril.model.stored_model import MAX_POSITION_ELEMENTS, SkipInit

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A module of theirs, and the modules of ours whose parameters it concatenates along the output."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Stored:
    """A tensor of theirs: the names of ours that it concatenates, their sizes along that dimension, and its shape."""

    ours: tuple[str, ...]
    sizes: tuple[int, ...]
    transposed: bool
    shape: Shape


BLOCK = "{block}."  # stands for blocks.I. of ours and for the same block of theirs
QKV = ("q_proj", "k_proj", "v_proj")
_MODERN = [
    Layer("model.embed_tokens", ("embed",)),
    *(Layer(f"{BLOCK}self_attn.{name}", (f"{BLOCK}attn.{name}",)) for name in (*QKV, "o_proj", "q_norm", "k_norm")),
    *(Layer(f"{BLOCK}mlp.{name}_proj", (f"{BLOCK}mlp.{name}",)) for name in ("up", "gate", "down")),
    Layer(f"{BLOCK}input_layernorm", (f"{BLOCK}norm1",)),
    Layer(f"{BLOCK}post_attention_layernorm", (f"{BLOCK}norm2",)),
    Layer("model.norm", ("norm",)),
    Layer("lm_head", ("head",)),
]
LAYERS = {
    "gpt2": [
        Layer("transformer.wte", ("embed",)),
        Layer("transformer.wpe", ("pos_embed",)),
        Layer(f"{BLOCK}ln_1", (f"{BLOCK}norm1",)),
        Layer(f"{BLOCK}attn.c_attn", tuple(f"{BLOCK}attn.{name}" for name in QKV), transposed=True),
        Layer(f"{BLOCK}attn.c_proj", (f"{BLOCK}attn.o_proj",), transposed=True),
        Layer(f"{BLOCK}ln_2", (f"{BLOCK}norm2",)),
        Layer(f"{BLOCK}mlp.c_fc", (f"{BLOCK}mlp.up",), transposed=True),
        Layer(f"{BLOCK}mlp.c_proj", (f"{BLOCK}mlp.down",), transposed=True),
        Layer("transformer.ln_f", ("norm",)),
        Layer("lm_head", ("head",)),
    ],
    "llama": _MODERN,
    "qwen3": _MODERN,
}
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers", "qwen3": "model.layers"}
BASE_PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model."}  # missing where the base model was saved
TABLES = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")  # follow from the config
HEAD, EMBED = "head.weight", "embed.weight"


def stored_tensors(kind: str, config: GPTConfig) -> dict[str, Stored]:
    """The tensors of theirs by name, for a model; a tied head is not one of them.

    Raises:
        ValueError: no model can have these sizes.
    """
    if config.context_length * max(config.head_size, 2) > MAX_POSITION_ELEMENTS:
        limit = MAX_POSITION_ELEMENTS // max(config.head_size, 2)
        raise ValueError(f"{config.context_length} positions exceed the limit of {limit}; use another model")
    try:
        with torch.device("meta"), SkipInit():  # takes no memory for weights
            shapes = {name: tuple(x.shape) for name, x in GPT(replace(config, n_layers=1)).state_dict().items()}
    except (OverflowError, RuntimeError, TypeError) as error:  # sizes beyond 64 bits
        raise ValueError(f"no model can be built from its config ({error}); use another model") from error
    stored = {}
    for layer in LAYERS[kind]:
        if layer.ours == ("head",) and config.tie_embeddings:
            continue
        in_block = layer.theirs.startswith(BLOCK)
        for parameter in ("weight", "bias"):
            first = [shapes.get(f"{name.replace(BLOCK, 'blocks.0.')}.{parameter}") for name in layer.ours]
            parts = [shape for shape in first if shape is not None]
            if not parts:
                continue
            sizes = tuple(shape[0] for shape in parts)
            shape = (sum(sizes), *parts[0][1:])
            shape = shape[::-1] if layer.transposed else shape
            for i in range(config.n_layers if in_block else 1):
                ours = tuple(f"{name.replace(BLOCK, f'blocks.{i}.')}.{parameter}" for name in layer.ours)
                theirs = f"{layer.theirs.replace(BLOCK, f'{BLOCKS[kind]}.{i}.')}.{parameter}"
                stored[theirs] = Stored(ours, sizes, layer.transposed, shape)
    return stored


def to_hf_weights(kind: str, model: GPT) -> dict[str, Tensor]:
    """The weights of a model under the names and in the layout of `kind`: copies, in float32 on the CPU."""
    state = model.state_dict()
    tensors, used = {}, set()
    for name, stored in stored_tensors(kind, model.config).items():
        whole = torch.cat([state[part].float().cpu() for part in stored.ours])  # (out, in), a bias (out,)
        tensors[name] = (whole.mT if stored.transposed and whole.dim() == 2 else whole).contiguous()
        used |= {*stored.ours}
    left = state.keys() - used - ({HEAD} if model.config.tie_embeddings else set())
    assert not left, f"not exported: {', '.join(sorted(left))}"
    return tensors


def from_hf_weights(
    kind: str, config: GPTConfig, shapes: Mapping[str, Shape], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The state_dict of GPT from weights of theirs.

    Args:
        shapes: of all tensors of theirs, by name.
        read: returns a tensor by name; called only when all shapes are right.

    Raises:
        ValueError: tensors are missing, do not belong to the model, or have another shape.
    """
    names = _full_names(kind, shapes)
    _check_layers(kind, config, names)
    stored = stored_tensors(kind, config)
    _check_shapes(stored, {name: shapes[file_name] for name, file_name in names.items()}, config.tie_embeddings)
    state = {}
    for name, tensor in stored.items():
        whole = read(names[name])
        whole = whole.mT if tensor.transposed and whole.dim() == 2 else whole  # (out, in), a bias (out,)
        state |= zip(tensor.ours, whole.split(tensor.sizes), strict=True)
    if config.tie_embeddings:
        state[HEAD] = state[EMBED]
        if "lm_head.weight" in names and not torch.equal(read(names["lm_head.weight"]), state[EMBED]):
            raise ValueError("tie_word_embeddings=true, and lm_head.weight differs from the embedding; set it to false")
    return state


def _full_names(kind: str, names: Collection[str]) -> dict[str, str]:
    """Names of theirs -> names in the file, which a base model writes without its prefix; tables are left out."""
    prefix = BASE_PREFIX[kind]
    has_prefix = any(name.startswith(prefix) for name in names)
    full = {name if has_prefix or name == "lm_head.weight" else prefix + name: name for name in names}
    return {name: file_name for name, file_name in full.items() if not TABLES.fullmatch(name)}


def _check_layers(kind: str, config: GPTConfig, names: Collection[str]) -> None:
    """Compares the number of layers before a list of that length is made."""
    pattern = re.compile(rf"{re.escape(BLOCKS[kind])}\.(\d{{1,9}})\.")
    found = {match[1] for name in names if (match := pattern.match(name))}
    if len(found) != config.n_layers:
        key = ARCHITECTURES[kind].sizes["n_layers"]
        raise ValueError(f"{key}={config.n_layers}, and the weights have {len(found)} layers; use a complete folder")


def _check_shapes(stored: Mapping[str, Stored], found: Mapping[str, Shape], tied: bool) -> None:
    optional = {"lm_head.weight"} if tied else set()
    problems = [f"{name} is missing" for name in stored if name not in found]
    problems += [f"{name} does not belong to the model" for name in found if name not in stored.keys() | optional]
    problems += [
        f"{name} has shape {tuple(found[name])}, and needs {tensor.shape}"
        for name, tensor in stored.items()
        if name in found and tuple(found[name]) != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights do not match the config ({'; '.join(problems[:3])}{more})")
