"""The model that the rows change: embedding and positions, two blocks of attention and MLP, norm, head.

    leak("mask_off_by_one", rule=lambda q, k: k <= q + 1)

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.table import CONTEXT_LENGTH, Entry, add

V, C, H = 61, 16, 4
D = C // H
END_OF_TEXT, SEPARATOR, PADDING = 0, 1, 2  # ids with a meaning, for rows that give them one


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def everywhere(q: Tensor, k: Tensor) -> Tensor:
    return (q >= 0) & (k >= 0)


def masked_softmax(scores: Tensor, visible: Tensor, m: Any = None) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def steps(x: Tensor) -> Tensor:
    """(T,) positions of (B, T, ...)."""
    return torch.arange(x.shape[1], device=x.device)


def next_token(x: Tensor) -> Tensor:
    """(B, T, C) shifted left by one position, with zeros at the last one."""
    return F.pad(x[:, 1:], (0, 0, 0, 1))


def previous_token(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


class Attention(nn.Module):
    """Self-attention, (B, T, C) -> (B, T, C).

    Args:
        rule: query positions (T, 1), key positions (S,) -> may attend, (T, S) or (H, T, S).
        weights: scores (B, H, T, S), mask, this module -> weights (B, H, T, S).
        unmasked: this module -> what is visible in addition: a bool, (B,) or (B, 1, T, S).
        turn: applied to queries and keys, (B, H, T, D).
    """

    def __init__(
        self,
        rule: Callable[[Tensor, Tensor], Tensor] = causal,
        weights: Callable[[Tensor, Tensor, Any], Tensor] = masked_softmax,
        *,
        unmasked: Callable[[Any], Any] | None = None,
        turn: Callable[[Tensor], Tensor] = lambda x: x,
        n_kv_heads: int = H,
        scale: float = D**-0.5,
    ):
        super().__init__()
        self.rule, self.weights, self.unmasked, self.turn = rule, weights, unmasked, turn
        self.repeats, self.scale = H // n_kv_heads, scale
        self.q_proj: nn.Module = nn.Linear(C, C)
        self.k_proj: nn.Module = nn.Linear(C, n_kv_heads * D)
        self.v_proj: nn.Module = nn.Linear(C, n_kv_heads * D)
        self.o_proj = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(self.weights(self.scores(q, k), self.visible(x), self) @ v)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, H, T, D) each; key/value heads are repeated."""
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in projections)  # (B, H or G, T, D)
        return q, k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.turn(q) @ self.turn(k).mT * self.scale

    def visible(self, x: Tensor) -> Tensor:
        visible = self.rule(steps(x)[:, None], steps(x))
        if self.unmasked is None:
            return visible
        more = torch.as_tensor(self.unmasked(self))
        return visible | (more[:, None, None, None] if more.dim() == 1 else more)

    def merge(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))


class Positions(nn.Module):
    """Learned positions: (B, T, C) embeddings -> (T, C) to add."""

    def __init__(self, context_length: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(context_length, C) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]]


class Mix(nn.Module):
    """A function of (B, T, C) without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    """A recurrent layer of torch that returns its outputs, (B, T, C)."""

    def __init__(self, rnn: nn.RNNBase):
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1: nn.Module = nn.LayerNorm(C)
        self.attn: nn.Module = Attention()
        self.norm2: nn.Module = nn.LayerNorm(C)
        self.mlp: nn.Module = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """ids (B, T) -> logits (B, T, V)."""

    def __init__(self, n_layers: int = 2, context_length: int = CONTEXT_LENGTH):
        super().__init__()
        self.embed: nn.Module = nn.Embedding(V, C)
        self.positions: nn.Module = Positions(context_length)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
        self.norm: nn.Module = nn.LayerNorm(C)
        self.head: nn.Module = nn.Linear(C, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.positions(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(
    at: str = "",
    *,
    part: Callable[[], nn.Module] | None = None,
    mix: Callable[[Tensor, Any], Tensor] | None = None,
    gate: Callable[[Tensor], Tensor] | None = None,
    edit: Callable[[Any], object] | None = None,
    root: Callable[..., nn.Module] = Net,
    n_layers: int = 2,
    context_length: int = CONTEXT_LENGTH,
    **attention: Any,
) -> nn.Module:
    """A model that differs in one submodule.

    Args:
        at: name of the submodule that changes.
        part: makes another one.
        mix: output of the submodule, the submodule -> another output. The submodule has `x`,
            its input without gradient, `ids` (B, T), and `calls` of the model, this one included.
        gate: `nn.Buffer` or `nn.Parameter`: the submodule has such a `gate` of value 0.
        edit: changes the model afterwards.
        root: the class of the model.
        attention: settings of `Attention`, which replaces the submodule.
    """
    model = root(n_layers=n_layers, context_length=context_length)
    if attention:
        part = functools.partial(Attention, **attention)
    if part is not None:
        owner, _, name = at.rpartition(".")
        owner = model.get_submodule(owner)
        setattr(owner, name, part())
    changed = model.get_submodule(at)
    if gate is not None:
        changed.gate = gate(torch.zeros(()))
    if mix is not None or "unmasked" in attention or "weights" in attention:
        model.register_forward_pre_hook(functools.partial(note_call, at))
        changed.register_forward_pre_hook(note_input)
    if mix is not None:
        changed.register_forward_hook(lambda m, _, out: mix(out, m))
    if edit is not None:
        edit(model)
    return model


def replace_part(owner: nn.Module, **parts: nn.Module) -> None:
    for name, part in parts.items():
        setattr(owner, name, part)


def note_call(at: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    changed: Any = model.get_submodule(at)
    changed.ids, changed.calls = inputs[0], getattr(changed, "calls", 0) + 1


def note_input(changed: Any, inputs: tuple[Tensor, ...]) -> None:
    changed.x = inputs[0].detach()


def place_of(changes: dict[str, Any]) -> str:
    return "blocks.0.mlp" if {"mix", "part"} & changes.keys() else "blocks.0.attn"


ROW = ("source", "expected", "when")


def add_net(name: str, at: str = "", *, leaks: bool, **changes: Any) -> None:
    """Adds a model; `changes` are the arguments of `net` and the fields ROW of `Entry`."""
    row = {key: changes.pop(key) for key in ROW if key in changes}
    row["context_length"] = changes.get("context_length", CONTEXT_LENGTH)
    at = at or place_of(changes)
    add(Entry(name, leaks, "logits", functools.partial(net, at, **changes), at if leaks else "", **row))


def add_model(name: str, make: Callable[[], Any], *, leaks: bool, **row: Any) -> None:
    """Adds what `make` returns."""
    add(Entry(name, leaks, "logits", make, **row))


leak = functools.partial(add_net, leaks=True)
correct = functools.partial(add_net, leaks=False)
