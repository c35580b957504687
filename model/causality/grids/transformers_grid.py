"""Causal language models of the `transformers` library under the certificate: a folder, a name on the hub, or a config alone.

Tested are the model's own attention and its others (eager, sdpa) as they stand, with its own cache and masks. What the config says of
windows is what is expected. No length above `LONGEST` is run, so nothing is said about longer ones: a longer window is never reached.

B batch, T positions, S keys, H heads, V vocabulary.
"""

import copy
import inspect
import itertools
import logging
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tril.model.causality.case import LONGEST, ODD, Cell, lengths_to_test
from tril.model.causality.grids.gpt_grid import DROPOUT, LARGE, PRECISIONS, SHARPER, SMALL
from tril.model.causality.subject import Subject, left_padding, randomise

ATTENTIONS = ("eager", "sdpa")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Where queries and keys come from, by what modules are called; a norm behind a projection would undo a larger one, so norms go first.
QUERIES_AND_KEYS = (
    ("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
    ("q_proj", "k_proj", "c_attn", "query_key_value", "qkv_proj"),
)


class TransformersSubject(Subject):
    """A causal language model of `transformers`, with its cache and attention mask. Documents it is not asked for."""

    def __init__(self, model: nn.Module, *, precision: str = "32-true"):
        config = model.config.get_text_config(decoder=True)
        super().__init__(
            self._logits,  # a method and not a function, so that a deep copy runs the copied model
            vocab_size=config.vocab_size,
            context_length=context_length(config),
            module=model,
            windows=windows(config),
            precision=precision,
            device=model.device,
        )

    def _logits(self, ids: Tensor, **inputs) -> Tensor:
        return self.module(input_ids=ids, use_cache=False, **inputs).logits

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        def in_chunks() -> Tensor:
            cache, logits = None, []
            for part in ids.split(list(sizes), dim=1):
                out = self.module(input_ids=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
            return torch.cat(logits, dim=1)

        return self._settled(in_chunks) if self._takes("past_key_values") else None

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        if not self._takes("attention_mask"):
            return None
        visible, positions = left_padding(ids, padding)
        inputs = {"attention_mask": visible.long()}  # (B, T), 0 = hidden
        if self._takes("position_ids"):
            inputs["position_ids"] = positions
        return self._settled(lambda: self._logits(ids, **inputs))

    def weights(self, ids: Tensor) -> Sequence[Tensor] | None:
        if self.module.config._attn_implementation != "eager":
            return None  # the others never hold them
        reported = []

        def run() -> Tensor:
            out = self.module(input_ids=ids, use_cache=False, output_attentions=True)
            reported.extend(out.get("attentions") or ())  # (B, H, T, S) each
            return out.logits

        with torch.no_grad():
            self._settled(run)
        square = all(x is not None and x.shape[-2:] == (ids.shape[1],) * 2 for x in reported)
        return reported if square and len(reported) == len(self.windows) else None

    def in_float64(self) -> "TransformersSubject":
        twin = self._module_in_float64()
        if hasattr(twin, "set_experts_implementation") and twin._can_set_experts_implementation():
            twin.set_experts_implementation("eager")  # the grouped kernels of experts have no float64
        return TransformersSubject(twin, precision="64-true")

    def _takes(self, name: str) -> bool:
        return name in inspect.signature(self.module.forward).parameters


def transformers_cells(
    name: str, *, device: str = "cpu", exhaustive: bool = False, seed: int = 0, precisions: Sequence[str] = PRECISIONS
) -> Iterator[Cell]:
    """The grid of a model: its own weights, random ones and sharp ones, in each of its attentions and precisions, and in training.

    name        a folder that `save_pretrained` wrote, a name on the hub; or a config alone, as a folder or a .json: random weights
    exhaustive  every pair of positions in every cell, whatever it costs

    Raises ValueError, or FileNotFoundError, before the first cell.
    """
    library, own, model = load(name, seed)
    config, text = model.config, model.config.get_text_config(decoder=True)
    weights = {
        own: model.state_dict(),
        "random": randomise(copy.deepcopy(model), torch.Generator().manual_seed(seed)).state_dict(),
    }
    weights["sharp"] = weights["random"]

    def cell(
        kind: str, precision: str, attention: str | None = None, *, training: bool = False, main: bool = False
    ) -> Cell:
        model = build(library, with_dropout(config) if training else config, seed, attention)
        model.load_state_dict(weights[kind])
        if kind == "sharp":
            for parameter in of_queries_and_keys(model):
                parameter.detach().mul_(
                    SHARPER
                )  # against such scores a mask loses that is a finite number, or is added too late
        labels = {"weights": kind, "attention": model.config._attn_implementation, "precision": precision}
        labels |= {"dropout": True} if training else {}
        plain = kind in ("random", "trained") and not training
        return Cell(
            TransformersSubject(model.to(device).train(training), precision=precision),
            labels,
            lengths_to_test(context_length(text), windows(text)) if plain else [min(ODD, context_length(text))],
            budget=math.inf if exhaustive else LARGE if main else SMALL,
            past=plain and remembers(text),
            function=plain,
        )

    def cells() -> Iterator[Cell]:
        yield cell("trained" if own == "trained" else "random", precisions[0], main=True)
        for attention, precision in itertools.product(
            ATTENTIONS if model._supports_sdpa else ATTENTIONS[:1], precisions
        ):
            for kind in ("random", own, "sharp") if of_queries_and_keys(model) else ("random", own):
                yield cell(kind, precision, attention)
            yield cell("random", precision, attention, training=True)

    return cells()


def load(name: str, seed: int):
    """The library; "trained" where weights lie there, else "initial"; and the model in float32."""
    path, where = Path(name), f"hf={name}"
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{where} is a folder without config.json; name one that save_pretrained wrote, or a config"
        )
    if not path.exists() and (name.endswith(".json") or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)):
        raise FileNotFoundError(
            f"{where} does not exist; name a folder that save_pretrained wrote, a config, or a model on the hub"
        )
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{where} needs the library transformers, which is not installed; pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    source = {"local_files_only": path.exists(), "trust_remote_code": False}  # left open, it would ask on the terminal
    try:
        config = transformers.AutoConfig.from_pretrained(name, **source)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"transformers has no causal language model for model_type={config.model_type}; name another model"
            )
        if path.is_file() or path.is_dir() and not any(any(path.glob(pattern)) for pattern in WEIGHTS):
            return transformers, "initial", build(transformers, config, seed)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True, **source
        )
        if found["missing_keys"]:
            raise ValueError(
                f"there are no weights for {min(found['missing_keys'])} of {type(model).__name__}; save the whole model"
            )
    except Exception as error:  # of any kind, and of many lines, from what lies in the files
        what = "cannot be loaded" if path.exists() else "does not exist here, and cannot be loaded from the hub"
        raise ValueError(textwrap.shorten(f"{where} {what}: {error}", 300, placeholder=" ...")) from error
    return transformers, "trained", model


