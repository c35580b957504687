"""One entry of the corpus, and the decorators that add it.

B batch, T positions, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

VOCAB_SIZE = 61
CONTEXT_LENGTH = 64
END_OF_TEXT, SEPARATOR, PADDING = 0, 1, 2  # token ids with a meaning, for entries that give them one

INTERFACES = ("logits", "cached", "pipeline", "data")
FAMILIES = (
    "masks",
    "one head, layer or group",
    "scores",
    "windows",
    "documents and padding",
    "normalization over time",
    "pooling over the sequence",
    "convolution",
    "token shift",
    "recurrence",
    "global mixing",
    "expert-choice routing",
    "quantization scale over the sequence",
    "length",
    "positions",
    "token ids",
    "training mode",
    "gradient mode",
    "precision",
    "state between calls",
    "gated by a buffer",
    "small size",
    "gradient only",
    "not repeatable",
    "rows of the batch",
    "cache",
    "pipeline",
    "data",
    "look-alike: recurrent",
    "look-alike: state space",
    "look-alike: linear attention",
    "look-alike: convolution",
    "look-alike: positions",
    "look-alike: attention pattern",
    "look-alike: attention",
    "look-alike: mixture of experts",
    "look-alike: normalization",
    "look-alike: numerics",
    "look-alike: interface",
    "look-alike: training",
    "look-alike: cache",
    "look-alike: pipeline",
    "look-alike: data",
)


@dataclass(frozen=True)
class Trigger:
    """What a leak needs to show, apart from a changed or shortened suffix of random tokens.

    Attributes:
        length: number of tokens; None: any of at least 24.
        training: in training mode; None: in both modes.
        dtype: of the weights.
        autocast: under bf16 autocast.
        cut: the first position that changes; None: any.
        before: the last tokens ahead of the changed suffix.
        tokens: the first tokens of the changed suffix.
        calls: number of calls before, on other tokens.
        batch: number of rows.
        values: names of buffers and parameters, and the number that each becomes; a matrix becomes a multiple of the
            identity.
        no_grad: without gradients; False: with gradients; None: both.
        gradient_only: the outputs are causal, and the gradient is not.
    """

    length: int | None = None
    training: bool | None = None
    dtype: torch.dtype | None = None
    autocast: bool = False
    cut: int | None = None
    before: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    calls: int = 0
    batch: int = 1
    values: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_grad: bool | None = None
    gradient_only: bool = False


@dataclass(frozen=True)
class Entry:
    """A model, a cached model, a training pipeline or a pair of texts, which leaks or is correct.

    Attributes:
        name: unique.
        family: one of FAMILIES.
        description: one sentence: what depends on what it may not see, or why it is correct.
        reference: URL of the published leak that it rebuilds from its description; "" for others.
        build: returns the object, the same at each call.
        interface: what `build` returns:
            "logits": a module or function from ids (B, T) to logits (B, T, V), T from 1 to `context_length`; some put
            the logits into a tuple, a dictionary or an object, and batch norm fails on a single token;
            "cached": a module with the arguments and outputs of a `transformers` model: forward(input_ids,
            past_key_values=None, use_cache=False) -> an object with .logits and .past_key_values;
            "pipeline": a `Pipeline`;
            "data": training and validation tokens, (N,) each.
        place: qualified name of the submodule that leaks; "" where there is none.
        expected: T -> (T, T) bool, True = may be seen; None: the lower triangle.
        trigger: what the leak needs to show; None: another suffix is enough.
    """

    name: str
    family: str
    description: str
    reference: str
    leaks: bool
    build: Callable[[], object]
    interface: str
    place: str
    expected: Callable[[int], Tensor] | None
    vocab_size: int
    context_length: int
    trigger: Trigger | None

    def visible(self, length: int) -> Tensor:
        """(T, T) bool: True = may be seen."""
        return torch.ones(length, length).tril().bool() if self.expected is None else self.expected(length)


ENTRIES: dict[str, Entry] = {}


def leak(family: str, **options) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Decorator: adds a build function as a leaking entry; see `_add`."""
    return functools.partial(_add, family, True, **options)


def correct(family: str, **options) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Decorator: adds a build function as a correct entry; see `_add`."""
    return functools.partial(_add, family, False, **options)


def _add(
    family: str,
    leaks: bool,
    build: Callable[[], object],
    *,
    interface: str = "logits",
    place: str = "",
    reference: str = "",
    expected: Callable[[int], Tensor] | None = None,
    context_length: int = CONTEXT_LENGTH,
    trigger: Trigger | None = None,
) -> Callable[[], object]:
    """Adds an entry with the name of the function and the description of its docstring."""

    @functools.wraps(build)
    def seeded() -> object:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    name, description = build.__name__, " ".join(inspect.cleandoc(build.__doc__ or "").split())
    assert name not in ENTRIES and family in FAMILIES and interface in INTERFACES and description, name
    ENTRIES[name] = Entry(
        name,
        family,
        description,
        reference,
        leaks,
        seeded,
        interface,
        place,
        expected,
        VOCAB_SIZE,
        context_length,
        trigger,
    )
    return seeded
