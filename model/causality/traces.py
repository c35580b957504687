"""The submodule in which two passes of a model begin to differ: its inputs are equal in both, its outputs are not.

B batch, T positions.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tril.model.causality.receptive_field import removed_at_exit

RELATIVE_ROUNDING = {torch.float64: 1e-11}  # of two ways to compute the same values; 1e-5 in lower precisions


@dataclass(frozen=True)
class Pass:
    """One pass over a text.

    Attributes:
        run: calls the model; all of its calls count, where several chunks are decoded.
        query: the position that is compared, in the call over `length` positions with number `call`.
        row: of a batch of `rows`, the only one that is compared; None: all.
    """

    run: Callable[[], object]
    query: int
    length: int
    call: int = 0
    row: int | None = None
    rows: int = 1


@torch.no_grad()
def first_difference(module: nn.Module | None, one: Pass, other: Pass, *, exact: bool) -> str | None:
    """Name of the first submodule with equal inputs and different outputs at the query.

    Args:
        exact: equal means to the bit; otherwise up to rounding.

    Returns:
        "" for the code of the module itself, None for a function, and where no submodule shows the difference.
    """
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return None
    before, after = (_numbered(_Trace(each).events_of(module)) for each in (one, other))
    active: list[str] = []
    for (name, kind, number), values in before.items():
        if (name, kind, number) not in after:  # decoding may call other submodules than the full pass
            continue
        pairs = [(a, b) for a, b in zip(values, after[name, kind, number], strict=False) if a.shape == b.shape]
        if not all(_equal(a, b, exact) for a, b in pairs):
            owner = name.rpartition(".")[0]
            caller = active[-1] if active else ""
            skipped = owner.startswith(caller) and not isinstance(module.get_submodule(owner), nn.ModuleList)
            return name if kind == "out" else owner if skipped else caller
        if kind == "in":
            active.append(name)
        elif active:
            active.pop()
    return None


def _numbered(events: list[tuple[str, str, list[Tensor]]]) -> dict[tuple[str, str, int], list[Tensor]]:
    """The events by name, kind, and how often this name and kind came before."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = {}
    for name, kind, values in events:
        numbered[name, kind, seen[name, kind]] = values
        seen[name, kind] += 1
    return numbered


def in_words(place: str | None) -> str:
    """The end of a message; `place` as `first_difference` returns it."""
    return "" if place is None else f", first in {place or 'the code of the model itself'}"


@dataclass
class _Trace:
    """What enters and leaves each submodule at the query, in the order of execution."""

    of: Pass
    call: int = -1
    events: list[tuple[str, str, list[Tensor]]] = field(default_factory=list)  # name, "in" or "out", values

    def events_of(self, module: nn.Module) -> list[tuple[str, str, list[Tensor]]]:
        with removed_at_exit(list(self._hooks(module))):
            self.of.run()
        return self.events

    def _hooks(self, module: nn.Module) -> Iterator:
        for name, part in module.named_modules():
            with contextlib.suppress(RuntimeError):  # a ScriptModule takes no hooks
                yield part.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._keep(name, "in", (args, kwargs)), with_kwargs=True
                )
                yield part.register_forward_hook(lambda _, __, out, name=name: self._keep(name, "out", out))

    def _keep(self, name: str, kind: str, values: object) -> None:
        self.call += name == "" and kind == "in"
        if self.call == self.of.call:
            tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
            self.events.append((name, kind, [at for x in tensors if (at := self._at_query(x)) is not None]))

    def _at_query(self, x: Tensor) -> Tensor | None:
        """What belongs to the query; None for a tensor without positions."""
        length, query, row = self.of.length, self.of.query, self.of.row
        if row is not None and x.dim() and x.shape[0] == self.of.rows:
            x = x[row : row + 1]
        dims = [d for d, size in enumerate(x.shape) if size == length]
        if not dims:
            return None
        if x.dim() > 2 and x.shape[-2] == x.shape[-1] == length > 1:  # attention weights (..., T, S)
            return x.detach().select(-2, query)[..., : query + 1].clone()
        usual = 1 if x.dim() == 3 else x.dim() - 2  # (B, T, C) and (B, H, T, D): other sizes may equal T by chance
        return x.detach().select(usual if usual in dims else dims[0], query).clone()


def _equal(a: Tensor, b: Tensor, exact: bool) -> bool:
    if exact or not a.numel():
        return torch.equal(a, b)
    scale = max(a.abs().max().item(), b.abs().max().item())
    return bool(((a - b).abs() <= RELATIVE_ROUNDING.get(a.dtype, 1e-5) * scale).all())
