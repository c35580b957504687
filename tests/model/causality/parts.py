"""Models around `MultiHeadAttention` and `Block` that `GPT` does not build: each is a GPT with other parts, whose
expected dependencies and weights a subject knows.

B batch, T queries, S keys, H query heads, G key/value heads, C width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.model.causality.cross import N_CONTEXT, CrossGPT, CrossSubject
from tests.model.causality.shards import ShardedSubject
from tril.model.attention import MultiHeadAttention
from tril.model.causality.attention_formula import ScoreFormula
from tril.model.causality.case import Case
from tril.model.causality.grids.gpt_grid import gpt_cases
from tril.model.causality.subject import GPTSubject, ProbedLayer, attention_layers, score_formula
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.kv_cache import KVCache
from tril.model.positions import Positions, Rope


class WithoutCache(GPTSubject):
    has_cache = False


def with_attention(model: GPT, make: Callable[[GPTConfig], nn.Module]) -> GPT:
    """Replaces the attention module of each block."""
    for block in model.blocks:
        block.attn = make(model.config)
    return model


def multi_head_attention(config: GPTConfig, **changes) -> MultiHeadAttention:
    names = ("n_kv_heads", "head_dim", "causal", "window", "qk_norm", "norm_eps", "attn_dropout", "backend")
    options = {name: getattr(config, name) for name in names} | {"resid_dropout": config.resid_dropout}
    return MultiHeadAttention(config.dim, config.n_heads, **options | changes)


class ValuesOfAnotherSize(GPT):
    """D_v is `v_head_dim`."""

    v_head_dim = 12

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        with_attention(self, lambda config: multi_head_attention(config, v_head_dim=self.v_head_dim))

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        config = self.config
        capacity = config.context_length if capacity is None else capacity
        sizes = (config.n_layers, batch_size, config.kv_heads, capacity, config.head_size)
        return KVCache(*sizes, v_head_dim=self.v_head_dim, dtype=self.embed.weight.dtype)


class SmallerValues(ValuesOfAnotherSize):
    v_head_dim = 3


class Projected(nn.Module):
    """An attention module whose output has another width than its input, and a projection back."""

    def __init__(self, config: GPTConfig, **changes):
        super().__init__()
        self.attn = multi_head_attention(config, **changes)
        width = self.attn.n_heads * self.attn.v_head_dim
        self.back = nn.Linear(changes.get("out_dim", width), config.dim, bias=False)

    def forward(self, x: Tensor, **options) -> Tensor:
        return self.back(self.attn(x, **options))


class TwoOrThreeArguments(nn.Module):
    """Attention with keys, and with `n_arguments` = 3 values, from projections of the stream.

    Keys that are not the query tensor make it cross-attention, so the causal mask is given.
    """

    def __init__(self, config: GPTConfig, n_arguments: int):
        super().__init__()
        kv_dim = config.dim - 7
        self.attn, self.window = multi_head_attention(config, kv_dim=kv_dim), config.window
        self.others = nn.ModuleList(nn.Linear(config.dim, kv_dim, bias=False) for _ in range(n_arguments - 1))

    def forward(self, x: Tensor, *, mask: Tensor | None, rope: None, cache: None, **options) -> Tensor:
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()  # (T, T)
        visible = visible if self.window is None else visible.triu(1 - self.window)
        return self.attn(x, *(f(x) for f in self.others), mask=visible if mask is None else visible & mask, **options)


class ThreeTimesItself(MultiHeadAttention):
    """Self-attention, called as `torch.nn.MultiheadAttention` is."""

    def forward(self, query: Tensor, **options) -> Tensor:
        return super().forward(query, query, query, **options)


def three_times_itself(config: GPTConfig) -> GPT:
    model = GPT(config)
    for attn in attention_layers(model):
        attn.__class__ = ThreeTimesItself
    return model


class Future(Positions):
    def bias(self, n_queries: int, *_) -> Tensor:
        return torch.full((1, n_queries, n_queries), -torch.inf).triu(1)


class AdditiveMask(GPT):
    """The causal mask is a bias of -inf, for modules with causal=False."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.pos_embed.__class__ = Future


