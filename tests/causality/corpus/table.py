"""The rows of the corpus: models, training pipelines and texts that leak, and correct ones that look alike.

B batch, T positions, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

CONTEXT_LENGTH = 64


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
        grad: with gradients; None: without.
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
    grad: bool = False
    gradient_only: bool = False


@dataclass(frozen=True)
class Entry:
    """A row.

    Attributes:
        leaks: whether it does; otherwise it is correct.
        interface: what `build` returns:
            "logits": a module or function from ids (B, T) to logits (B, T, V), T from 1 to `context_length`; some put
            the logits into a tuple, a dictionary or an object, and batch norm fails on a single token;
            "cached": a module with the arguments and outputs of a `transformers` model: forward(input_ids,
            past_key_values=None, use_cache=False) -> an object with .logits and .past_key_values;
            "pipeline": a `Pipeline`;
            "data": training and validation tokens, (N,) each.
        make: builds it from the current random state.
        place: name of the submodule that leaks; "" where there is none.
        source: of the published leak that it rebuilds, on github.com; "" for others.
        expected: T -> (T, T) bool, True = may be seen; None: the lower triangle.
        when: what the leak needs to show.
    """

    name: str
    leaks: bool
    interface: str
    make: Callable[[], Any]
    place: str = ""
    source: str = ""
    expected: Callable[[int], Tensor] | None = None
    context_length: int = CONTEXT_LENGTH
    when: Trigger = Trigger()

    def build(self) -> Any:
        """The same object at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def visible(self, length: int) -> Tensor:
        """(T, T) bool: True = may be seen."""
        return torch.ones(length, length).tril().bool() if self.expected is None else self.expected(length)


ENTRIES: dict[str, Entry] = {}


def add(entry: Entry) -> None:
    assert entry.name not in ENTRIES, entry.name
    ENTRIES[entry.name] = entry
