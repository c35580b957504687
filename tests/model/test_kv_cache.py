"""The KV cache against literal arrays, and whole models: decoding in chunks equals one full pass."""

from itertools import product

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, tiny_gpt
from tril.model.attention import MultiHeadAttention
from tril.model.kv_cache import KVCache

B, LENGTH = 2, 11


def decode(model, ids, chunks, cache=None):
    """Logits of `ids`, decoded with a cache in chunks of the given sizes."""
    assert sum(chunks) == ids.shape[1]
    cache = model.new_cache(ids.shape[0]) if cache is None else cache
    return torch.cat([model(chunk, cache=cache) for chunk in ids.split(chunks, dim=1)], dim=1)


def random_chunks(total):
    chunks = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(torch.randint(1, min(4, left) + 1, ()).item())
    return chunks


def test_update_appends_at_the_length_and_advance_moves_it():
    cache = KVCache(n_layers=2, batch_size=1, n_kv_heads=1, capacity=4, head_dim=1)
    first, second = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1), torch.tensor([3.0]).view(1, 1, 1, 1)
    keys, values = cache.layer(1).update(first, 10 * first)
    assert keys.flatten().tolist() == [1, 2] and values.flatten().tolist() == [10, 20]
    assert cache.length == 0  # layers do not change it
    cache.advance(2)
    keys, values = cache.layer(1).update(second, 10 * second)
    assert keys.flatten().tolist() == [1, 2, 3] and values.flatten().tolist() == [10, 20, 30]
    assert [keys.flatten().tolist() for keys in cache.keys] == [[0, 0, 0, 0], [1, 2, 3, 0]]  # layer 0 is unchanged
    cache.length = 1
    assert cache.layer(1).update(second, second)[0].flatten().tolist() == [1, 3]


def test_values_have_a_size_of_their_own():
    cache = KVCache(n_layers=2, batch_size=3, n_kv_heads=2, capacity=4, head_dim=5, v_head_dim=1)
    assert [tuple(x.shape) for x in (*cache.keys, *cache.values)] == [(3, 2, 4, 5)] * 2 + [(3, 2, 4, 1)] * 2
    keys, values = cache.layer(0).update(torch.ones(3, 2, 2, 5), torch.full((3, 2, 2, 1), 2.0))
    assert torch.equal(keys, torch.ones(3, 2, 2, 5)) and torch.equal(values, torch.full((3, 2, 2, 1), 2.0))
    keys, values = cache.layer(0, torch.tensor([3])).update(torch.ones(3, 2, 1, 5), torch.full((3, 2, 1, 1), 3.0))
    assert values[1, 1].flatten().tolist() == [2, 2, 0, 3] and keys[1, 1, :, 4].tolist() == [1, 1, 0, 1]
    assert KVCache(1, 1, 1, 4, 5).values[0].shape == (1, 1, 4, 5)


def test_a_tensor_position_selects_where_to_write_and_returns_all_positions():
    cache = KVCache(n_layers=2, batch_size=1, n_kv_heads=1, capacity=4, head_dim=1)
    k, position = torch.tensor([5.0]).view(1, 1, 1, 1), torch.tensor([2])
    layer = cache.layer(1, position)
    keys, values = layer.update(k, 10 * k)
    assert layer.start is position
    assert keys.flatten().tolist() == [0, 0, 5, 0] and values.flatten().tolist() == [0, 0, 50, 0]
    assert keys is cache.keys[1] and values is cache.values[1] and not cache.keys[0].any()
    assert cache.length == 0 and position.item() == 2


@torch.no_grad()
def test_cache_position_neither_reads_nor_advances_the_length():
    model, ids = tiny_gpt(), torch.randint(31, (B, 6))
    cache = model.new_cache(B)
    model(ids[:, :5], cache=cache)
    position = torch.tensor([5])
    hidden = model.hidden(ids[:, 5:], cache=cache, cache_position=position, positions=position)
    assert_close(model.logits(hidden), model(ids)[:, 5:])
    assert cache.length == 5
    cache.length = 12  # would exceed the context if it were read
    assert torch.equal(model.hidden(ids[:, 5:], cache=cache, cache_position=position, positions=position), hidden)