def build(library, config, seed: int, attention: str | None = None) -> nn.Module:
    """A new model, float32, in evaluation mode, its initial weights a function of the seed; `attention` None: its own choice."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        chosen = {} if attention is None else {"attn_implementation": attention}
        return library.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **chosen).eval()


def windows(config) -> list[int | None]:
    """How many newest positions each layer sees, from the config; None where it says nothing."""
    window = (getattr(config, "sliding_window", None) or None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def remembers(config) -> bool:
    """Whether every output is to see its whole past: not in recurrences, which forget it, nor where layers see a part of it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return hasattr(config, "num_attention_heads") and ("full_attention" in kinds or kinds == {"sliding_attention"})


def context_length(config) -> int:
    """Positions that the config has, `LONGEST` at most."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return min([LONGEST, *(getattr(config, name) for name in names if isinstance(getattr(config, name, None), int))])


def with_dropout(config):
    """A copy in which all that the config drops is dropped more often."""
    config = copy.deepcopy(config)
    for name, value in config.get_text_config(decoder=True).to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float | int):
            setattr(config.get_text_config(decoder=True), name, DROPOUT)
    return config


def of_queries_and_keys(model: nn.Module) -> list[nn.Parameter]:
    """What they grow with; empty where no name tells."""
    for names in QUERIES_AND_KEYS:
        if found := [
            p for name, module in model.named_modules() if name.rpartition(".")[2] in names for p in module.parameters()
        ]:
            return found
    return []
