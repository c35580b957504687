"""Mutants of head sizes, norms, several arguments, cross-attention and shards.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import torch
import torch.nn.functional as F

from tests.model import sharding
from tests.model.causality import shards
from tests.model.causality.mutants import NEXT, kernel, mutant
from tril.model import attention, positions
from tril.model.attention import MultiHeadAttention
from tril.model.kv_cache import LayerCache

SECOND = {"attention": "layer 0, head 0, query 1, key 0:"}
LAST_OF_RANK_0 = 8  # rows of its last head


@mutant("attention", where={"attention": "layer 0, head 0, query 8, key 8:"}, part="larger values")
def values_cut_to_the_size_of_keys(patch):
    def changed(original, q, k, v, *rest):
        out, weights = original(q, k, v, *rest)
        return F.pad(out[..., : q.shape[-1]], (0, v.shape[-1] - q.shape[-1])), weights

    kernel(patch, changed)


@mutant("attention", where={"attention": "layer 0, head 2, query 0, key 0:"}, part="larger values")
def values_sliced_by_the_size_of_keys(patch):
    """Value head g is read from column g * D of the projection's output instead of g * D_v."""

    def changed(original, q, k, v, *rest):
        columns = v.transpose(1, 2).flatten(2)  # (B, S, G * D_v)
        sliced = [columns[..., g * k.shape[-1] :][..., : v.shape[-1]] for g in range(v.shape[1])]
        return original(q, k, torch.stack(sliced, dim=1), *rest)

    kernel(patch, changed)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 0[ ,]"}, part="larger values")
def cached_values_cut_to_the_size_of_keys(patch):
    update = LayerCache.update

    def changed(self, k, v):
        return update(self, k, F.pad(v[..., : k.shape[-1]], (0, v.shape[-1] - k.shape[-1])))

    patch.setattr(LayerCache, "update", changed)


@mutant("attention", where=SECOND, qk_norm="layernorm")
def layernorm_without_its_mean(patch):
    make = attention.make_norm
    patch.setattr(attention, "make_norm", lambda kind, size, **options: make("rmsnorm", size, eps=1e-5))


@mutant("attention", where=SECOND, norm_eps=0.1)
def norm_eps_ignored(patch):
    make = attention.make_norm
    patch.setattr(attention, "make_norm", lambda kind, size, eps: make(kind, size))


@mutant("attention", where=SECOND, rope_base=100.0)
def rope_base_ignored(patch):
    table = positions.rope_table
    patch.setattr(positions, "rope_table", lambda length, head_dim, base: table(length, head_dim))


def with_arguments(patch, changed):
    """Replaces the module's forward pass by changed(original, self, query, key, value, options)."""
    original = MultiHeadAttention.forward

    def forward(self, query, key=None, value=None, **options):
        return changed(original, self, query, key, value, options)

    patch.setattr(MultiHeadAttention, "forward", forward)


@mutant("no future", "attention", "canary", where=NEXT, part="three times itself")
def key_that_is_the_query_taken_for_a_context(patch):
    def changed(original, self, query, key, value, options):
        if key is not query or options.get("cache") is not None:
            return original(self, query, key, value, **options)
        self.causal = False
        out = original(self, query, key, value, **options)
        self.causal = True
        return out

    with_arguments(patch, changed)


@mutant("no future", "attention", where=NEXT, part="three arguments")
def mask_dropped_with_three_arguments(patch):
    def changed(original, self, query, key, value, options):
        return original(self, query, key, value, **options | ({} if value is None else {"mask": None}))

    with_arguments(patch, changed)


@mutant("attention", where=SECOND, part="two arguments")
def bias_dropped_with_two_arguments(patch):
    with_arguments(
        patch, lambda original, self, query, key, value, options: original(self, query, key, mask=options["mask"])
    )


@mutant(
    "all of the past",
    "attention",
    where={
        "all of the past": "query 5 does not depend on key 1 ",
        "attention": "layer 0, cross-attention, head 0, query 0, key 0: weight 1,",
    },
    part="cross-attention",
)
def context_seen_causally(patch):
    def changed(original, self, query, key, value, options):
        if key is not None:
            options["mask"] = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()  # (T, S)
        return original(self, query, key, value, **options)

    with_arguments(patch, changed)


@mutant("no future", where={"no future": "query 5 changes with key 6, first in blocks.0"}, part="cross-attention")
def stream_taken_for_the_context(patch):
    def changed(original, self, query, key, value, options):
        return original(self, query, None if key is None else query.clone(), value, **options)

    with_arguments(patch, changed)


@mutant("rows", where={"rows": r"row \d changes with rows? "}, part="cross-attention")
def context_of_another_row(patch):
    def changed(original, self, query, key, value, options):
        return original(self, query, None if key is None else key.roll(1, 0), value, **options)

    with_arguments(patch, changed)


@mutant("reference", where={"reference": "row 0, position 0[ ,]"}, part="shards")
def shards_that_overlap(patch):
    """Rank 1 begins one head too early: it computes a head of rank 0 again, and its own last head is missing."""
    keep = sharding._keep

    def changed(linear, rank, world_size, *, dim):
        if rank == 0:
            return keep(linear, rank, world_size, dim=dim)
        for parameter in (linear.weight, linear.bias if dim == 0 else None):
            if parameter is not None:
                parameter.data = parameter.data.roll(LAST_OF_RANK_0, dim)
        return keep(linear, rank, world_size, dim=dim)

    patch.setattr(sharding, "_keep", changed)


def change_shard(patch, changed):
    original = sharding.shard_heads

    def shard_heads(attn, rank, world_size):
        return changed(original, attn, rank, world_size)

    patch.setattr(shards, "shard_heads", shard_heads)


@mutant("reference", part="shards with alibi", where={"reference": "row 0, position [1-9]"})
def keys_of_rank_0_in_every_rank(patch):
    def changed(original, attn, rank, world_size):
        shard = original(attn, rank, world_size)
        shard.k_proj = original(attn, 0, world_size).k_proj
        return shard

    change_shard(patch, changed)


@mutant("reference", where={"reference": "row 0, position 0[ ,]"}, part="shards")
def output_bias_of_every_rank(patch):
    def changed(original, attn, rank, world_size):
        shard = original(attn, rank, world_size)
        shard.o_proj.bias = attn.o_proj.bias
        return shard

    change_shard(patch, changed)
