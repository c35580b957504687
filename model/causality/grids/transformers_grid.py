"""The grid of a causal language model of `transformers`: a folder, a name on the hub, or a config without weights.

The model's attention implementations (eager, sdpa) are tested unchanged, with its own cache and masks. The expected
windows come from the config. No input is longer than `MAX_LENGTH`, so the certificate says nothing about longer ones.

B batch, T positions, S keys, H heads, V vocabulary.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.case import MAX_LENGTH, ODD_LENGTH, Case, lengths_to_test, structural_lengths
from tril.model.causality.grids.first_call import check_calls
from tril.model.causality.grids.gpt_grid import DROPOUT, LARGE_BUDGET, PRECISIONS, SHARPENING, SMALL_BUDGET
from tril.model.causality.grids.module_subject import ModuleSubject
from tril.model.causality.grids.transformers_loading import build, load
from tril.model.causality.subject import randomize

ATTENTIONS = ("eager", "sdpa")
# Names of the modules that make queries and keys. A norm after a projection would undo its scale, so norms come first.
QUERY_KEY_MODULES = (
    ("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
    ("q_proj", "k_proj", "c_attn", "query_key_value", "qkv_proj"),
)


class TransformersSubject(ModuleSubject):
    """A causal language model of `transformers`, with its cache and attention mask, and without documents."""

    def __init__(self, model: Any, *, precision: str = "32-true"):
        config = model.config.get_text_config(decoder=True)
        super().__init__(
            type(model).__name__,
            model,
            vocab_size=config.vocab_size,
            context_length=context_length(config),
            precision=precision,
            device=model.device,
            special=special_ids(config),
        )
        self.windows = windows(config)

    def attention_weights(self, ids: Tensor) -> Sequence[Tensor] | None:
        model: Any = self.function
        if model.config._attn_implementation != "eager":
            return None  # the others do not compute them separately
        weights = []

        def run() -> Tensor:
            output = self._output(ids, output_attentions=True)
            weights.extend(getattr(output, "attentions", None) or ())  # (B, H, T, S) each
            return self._logits_of(output, ids)

        with torch.no_grad():
            self._call(run)
        square = all(x is not None and x.shape[-2:] == (ids.shape[1],) * 2 for x in weights)
        return weights if square and len(weights) == len(self.windows) else None

    def in_float64(self) -> ModuleSubject:
        twin = super().in_float64()
        model: Any = twin.function
        if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped kernels of experts have no float64
        return twin


def transformers_cases(
    name: str, *, device: str = "cpu", exhaustive: bool = False, seed: int = 0, precisions: Sequence[str] = PRECISIONS
) -> Iterator[Case]:
    """The grid of a model: its own, random and sharpened weights in each attention and precision, and in training mode.

    Args:
        name: a folder written by `save_pretrained`, a name on the hub, or a config alone (a folder or .json), which
            gets initial weights.
        exhaustive: test every pair of positions in every case, at any cost.

    Raises:
        ValueError: or FileNotFoundError, before the first case, for a model that cannot be loaded or called.
    """
    weights_kind, model = load(name, seed)
    config, text = model.config, model.config.get_text_config(decoder=True)
    check_calls(f"hf={name}", TransformersSubject(copy.deepcopy(model).to(device)), context_length(text))
    random = randomize(copy.deepcopy(model), torch.Generator().manual_seed(seed)).state_dict()
    weights = {weights_kind: model.state_dict(), "random": random, "sharp": random}

    def case(
        kind: str, precision: str, attention: str | None = None, *, training: bool = False, first: bool = False
    ) -> Case:
        model = build(with_dropout(config) if training else config, seed, attention)
        model.load_state_dict(weights[kind])
        if kind == "sharp":  # such scores defeat a mask that is a finite number, or that is added too late
            for parameter in query_key_parameters(model):
                parameter.detach().mul_(SHARPENING)
        labels = {"weights": kind, "attention": model.config._attn_implementation, "precision": precision}
        labels |= {"dropout": True} if training else {}
        plain = kind in ("random", "trained") and not training
        longest = context_length(text)
        return Case(
            TransformersSubject(model.to(device).train(training), precision=precision),
            labels,
            lengths_to_test(longest, windows(text)) if plain else [min(ODD_LENGTH, longest)],
            budget=math.inf if exhaustive else LARGE_BUDGET if first else SMALL_BUDGET,
            full_past=plain and sees_whole_past(text),
            equivalence=plain,
            redrawn=structural_lengths(longest) if first else (),
        )

    def cases() -> Iterator[Case]:
        yield case("trained" if weights_kind == "trained" else "random", precisions[0], first=True)
        attentions = ATTENTIONS if model._supports_sdpa else ATTENTIONS[:1]
        kinds = ("random", weights_kind, "sharp") if query_key_parameters(model) else ("random", weights_kind)
        for attention, precision in itertools.product(attentions, precisions):
            for kind in kinds:
                yield case(kind, precision, attention)
            yield case("random", precision, attention, training=True)

    return cases()


def windows(config: Any) -> list[int | None]:
    """Number of positions that each layer sees, its own included, from the config; None: all."""
    window = (getattr(config, "sliding_window", None) or None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def special_ids(config: Any) -> list[int]:
    """Ids of the config that have a meaning of their own, such as end-of-text."""
    values = [value for name, value in config.to_dict().items() if name.endswith("_token_id")]
    ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
    return [i for i in ids if isinstance(i, int) and 0 <= i < config.vocab_size]


def sees_whole_past(config: Any) -> bool:
    """Whether every output must depend on its whole past: not in recurrences, nor where layers see a part of it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return hasattr(config, "num_attention_heads") and ("full_attention" in kinds or kinds == {"sliding_attention"})


def context_length(config: Any) -> int:
    """Positions of the config, at most `MAX_LENGTH`."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return min([MAX_LENGTH, *(n for name in names if isinstance(n := getattr(config, name, None), int))])


def with_dropout(config: Any) -> Any:
    """A copy with all dropout rates set to DROPOUT."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    for name, value in text.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float | int):
            setattr(text, name, DROPOUT)
    return config


def query_key_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that scale queries and keys; empty for unknown module names."""
    for names in QUERY_KEY_MODULES:
        modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
        if parameters := [p for module in modules for p in module.parameters()]:
            return parameters
    return []
