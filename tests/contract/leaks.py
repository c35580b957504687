"""Models that leak, and correct ones that look alike: changes of one small model, which are in leaks.txt."""

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tril.model import GPT, GPTConfig

V, T, C = 13, 16, 8
ARGUMENTS = {"rule": "q, k, m", "weights": "s, v", "mix": "x, m"}


def softmax(s, visible):
    return s.masked_fill(~visible, -torch.inf).softmax(-1)


def pooled(x, size, stride, padding):
    return F.avg_pool1d(F.pad(x.mT, padding), size, stride).mT.repeat_interleave(stride, 1)[:, : x.shape[1]]


class Part(nn.Module):
    def __init__(self, rule=lambda q, k, m: k <= q, weights=softmax, mix=lambda x, m: 0 * x):
        super().__init__()
        self.rule, self.weights, self.mix, self.calls = rule, weights, mix, 0
        self.q, self.gru, self.gate = nn.Linear(C, C), nn.GRU(C, C, batch_first=True), nn.Buffer(torch.zeros(1))

    def forward(self, x, past=None, padding=None):
        states = x if past is None else torch.cat([past, x], 1)  # (B, S, C)
        self.past, self.states = states.shape[1] - x.shape[1], states.detach()
        key = torch.arange(states.shape[1])
        query = key[self.past :, None]
        visible = self.rule(query, key, self)
        if padding is not None:
            visible = visible & padding[:, None].bool() | (key == query)
        x = x + self.weights(self.q(x) @ states.mT, visible) @ states
        return x + self.mixed(x)

    def mixed(self, x):
        self.calls += 1
        return self.mix(x, self)


class Cached(nn.Sequential):
    def forward(self, input_ids, past_key_values=None, attention_mask=None, use_cache=False):
        x = self[1](self[0](input_ids), past_key_values, attention_mask)
        return SimpleNamespace(logits=self[2](x), past_key_values=self[1].states)


def model(kind=nn.Sequential, **changes):
    torch.manual_seed(0)
    return kind(nn.Embedding(V, C), Part(**changes), nn.Linear(C, V))


def read_table():  # a section after the other: name -> arguments of `model`
    for section in Path(__file__).with_name("leaks.txt").read_text("utf-8").split("\n\n")[1:]:
        rows = {}
        for name, what, expression in (line.split(" | ", 2) for line in section.splitlines()[1:]):
            *cached, changed = what.split()
            function = eval(f"lambda {ARGUMENTS[changed]}: {expression}", globals())
            rows[name] = {"kind": Cached if cached else nn.Sequential, changed: function}
        yield rows


SHOWN, HIDDEN, ALIKE = read_table()
CORRECT = {name: functools.partial(model, **changes) for name, changes in ALIKE.items()} | {
    "tied GPT": lambda: GPT(GPTConfig(vocab_size=V, context_length=T, n_layers=1, dim=C, n_kv_heads=1)),
    "tuple of a function": lambda: lambda ids: (F.one_hot(ids, V).cumsum(1).float(), None),
    "GPT-2 of transformers": lambda: (hf := importlib.import_module("transformers")).GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=V, n_positions=T, n_embd=C, n_layer=1, n_head=2)
    ),
}
CALLED = SimpleNamespace(
    causal=lambda ids: F.one_hot(ids, V).cumsum(1).float(),
    leaks=lambda ids: F.one_hot(ids, V).flip(1).cumsum(1).float(),
    raises=softmax,  # without its second argument
    rounds=lambda ids: (x := F.one_hot(ids, V) / 3).cumsum(1) / (1 // (x.itemsize < 8)) + 1e-7 * x.sum(1, True),
)
