"""A GPT whose attention modules are cut into the local heads of two ranks, which one process computes one by one.

B batch, T queries, S keys, H query heads, C width.
"""

import copy

from torch import Tensor, nn

from tests.model.sharding import shard_heads
from tril.model.attention import MultiHeadAttention
from tril.model.causality.attention_formula import ScoreFormula
from tril.model.causality.subject import GPTSubject, ProbedLayer, score_formula, use_explicit_backend
from tril.model.gpt import GPT
from tril.model.kv_cache import LayerCache

WORLD_SIZE = 2


class Shards(nn.Module):
    """The sum over all ranks; each has its part of a bias by head, and of the cache."""

    def __init__(self, attn: MultiHeadAttention):
        super().__init__()
        self.ranks = nn.ModuleList(shard_heads(attn, rank, WORLD_SIZE) for rank in range(WORLD_SIZE))
        self.resid_dropout = attn.resid_dropout

    def forward(self, x: Tensor, *, bias: Tensor | None, cache: LayerCache | None, **options) -> Tensor:
        outputs = []
        for rank, shard in enumerate(self.ranks):
            local = {"bias": bias, "cache": cache}
            if bias is not None:
                local["bias"] = bias.chunk(WORLD_SIZE)[rank]  # (H / 2, T, S)
            if cache is not None:
                keys, values = (x.chunk(WORLD_SIZE, dim=1)[rank] for x in (cache.keys, cache.values))
                local["cache"] = LayerCache(keys, values, cache.start)
            outputs.append(shard(x, **local, **options))
        return self.resid_dropout(sum(outputs))


class ShardedSubject(GPTSubject):
    """The certificate compares its logits with those of the full model."""

    def __init__(self, full: GPT, **options):
        model = copy.deepcopy(full)
        for block in model.blocks:
            block.attn = Shards(block.attn)
        super().__init__(model, **options)
        self.full = full

    def probed_layers(self, length: int) -> list[ProbedLayer]:
        rule, layers = score_formula(self.model.config, length), []
        for i, block in enumerate(() if self.compiled else self.model.blocks):
            for rank, attn in enumerate(block.attn.ranks):
                bias = None if rule.bias is None else rule.bias.chunk(WORLD_SIZE)[rank]
                formula = ScoreFormula(rule.norm, rule.norm_eps, rule.rope_base, bias)
                layers.append(ProbedLayer(f"layer {i}, rank {rank}", attn, self.visible(length, i), formula))
        return layers

    def plain(self) -> GPTSubject:
        return GPTSubject(use_explicit_backend(copy.deepcopy(self.full)), precision=self.precision)
