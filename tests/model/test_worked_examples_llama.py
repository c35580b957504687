"""The attention of Llama 2 (https://github.com/meta-llama/llama, llama/model.py) with a cache, groups and local heads.

B batch, T new positions, S all positions, H query heads, G key/value heads, D head size, C width.
"""

import pytest
import torch
from torch import Tensor

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tril.model.attention import MultiHeadAttention, attention
from tril.model.kv_cache import KVCache
from tril.model.rope import rope_table
from tril.model.sharding import shard_heads

B, C, H, G, D = 2, 32, 8, 2, 4
CONTEXT = 12


def additive_mask(n_new: int, start_pos: int) -> Tensor | None:
    """-inf above the diagonal, with zeros for the cached positions on the left; None for a single new position."""
    if n_new == 1:
        return None
    return torch.cat([torch.zeros(n_new, start_pos), torch.full((n_new, n_new), -torch.inf).triu(1)], dim=1)


def llama_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """All positions at once, one head and one row after another, in float64. Pairs (0, 1), (2, 3), ... are rotated."""
    x, n = x.double(), x.shape[1]
    angle = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)  # (T, D/2)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)

    def head(weight: Tensor, index: int, rotated: bool) -> Tensor:
        part = x @ weight.double()[index * D : (index + 1) * D].T  # (B, T, D)
        pairs = part.unflatten(-1, (D // 2, 2))
        turned = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
        return torch.view_as_real(turned).flatten(-2) if rotated else part

    heads = []
    for h in range(H):
        shared = h // (H // G)
        q, k, v = head(w_q, h, True), head(w_k, shared, True), head(w_v, shared, False)
        rows = [(q[:, t : t + 1] @ k[:, : t + 1].mT / D**0.5).softmax(-1) @ v[:, : t + 1] for t in range(n)]
        heads.append(torch.cat(rows, dim=1))
    return torch.cat(heads, dim=-1) @ w_o.double().T


def halves(weight: Tensor) -> Tensor:
    """The rows of each head in the order 0, 2, ..., 1, 3, ...: Tril rotates i with i + D/2, as Hugging Face does."""
    return weight.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("chunks", [[9], [5, 1, 1, 2], [1] * 9])
@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_chunks_with_a_cache_equal_the_rows_one_by_one(backend, chunks):
    """Rotated q and k, the cache at start_pos, repeated heads, softmax, concatenation, output projection."""
    x = torch.randn(B, 9, C)
    attn = randomize(MultiHeadAttention(C, H, n_kv_heads=G, backend=backend))
    w_q, w_k, w_v, w_o = (p.weight.clone() for p in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
    attn.q_proj.weight.copy_(halves(w_q))
    attn.k_proj.weight.copy_(halves(w_k))
    cache, (cos, sin) = KVCache(1, B, G, CONTEXT, D), rope_table(CONTEXT, D)
    outputs = []
    for chunk in x.split(chunks, dim=1):
        positions = slice(cache.length, cache.length + chunk.shape[1])
        outputs.append(attn(chunk, rope=(cos[positions], sin[positions]), cache=cache.layer(0)))
        cache.advance(chunk.shape[1])
    assert_close(torch.cat(outputs, dim=1), llama_attention(x, w_q, w_k, w_v, w_o).float())


@pytest.mark.parametrize("n_new, start_pos", [(1, 6), (3, 4), (7, 0)])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_the_additive_mask_of_a_chunk_is_causal(backend, n_new, start_pos):
    """Hidden are the keys j > start_pos + i, because row i is the token at position start_pos + i."""
    q = torch.randn(B, H, n_new, D)
    k, v = torch.randn(2, B, H, start_pos + n_new, D)
    added = attention(q, k, v, bias=additive_mask(n_new, start_pos), backend=backend)
    assert_close(added, attention(q, k, v, causal=True, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_repeated_heads_equal_grouped_heads(backend):
    """repeat_kv is torch.repeat_interleave over heads, n_rep = n_heads / n_kv_heads times."""
    q, (k, v) = torch.randn(B, H, 5, D), torch.randn(2, B, G, 5, D)
    n_rep = H // G
    expanded = [t[:, :, None].expand(B, G, n_rep, 5, D).reshape(B, H, 5, D) for t in (k, v)]
    assert torch.equal(expanded[0], k.repeat_interleave(n_rep, dim=1))
    grouped = attention(q, k, v, causal=True, backend=backend)
    assert_close(grouped, attention(q, *expanded, causal=True, backend=backend))


def test_the_cache_has_the_published_sizes():
    """(max_batch_size, max_seq_len, n_kv_heads, head_dim) each for keys and values, here with the heads first."""
    cache = KVCache(n_layers=1, batch_size=4, n_kv_heads=32, capacity=64, head_dim=128)
    assert cache.keys[0].shape == cache.values[0].shape == (4, 32, 64, 128)


def test_the_sizes_of_the_7b_model():
    """dim 4096, 32 heads of 128, four matrices without biases."""
    with torch.device("meta"):
        attn = MultiHeadAttention(4096, 32)
    assert (attn.head_dim, attn.n_kv_heads) == (128, 32)  # n_kv_heads=None: as many as n_heads
    assert [tuple(p.shape) for p in attn.parameters()] == 4 * [(4096, 4096)]


def test_frequencies_use_theta_10000():
    """(length, head_dim / 2) angles: position times 10000^(-2i / head_dim), with length = 2 * max_seq_len."""
    cos, sin = rope_table(2 * 2048, 128)
    assert cos.shape == sin.shape == (4096, 64)
    expected = torch.polar(torch.ones(64), 3 * 10_000.0 ** (-torch.arange(0, 128, 2) / 128))
    assert_close(torch.complex(cos[3], sin[3]).real, expected.real)
    assert_close(torch.complex(cos[3], sin[3]).imag, expected.imag)


def test_softmax_is_computed_in_float32():
    """scores.float() before softmax, type_as afterwards: in bfloat16 a sum of 4096 equal terms stops at 256."""
    n = 4096
    q, k, v = torch.zeros(1, D), torch.zeros(n, D), torch.ones(n, D)
    out, weights = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend="explicit", need_weights=True)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    assert_close(weights, torch.full((1, n), 1 / n))
    assert_close(out, torch.ones(1, D).bfloat16())


# --- local heads: n_local_heads = n_heads / model_parallel_size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("choices", [{}, {"n_kv_heads": G}, {"qkv_bias": True, "out_bias": True}], ids=str)
@torch.no_grad()
def test_the_outputs_of_all_ranks_add_up(choices, world_size):
    attn, x = randomize(MultiHeadAttention(C, H, **choices)), torch.randn(B, 5, C)
    shards = [shard_heads(attn, rank, world_size) for rank in range(world_size)]
    for shard in shards:
        assert (shard.n_heads, shard.n_kv_heads) == (H // world_size, attn.n_kv_heads // world_size)
    error = (sum(shard(x) for shard in shards) - attn(x)).abs().max()
    assert error < 1e-5


@torch.no_grad()
def test_each_rank_has_its_rows_and_columns():
    """q, k and v are split by output (column parallel), the output projection by input (row parallel)."""
    attn = MultiHeadAttention(C, H, n_kv_heads=G)
    for rank in range(2):
        shard, heads, groups = (
            shard_heads(attn, rank, 2),
            slice(16 * rank, 16 * rank + 16),
            slice(4 * rank, 4 * rank + 4),
        )
        assert torch.equal(shard.q_proj.weight, attn.q_proj.weight[heads])
        assert torch.equal(shard.k_proj.weight, attn.k_proj.weight[groups])
        assert torch.equal(shard.v_proj.weight, attn.v_proj.weight[groups])
        assert torch.equal(shard.o_proj.weight, attn.o_proj.weight[:, heads])


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="must divide"):
        shard_heads(MultiHeadAttention(C, H, n_kv_heads=G), 0, 4)  # 2 key/value heads for 4 ranks
