"""The grid of a causal language model of `transformers`: a folder, a name on the hub, or a config without weights.

The model's attention implementations (eager, sdpa) are tested unchanged, with its own cache and masks. The expected
windows come from the config. No input is longer than `MAX_LENGTH`, so the certificate says nothing about longer ones.

B batch, T positions, S keys, H heads, V vocabulary.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.case import MAX_LENGTH, ODD_LENGTH, Case, lengths_to_test
from tril.model.causality.grids.first_call import WrongLogits, check_calls, checked_logits, one_line
from tril.model.causality.grids.gpt_grid import DROPOUT, LARGE_BUDGET, PRECISIONS, SHARPENING, SMALL_BUDGET
from tril.model.causality.grids.transformers_loading import build, load
from tril.model.causality.subject import Subject, left_padding, randomize

ATTENTIONS = ("eager", "sdpa")
# Names of the modules that make queries and keys. A norm after a projection would undo its scale, so norms come first.
QUERY_KEY_MODULES = (
    ("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
    ("q_proj", "k_proj", "c_attn", "query_key_value", "qkv_proj"),
)


class TransformersSubject(Subject):
    """A causal language model of `transformers`, with its cache and attention mask, and without documents."""

    def __init__(self, model: nn.Module, *, precision: str = "32-true"):
        self.model: Any = model
        config = self.model.config.get_text_config(decoder=True)
        super().__init__(
            self._logits,  # a bound method instead of a closure, so that a deep copy runs the copied model
            vocab_size=config.vocab_size,
            context_length=context_length(config),
            module=model,
            windows=windows(config),
            precision=precision,
            device=self.model.device,
        )

    def _logits(self, ids: Tensor, **inputs) -> Tensor:
        return self._logits_of(self.model(input_ids=ids, **{"use_cache": False} | inputs), ids)

    def _logits_of(self, output: Any, ids: Tensor) -> Tensor:
        """Of an output object, or of a tuple, where the logits come first."""
        logits = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
        return checked_logits(type(self.model).__name__, logits, ids, self.vocab_size)

    def _call(self, run: Callable[[], Tensor]) -> Tensor:
        try:
            return super()._call(run)
        except WrongLogits:
            raise
        except Exception as error:  # the model may raise anything
            raise ValueError(f"{type(self.model).__name__} ends in {one_line(error)}") from error

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        logits, cache = [], None

        def decode_chunks() -> Tensor:
            nonlocal cache
            for part in ids.split(list(sizes), dim=1):
                output = self.model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = getattr(output, "past_key_values", None)
                logits.append(self._logits_of(output, part))
            return torch.cat(logits, dim=1)

        decoded = self._call(decode_chunks) if self._takes("past_key_values") else None
        return None if cache is None else decoded

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        if not self._takes("attention_mask"):
            return None
        visible, positions = left_padding(ids, padding)
        inputs = {"attention_mask": visible.long()}  # (B, T), 0 = masked
        if self._takes("position_ids"):
            inputs["position_ids"] = positions
        return self._call(lambda: self._logits(ids, **inputs))

    def attention_weights(self, ids: Tensor) -> Sequence[Tensor] | None:
        if self.model.config._attn_implementation != "eager":
            return None  # the others do not compute them separately
        weights = []

        def run() -> Tensor:
            output = self.model(input_ids=ids, use_cache=False, output_attentions=True)
            weights.extend(getattr(output, "attentions", None) or ())  # (B, H, T, S) each
            return self._logits_of(output, ids)

        with torch.no_grad():
            self._call(run)
        square = all(x is not None and x.shape[-2:] == (ids.shape[1],) * 2 for x in weights)
        return weights if square and len(weights) == len(self.windows) else None

    def in_float64(self) -> "TransformersSubject":
        model: Any = self._float64_copy(self.model)
        if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped kernels of experts have no float64
        return TransformersSubject(model, precision="64-true")

    def float64_logits(self, ids: Tensor) -> Tensor | None:
        """None for a model that fails in float64, such as one with constants of float32; `note` says why."""
        try:
            return super().float64_logits(ids)
        except Exception as error:  # the model may raise anything
            reason = one_line(error.__cause__ or error)
            self.note = f"float64 is left out ({reason}); bounds are differences between runs of the same input"
            return None

    def _takes(self, name: str) -> bool:
        return name in inspect.signature(self.model.forward).parameters


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
