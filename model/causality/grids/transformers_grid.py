"""The grid of a causal language model of `transformers`: a folder, a name on the hub, or a config without weights.

The model's attention implementations (eager, sdpa) are tested unchanged, with its own cache and masks. The expected
windows come from the config. No input is longer than `MAX_LENGTH`, so the certificate says nothing about longer ones.

B batch, T positions, S keys, H heads, V vocabulary.
"""

import copy
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.case import MAX_LENGTH, ODD_LENGTH, Case, ModelError, lengths_to_test, structural_lengths
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
# Settings of attention that chooses a few keys by their scores.
CHOSEN_KEYS = ("index_topk", "index_topk_blocks", "indexer_budget", "keep_window_size", "lsh_attn_chunk_length")


class TransformersSubject(ModuleSubject):
    """A causal language model of `transformers`, with its cache and attention mask, and without documents."""

    def __init__(self, model: Any, *, precision: str = "32-true"):
        config = model.config.get_text_config(decoder=True)
        super().__init__(
            type(model).__name__,
            model,
            vocab_size=config.vocab_size,
            context_length=longest_input(model),
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

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        model: Any = self.function
        first = max((table.padding_idx + 1 for table in padded_tables(model)), default=0)
        return super().padded(ids, padding, first_position=first)

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
    return model_cases(
        f"hf={name}", model, weights_kind, device=device, exhaustive=exhaustive, seed=seed, precisions=precisions
    )


def model_cases(
    name: str,
    model: Any,
    weights_kind: str = "initial",
    *,
    device: str = "cpu",
    exhaustive: bool = False,
    seed: int = 0,
    precisions: Sequence[str] = PRECISIONS,
) -> Iterator[Case]:
    """The grid of a model of `transformers` in float32, which is not changed; the other arguments are those above.

    Args:
        name: in messages.
        weights_kind: "trained", or "initial" for weights that a seed has drawn.
    """
    config, text = model.config, model.config.get_text_config(decoder=True)
    longest = longest_input(model)
    check_calls(name, TransformersSubject(copy.deepcopy(model).to(device)), longest)
    random = randomize(copy.deepcopy(model), torch.Generator().manual_seed(seed)).state_dict()
    weights = {weights_kind: model.state_dict(), "random": random, "sharp": random}

    def case(
        kind: str, precision: str, attention: str | None = None, *, training: bool = False, first: bool = False
    ) -> Case:
        rebuild = functools.partial(build, seed=seed, attention=attention, model_class=type(model))
        try:
            case_model = rebuild(with_dropout(config) if training else config)
        except ValueError:  # DiffLlama refuses dropout
            case_model, has_dropout = rebuild(config), False
        else:
            has_dropout = training
        case_model.load_state_dict(weights[kind])
        if kind == "sharp":  # such scores defeat a mask that is a finite number, or that is added too late
            for parameter in query_key_parameters(case_model):
                parameter.detach().mul_(SHARPENING)
        labels = {"weights": kind, "attention": case_model.config._attn_implementation, "precision": precision}
        labels |= {"dropout": True} if has_dropout else {"training": True} if training else {}
        plain = kind in ("random", "trained") and not training
        subject = TransformersSubject(case_model.to(device).train(training), precision=precision)
        return Case(
            subject,
            labels,
            lengths_to_test(longest, windows(text)) if plain else [one_length(subject, longest)],
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


def one_length(subject: TransformersSubject, longest: int) -> int:
    """`ODD_LENGTH`, where the model takes it: in training mode, Reformer takes multiples of its chunks only."""
    try:
        with torch.no_grad():
            subject(torch.zeros(1, min(ODD_LENGTH, longest), dtype=torch.long))
    except ModelError:
        return longest
    return min(ODD_LENGTH, longest)


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


def sees_whole_past(config: Any) -> bool:
    """Whether every output must depend on its whole past: not in recurrences, nor where layers see or
    choose a part of it."""
    if any(hasattr(config, name) for name in CHOSEN_KEYS):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return hasattr(config, "num_attention_heads") and ("full_attention" in kinds or kinds == {"sliding_attention"})


def context_length(config: Any) -> int:
    """Positions of the config, at most `MAX_LENGTH`."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
    sizes = [n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0]  # -1: no limit
    return min([MAX_LENGTH, *sizes])


def longest_input(model: Any) -> int:
    """Positions of the config, less those that a position embedding keeps for padding."""
    sizes = [table.num_embeddings - table.padding_idx - 1 for table in padded_tables(model)]
    return min([context_length(model.config.get_text_config(decoder=True)), *sizes])


def padded_tables(model: nn.Module) -> list[Any]:
    """Position embeddings whose first rows are for padding: positions begin after them, as in RoBERTa."""
    tables = [m for name, m in model.named_modules() if re.search(r"(^|[._])position_embeddings?$", name)]
    return [table for table in tables if getattr(table, "padding_idx", None) is not None]


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