DECODING = [
    {"pos": "rope", "n_kv_heads": 4, "window": None, "qk_norm": False},
    {"pos": "learned", "n_kv_heads": 2, "window": 3, "qk_norm": True},
    {"pos": "none", "n_kv_heads": 1, "window": None, "qk_norm": True},
]
ALL_DECODING = [
    dict(zip(DECODING[0], values, strict=True))
    for values in product(["rope", "learned", "none"], [4, 2, 1], [None, 3], [False, True])
]


@pytest.mark.parametrize(
    "choices",
    [*DECODING, *(pytest.param(c, marks=pytest.mark.slow) for c in ALL_DECODING if c not in DECODING)],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_chunks_equal_one_full_pass(backend, choices):
    model = tiny_gpt(backend=backend, **choices)
    ids = torch.randint(31, (B, LENGTH))
    full = model(ids)
    for chunks in ([LENGTH], [5] + [1] * 6, [1] * LENGTH, [4, 7], random_chunks(LENGTH), random_chunks(LENGTH)):
        assert_close(decode(model, ids, chunks), full)


@pytest.mark.parametrize("window", [3, pytest.param(None, marks=pytest.mark.slow)])
@torch.no_grad()
def test_chunks_equal_one_full_pass_with_flex(window):
    model = tiny_gpt(backend="flex", n_kv_heads=2, n_layers=1, window=window)
    ids = torch.randint(31, (B, 6))
    logits = decode(model, ids, [5, 1])
    for block in model.blocks:
        block.attn.backend = "explicit"
    assert_close(logits, model(ids))


@pytest.mark.parametrize(
    "choices", [{"head_dim": 6}, {"mlp": "swiglu", "norm": "layernorm", "bias": True}, {"logit_softcap": 2.0}], ids=str
)
@torch.no_grad()
def test_chunks_equal_one_full_pass_for_other_parts(choices):
    model = tiny_gpt(**choices)
    ids = torch.randint(31, (B, LENGTH))
    assert_close(decode(model, ids, [4, 1, 1, 5]), model(ids))


@torch.no_grad()
def test_all_backends_fill_the_cache_with_the_same_values():
    ids = torch.randint(31, (B, LENGTH))
    model = tiny_gpt()
    caches = []
    for backend in TRAINABLE:
        for block in model.blocks:
            block.attn.backend = backend
        caches.append(model.new_cache(B))
        model(ids, cache=caches[-1])
    for cache in caches[1:]:
        assert cache.length == LENGTH
        assert_close(torch.stack(cache.keys), torch.stack(caches[0].keys))
        assert_close(torch.stack(cache.values), torch.stack(caches[0].values))


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_setting_the_length_back_forgets_positions(window):
    model = tiny_gpt(window=window)
    ids, other = torch.randint(31, (2, B, LENGTH))
    cache = model.new_cache(B)
    model(ids, cache=cache)
    cache.length = 4
    changed = torch.cat([ids[:, :4], other[:, 4:]], dim=1)
    assert_close(decode(model, changed[:, 4:], [1, 3, 3], cache), model(changed)[:, 4:])


@torch.no_grad()
def test_mask_and_gates_apply_to_cached_positions():
    model = tiny_gpt()
    ids = torch.randint(31, (B, LENGTH))
    mask = torch.rand(B, 1, 1, LENGTH) < 0.7  # padding
    gate = torch.rand(2, B, 4)
    cache = model.new_cache(B)
    first = model(ids[:, :6], cache=cache, mask=mask[..., :6], head_gate=gate)
    second = model(ids[:, 6:], cache=cache, mask=mask, head_gate=gate)
    assert_close(torch.cat([first, second], dim=1), model(ids, mask=mask, head_gate=gate))


@torch.no_grad()
def test_a_left_padded_row_equals_the_row_alone():
    model = tiny_gpt()
    short = torch.randint(31, (1, 5))
    padded = torch.cat([torch.randint(31, (1, 4)), short], dim=1)
    cache = model.new_cache(1)
    mask, positions = (torch.arange(9) >= 4)[None, None, None], (torch.arange(9) - 4).clamp(min=0)[None]
    first = model(padded[:, :7], cache=cache, mask=mask[..., :7], positions=positions[:, :7])
    second = model(padded[:, 7:], cache=cache, mask=mask, positions=positions[:, 7:])
    assert_close(torch.cat([first[:, 4:], second], dim=1), model(short))


@torch.no_grad()
def test_capacity_can_be_smaller_than_the_context():
    model = tiny_gpt()
    ids = torch.randint(31, (B, 5))
    cache = model.new_cache(B, capacity=5)
    assert cache.capacity == 5 and model.new_cache(B).capacity == 12
    assert_close(decode(model, ids, [3, 2], cache), model(ids))


@pytest.mark.parametrize("already", [0, 3])
def test_overflow_is_refused_with_all_sizes(already):
    cache = KVCache(1, 2, 4, 6, 8)
    cache.advance(already)
    k = torch.zeros(2, 4, 7 - already, 8)
    with pytest.raises(ValueError, match=f"{7 - already} positions .* holds {already} of 6 positions; create a larger"):
        cache.layer(0).update(k, k)


@torch.no_grad()
def test_overflow_is_refused_by_the_model_and_leaves_the_cache_usable():
    model = tiny_gpt()
    ids = torch.randint(31, (B, 8))
    cache = model.new_cache(B, capacity=6)
    model(ids[:, :4], cache=cache)
    with pytest.raises(ValueError, match="4 positions .* holds 4 of 6"):
        model(ids[:, 4:], cache=cache)
    assert cache.length == 4
    assert_close(model(ids[:, 4:6], cache=cache), model(ids[:, :6])[:, 4:])


def test_another_batch_size_or_number_of_heads_is_refused():
    cache = KVCache(1, 2, 4, 6, 8)
    for batch_size, n_heads in [(1, 4), (3, 4), (2, 1)]:
        k = torch.zeros(batch_size, n_heads, 1, 8)
        with pytest.raises(ValueError, match=rf"\({batch_size}, {n_heads}\) do not fit .* \(2, 4\)"):
            cache.layer(0).update(k, k)


@pytest.mark.parametrize("start", [None, torch.tensor([2])], ids=["length", "tensor"])
@pytest.mark.parametrize(
    "k, v",
    [
        ((2, 4, 1, 6), (2, 4, 1, 6)),  # D_v of the cache is 5
        ((2, 4, 1, 6), (2, 4, 1, 1)),  # would be broadcast
        ((2, 4, 1, 1), (2, 4, 1, 5)),
        ((2, 4, 1, 5), (2, 4, 1, 5)),
        ((2, 4, 3, 6), (2, 4, 1, 5)),  # fewer values than keys
        ((2, 4, 1, 6), (2, 1, 1, 5)),
        ((2, 4, 1, 6), (1, 4, 1, 5)),
    ],
)
def test_keys_and_values_of_other_sizes_are_refused_in_one_line(k, v, start):
    cache = KVCache(1, 2, 4, 6, 6, v_head_dim=5)
    with pytest.raises(ValueError, match=r"\(D, D_v\) = \(6, 5\); create the KVCache with") as error:
        cache.layer(0, start).update(torch.ones(k), torch.ones(v))
    assert str(k) in str(error.value) and str(v) in str(error.value) and "\n" not in str(error.value)
    assert not cache.keys[0].any() and not cache.values[0].any()


@pytest.mark.parametrize("start", [None, torch.tensor([2])], ids=["length", "tensor"])
def test_a_float_mask_is_refused_with_a_cache_too(start):
    attn, cache = MultiHeadAttention(32, 4), KVCache(1, 2, 4, 6, 8)
    for mask in (torch.zeros(6 if start is not None else 1), torch.ones(1, 1)):
        with pytest.raises(ValueError, match="mask must be boolean .* not torch.float32"):
            attn(torch.randn(2, 1, 32), mask=mask, cache=cache.layer(0, start))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_cache_works_under_autocast(backend):
    model = tiny_gpt(backend=backend, n_layers=1)
    ids = torch.randint(31, (B, 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(decode(model, ids, [3, 1, 2]), model(ids), roundings=4)  # both are rounded to bfloat16


@torch.no_grad()
def test_a_tensor_position_works_under_autocast():
    model, ids, position = tiny_gpt(), torch.randint(31, (B, 6)), torch.tensor([5])
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(B)  # float32, as the weights; keys and values are bfloat16
        model(ids[:, :5], cache=cache)
        hidden = model.hidden(ids[:, 5:], cache=cache, cache_position=position, positions=position)
        assert_close(model.logits(hidden), model(ids)[:, 5:], roundings=4)
