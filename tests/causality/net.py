"""The model that the rows of the table change: embedding and positions, two blocks of attention and MLP, norm, head.

    net(rule=lambda q, k: k <= q + 1)    # a mask that is off by one

B batch, T queries, S keys, H heads, D head size, C width, V vocabulary.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, C, H, D = 61, 16, 4, 4
CONTEXT_LENGTH = 64


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def masked_softmax(scores: Tensor, visible: Tensor, m: Any = None) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def steps(x: Tensor) -> Tensor:
    """(T,) positions of (B, T, ...)."""
    return torch.arange(x.shape[1])


class Attention(nn.Module):
    """Self-attention, (B, T, C) -> (B, T, C).

    Args:
        rule: query positions (T, 1), key positions (S,) -> may attend, (T, S) or (H, T, S).
        weights: scores (B, H, T, S), mask, this module -> weights (B, H, T, S).
        attend: queries, keys and values (B, H, T, D), this module -> outputs (B, H, T, D), without rule and weights.
        unmasked: this module -> what is visible in addition: a bool, (B,) or (B, 1, T, S).
    """

    def __init__(self, rule=causal, weights=masked_softmax, *, attend=None, unmasked=lambda m: False):
        super().__init__()
        self.rule, self.weights, self.attend, self.unmasked = rule, weights, attend, unmasked
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        more = torch.as_tensor(self.unmasked(self))
        visible = self.rule(steps(x)[:, None], steps(x)) | (more[:, None, None, None] if more.dim() == 1 else more)
        return self.over(x, x, visible)

    def over(self, x: Tensor, states: Tensor, visible: Tensor) -> Tensor:
        """Attention of (B, T, C) to (B, S, C)."""
        inputs = ((self.q_proj, x), (self.k_proj, states), (self.v_proj, states))
        q, k, v = (project(x).unflatten(-1, (H, D)).transpose(1, 2) for project, x in inputs)  # (B, H, T or S, D)
        if self.attend is None:
            out = self.weights(q @ k.mT * D**-0.5, visible, self) @ v
        else:
            out = self.attend(q, k, v, self)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, C)


class Mix(nn.Module):
    """A function as a module, which may hold other modules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **self.parts)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = Attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """ids (B, T) -> logits (B, T, V)."""

    def __init__(self, n_layers: int = 2, context_length: int = CONTEXT_LENGTH):
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, C), nn.Embedding(context_length, C)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(steps(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(
    at: str = "",
    *,
    part: Callable[[], nn.Module] | None = None,
    mix: Callable[[Tensor, Any], Tensor] | None = None,
    edit: Callable[[Any], object] = lambda model: None,
    root: Callable[..., Any] = Net,
    n_layers: int = 2,
    context_length: int = CONTEXT_LENGTH,
    **attention: Any,
) -> nn.Module:
    """A model that differs in one submodule.

    Args:
        at: name of the submodule that changes; "*" in it stands for each block, of which `part` makes one.
        part: makes another one.
        mix: output of the submodule, the submodule -> another output. The submodule has `x`, its input without
            gradient, `ids` (B, T), `calls` of the model, this one included, and a buffer `gate` of value 0.
        edit: changes the model afterwards.
        root: the class of the model.
        attention: settings of `Attention`, which replaces the submodule.
    """
    model = root(n_layers=n_layers, context_length=context_length)
    if attention:
        part = functools.partial(Attention, **attention)
    if part is not None:
        for i in range(n_layers if "*" in at else 1):
            model.set_submodule(at.replace("*", str(i)), part())
        at = at.replace("*", "0")
    if mix is not None or attention:
        changed: Any = model.get_submodule(at)
        changed.gate = nn.Buffer(torch.zeros(()))
        model.register_forward_pre_hook(functools.partial(note_call, at))
        changed.register_forward_pre_hook(note_input)
        changed.register_forward_hook(lambda m, _, out: out if mix is None else mix(out, m))
    edit(model)
    return model


def note_call(at: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    changed: Any = model.get_submodule(at)
    changed.ids, changed.calls = inputs[0], getattr(changed, "calls", 0) + 1


def note_input(changed: Any, inputs: tuple[Tensor, ...]) -> None:
    changed.x = inputs[0].detach()


class CachedNet(Net):
    """The model with the arguments and outputs of a `transformers` model; its cache holds inputs of attention.

    Args:
        see: query and key positions, number of cached tokens -> may attend, (T, S).
        start: number of cached tokens -> position of the first new one.
        keep: a cached tensor (B, S, C) -> what is stored.
        room: number of positions of the cache, if it is larger than its tokens.
        shared: a new sequence begins with the first token of the sequence before.
    """

    def __init__(self, rule=causal, see=None, *, start=lambda n: n, keep=lambda x: x, room=0, shared=False):
        super().__init__()
        self.rule, self.see, self.start, self.keep = rule, see or (lambda q, k, n: rule(q, k)), start, keep
        self.room, self.shared, self.before = room, shared, None

    def forward(self, input_ids: Tensor, past_key_values=None, use_cache: bool = False) -> SimpleNamespace:
        past, cache = past_key_values, []
        x = self.embed(input_ids) + self.positions(
            self.start(0 if past is None else past[0].shape[1]) + steps(input_ids)
        )
        if use_cache and past is None and self.before is not None:
            past = [states.expand(len(x), -1, -1) for states in self.before]
        for i, block in enumerate(self.blocks):
            new = block.norm1(x)
            states = new if past is None else torch.cat([past[i], new], 1)  # (B, S, C)
            cache.append(self.keep(states))
            states, n = F.pad(states, (0, 0, 0, max(0, self.room - states.shape[1]))), states.shape[1] - x.shape[1]
            key = steps(states)
            query = key[n : n + x.shape[1], None]
            visible = self.see(query, key, n) if use_cache else self.rule(query, key)
            x = x + block.attn.over(new, states, visible)
            x = x + block.mlp(block.norm2(x))
        if use_cache and self.shared:
            self.before = [states[:1, :1].detach() for states in cache]
        return SimpleNamespace(logits=self.head(self.norm(x)), past_key_values=cache if use_cache else None)