class BiasTable(Rope):
    def bias(self, n_queries: int, cache: KVCache | None, cache_position: Tensor | None) -> Tensor:
        first = 0 if cache is None else cache.length if cache_position is None else cache_position
        n_keys = cache.capacity if cache and cache_position is not None else first + n_queries
        query, key = torch.arange(n_queries)[:, None] + first, torch.arange(n_keys)
        return self.table[:, (query - key).clamp(min=0)].masked_fill(bias_hides(query, key), -torch.inf)  # (H, T, S)


class LearnedBias(GPT):
    """A learned bias by head and distance, with -inf where `bias_hides` says so."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.pos_embed.__class__ = BiasTable
        self.pos_embed.table = nn.Parameter(torch.zeros(config.n_heads, config.context_length))


def bias_hides(query: Tensor, key: Tensor) -> Tensor:
    """(H, T, S): odd distances, and from head 0 those below 4 too, which leaves its first queries without a key."""
    distance, head = query - key, torch.arange(4)[:, None, None]
    return (distance % 2 == 1) | (head == 0) & (distance < 4)


class LearnedBiasSubject(GPTSubject):
    def visible(self, length: int, layer: int | None = None) -> Tensor:
        positions = torch.arange(length)
        of_layer = super().visible(length, 0) & ~bias_hides(positions[:, None], positions)  # (H, T, T)
        if layer is not None:
            return of_layer
        step = of_layer.any(0) | torch.eye(length, dtype=torch.bool)  # the residual stream keeps each token
        return torch.linalg.matrix_power(step.double(), self.model.config.n_layers) > 0

    def probed_layers(self, length: int) -> list[ProbedLayer]:
        rule, positions = score_formula(self.model.config, length), torch.arange(length)
        distance = (positions[:, None] - positions).clamp(min=0)
        table = self.model.pos_embed.table.detach()
        bias = table[:, distance].masked_fill(bias_hides(positions[:, None], positions), -torch.inf)
        formula = ScoreFormula(rule.norm, rule.norm_eps, rule.rope_base, bias)
        layers = [] if self.compiled else attention_layers(self.model)
        return [ProbedLayer(f"layer {i}", attn, self.visible(length, i), formula) for i, attn in enumerate(layers)]


@dataclass(frozen=True)
class Part:
    """A kind of model.

    Attributes:
        choices: settings of its GPTConfig.
        shortest: its shortest input.
    """

    build: Callable[[GPTConfig], GPT] = GPT
    subject: Callable[..., GPTSubject] = GPTSubject
    choices: dict = field(default_factory=dict)
    shortest: int = 1

    def cases(self, config: GPTConfig, **options) -> Iterator[Case]:
        for case in gpt_cases(config, build=self.build, subject=self.subject, **options):
            case.lengths = [n for n in case.lengths if n >= self.shortest]
            case.redrawn = [n for n in case.redrawn if n >= self.shortest]
            yield case


def projected(**changes) -> Callable[[GPTConfig], GPT]:
    return lambda config: with_attention(GPT(config), lambda config: Projected(config, **changes))


def arguments(number: int) -> Callable[[GPTConfig], GPT]:
    return lambda config: with_attention(GPT(config), lambda config: TwoOrThreeArguments(config, number))


PARTS = {
    "": Part(),
    "larger values": Part(ValuesOfAnotherSize),
    "smaller values": Part(SmallerValues, choices={"window": 4}),
    "no output projection": Part(projected(out_proj=False, v_head_dim=None)),
    "another output width": Part(projected(out_dim=20, out_bias=True)),
    "two arguments": Part(arguments(2), WithoutCache, {"pos": "alibi", "window": 4}),
    "three arguments": Part(arguments(3), WithoutCache, {"pos": "learned"}),
    "three times itself": Part(three_times_itself),
    "additive mask": Part(AdditiveMask, choices={"causal": False, "pos": "learned"}),
    "learned bias": Part(LearnedBias, LearnedBiasSubject),
    "cross-attention": Part(CrossGPT, CrossSubject, shortest=N_CONTEXT + 1),
    "cross-attention after alibi": Part(CrossGPT, CrossSubject, {"pos": "alibi"}, shortest=N_CONTEXT + 1),
    "shards": Part(GPT, ShardedSubject, {"bias": True}),
    "shards with alibi": Part(GPT, ShardedSubject, {"pos": "alibi", "qk_norm": "layernorm", "window": 4}),
}
