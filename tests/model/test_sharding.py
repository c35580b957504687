"""`shard_heads`: the parts of a module add up to the module, in outputs and in gradients.

B batch, T queries, S keys, H query heads, G key/value heads, C width.
"""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tril.model.attention import MultiHeadAttention
from tril.model.kv_cache import KVCache
from tril.model.rope import rope_table
from tril.model.sharding import shard_heads

B, T, S, C, H = 2, 6, 9, 24, 4
CHOICES = [
    {},
    {"n_kv_heads": 2, "qkv_bias": True, "out_bias": True, "window": 3},
    {"qk_norm": "rmsnorm", "v_head_dim": 5, "out_dim": 7, "out_bias": True},
    {"qk_norm": "layernorm", "head_dim": 10, "qkv_bias": True, "causal": False},
    {"n_kv_heads": 4, "kv_dim": 24, "v_head_dim": 1, "resid_dropout": 0.0, "out_bias": True},
]
IDS = [", ".join(f"{name}={value}" for name, value in choices.items()) or "default" for choices in CHOICES]


def make(**choices):
    return randomize(MultiHeadAttention(C, H, **choices))


def shards_of(attn, world_size):
    return [shard_heads(attn, rank, world_size) for rank in range(world_size)]


def worlds(attn):
    return [n for n in (1, 2, 4) if attn.n_kv_heads % n == 0]


def slices(tensors, rank, world_size, attn):
    """The parts of one rank of `tensors`, which belong to the parameters of `attn`; of the norms all."""

    def share(size):
        return slice(rank * size // world_size, (rank + 1) * size // world_size)

    parts = {
        "q_proj": share(attn.n_heads * attn.head_dim),
        "k_proj": share(attn.n_kv_heads * attn.head_dim),
        "v_proj": share(attn.n_kv_heads * attn.v_head_dim),
        "o_proj.weight": (slice(None), share(attn.n_heads * attn.v_head_dim)),
    }
    return {name: x[parts.get(name, parts.get(name.split(".")[0], slice(None)))] for name, x in tensors.items()}


@pytest.mark.parametrize("choices", CHOICES, ids=IDS)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_sum_over_ranks_is_the_full_output(backend, choices):
    attn, x, context = make(backend=backend, **choices), torch.randn(B, T, C), torch.randn(B, S, C)
    rope = rope_table(T, attn.head_dim)
    mask = torch.rand(B, 1, T, T) < 0.7
    for world_size in worlds(attn):
        parts = shards_of(attn, world_size)
        assert [part.n_heads for part in parts] == [H // world_size] * world_size
        for inputs, options in [((x,), {}), ((x,), {"rope": rope, "mask": mask}), ((x, context), {})]:
            total = sum(part(*inputs, **options) for part in parts)
            assert_close(total, attn(*inputs, **options))
            assert (total - attn(*inputs, **options)).abs().max() < 1e-5
        last = sum(part(x, last_only=True) for part in parts)
        assert_close(last, attn(x)[:, -1:])


@pytest.mark.parametrize("choices", CHOICES, ids=IDS)
def test_parameters_and_gradients_are_slices_of_the_full_ones(choices):
    attn, x = make(**choices), torch.randn(B, T, C, requires_grad=True)
    upstream = torch.randn(B, T, choices.get("out_dim", C))
    parameters = dict(attn.named_parameters())
    x_gradient, *gradients = torch.autograd.grad(attn(x), (x, *parameters.values()), upstream)
    gradients = dict(zip(parameters, gradients, strict=True))
    for world_size in worlds(attn):
        parts, y = shards_of(attn, world_size), x.detach().requires_grad_()
        sum(part(y) for part in parts).backward(upstream)
        assert_close(y.grad, x_gradient)
        for rank, part in enumerate(parts):
            expected, wanted = (slices(tensors, rank, world_size, attn) for tensors in (parameters, gradients))
            missing = {"o_proj.bias"} if rank and choices.get("out_bias") else set()
            assert {name for name, _ in part.named_parameters()} == set(expected) - missing
            for name, p in part.named_parameters():
                assert torch.equal(p, expected[name]), name
                if "_norm" not in name:
                    assert_close(p.grad, wanted[name])
        for name in ("q_norm", "k_norm"):  # shared by all heads: the gradients of the ranks add up
            if hasattr(getattr(attn, name), "weight"):
                assert_close(sum(getattr(part, name).weight.grad for part in parts), gradients[f"{name}.weight"])


@torch.no_grad()
def test_a_shard_of_a_shard_is_a_smaller_shard():
    attn, x = make(qkv_bias=True, out_bias=True, v_head_dim=5), torch.randn(B, T, C)
    for rank in range(4):
        twice, once = shard_heads(shard_heads(attn, rank // 2, 2), rank % 2, 2), shard_heads(attn, rank, 4)
        assert torch.equal(twice(x), once(x)) and twice.state_dict().keys() == once.state_dict().keys()


@pytest.mark.parametrize("choices", [{"n_kv_heads": 2}, {"v_head_dim": 5}, {"qk_norm": "layernorm"}], ids=str)
@torch.no_grad()
def test_without_output_projection_the_concatenation_over_ranks_is_the_full_output(choices):
    attn, x = make(out_proj=False, **choices), torch.randn(B, T, C)
    for world_size in worlds(attn):
        parts = shards_of(attn, world_size)
        assert_close(torch.cat([part(x) for part in parts], dim=-1), attn(x))
        assert all(isinstance(part.o_proj, nn.Identity) for part in parts)


@torch.no_grad()
def test_a_bias_a_mask_a_gate_and_weights_per_head_are_sliced_by_the_caller():
    attn, x = make(n_kv_heads=2), torch.randn(B, T, C)
    bias, mask, gate = torch.randn(H, T, T), torch.rand(B, H, T, T) < 0.7, torch.rand(B, H)
    full, weights = attn(x, bias=bias, mask=mask, head_gate=gate, need_weights=True)
    outputs = []
    for rank, part in enumerate(shards_of(attn, 2)):
        heads = slice(rank * H // 2, (rank + 1) * H // 2)
        options = {"bias": bias[heads], "mask": mask[:, heads], "head_gate": gate[:, heads]}
        out, of_heads = part(x, need_weights=True, **options)
        assert_close(of_heads, weights[:, heads])
        outputs.append(out)
        with pytest.raises(ValueError, match=r"bias of shape \(4, 6, 6\) does not broadcast"):
            part(x, bias=bias)
    assert_close(sum(outputs), full)


@torch.no_grad()
def test_shards_decode_with_caches_of_their_own():
    attn, x = make(n_kv_heads=2, v_head_dim=5), torch.randn(B, T, C)
    parts = shards_of(attn, 2)
    caches = [KVCache(1, B, 1, T, attn.head_dim, v_head_dim=5) for _ in parts]
    outputs = []
    for chunk in x.split([3, 1, 2], dim=1):
        outputs.append(sum(part(chunk, cache=cache.layer(0)) for part, cache in zip(parts, caches, strict=True)))
        for cache in caches:
            cache.advance(chunk.shape[1])
    assert_close(torch.cat(outputs, dim=1), attn(x))


def test_a_shard_is_a_module_of_its_size_with_copies_of_the_weights():
    attn = make(n_kv_heads=2, v_head_dim=5, out_dim=7, qkv_bias=True, out_bias=True, qk_norm=True)
    before = copy.deepcopy(attn.state_dict())
    for rank, part in enumerate(shards_of(attn, 2)):
        same = MultiHeadAttention(
            C, 2, n_kv_heads=1, head_dim=6, v_head_dim=5, out_dim=7, qkv_bias=True, out_bias=rank == 0, qk_norm=True
        )
        same.load_state_dict(part.state_dict())
        x = torch.randn(B, T, C)
        assert torch.equal(same(x), part(x)) and str(same) == str(part)
        for p in part.parameters():  # a view would keep the memory of the whole tensor
            assert p.untyped_storage().nbytes() == p.nbytes
        with torch.no_grad():
            for p in part.parameters():
                p.zero_()
    assert all(torch.equal(p, before[name]) for name, p in attn.state_dict().items())
    assert (attn.n_heads, attn.n_kv_heads) == (H, 2) and attn.o_proj.bias is not None


def test_dropout_device_dtype_mode_and_frozen_weights_are_kept():
    attn = make(attn_dropout=0.25, resid_dropout=0.5, window=2, backend="explicit").to("meta", torch.bfloat16).eval()
    attn.k_proj.requires_grad_(False)
    part = shard_heads(attn, 1, 4)
    assert not part.training and part.resid_dropout.p == 0.0 and attn.resid_dropout.p == 0.5
    assert (part.attn_dropout, part.window, part.backend, part.causal) == (0.25, 2, "explicit", True)
    assert {(p.device.type, p.dtype) for p in part.parameters()} == {("meta", torch.bfloat16)}
    assert [p.requires_grad for p in part.parameters()] == [p.requires_grad for p in attn.parameters()]


@pytest.mark.parametrize("backend", TRAINABLE)
def test_residual_dropout_is_left_to_the_caller(backend):
    """Dropping entries of each part would drop other entries of the sum, and count rank 0 only."""
    attn, x = make(resid_dropout=0.5, backend=backend), torch.randn(B, T, C)
    total = sum(part(x) for part in shards_of(attn.train(), 2))
    assert_close(total, attn.eval()(x))


@pytest.mark.parametrize(
    "choices, rank, world_size, message",
    [
        ({}, 0, 3, "world_size=3 must divide n_heads=4"),
        ({}, 0, 8, "world_size=8 must divide n_heads=4"),
        ({}, 0, 0, "world_size=0 must divide n_heads=4"),
        ({}, 0, -1, "world_size=-1 must divide n_heads=4"),
        ({"n_kv_heads": 2}, 0, 4, "world_size=4 must divide n_kv_heads=2"),
        ({"n_kv_heads": 1}, 0, 2, "world_size=2 must divide n_kv_heads=1"),
        ({}, 2, 2, "rank=2 must be from 0 to world_size - 1 = 1"),
        ({}, -1, 2, "rank=-1 must be from 0 to world_size - 1 = 1"),
    ],
)
def test_counts_that_do_not_divide_and_unknown_ranks_are_refused(choices, rank, world_size, message):
    with pytest.raises(ValueError) as error:
        shard_heads(make(**choices), rank, world_size)
    assert str(error.value) == message
