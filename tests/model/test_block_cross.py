"""A block with cross-attention against torch's decoder layer, with padding, a cache, and what it refuses.

B batch, T queries, S positions of the context, C width.
"""

import pytest
import torch
from torch import nn

from tests.conftest import TRAINABLE, assert_close, randomize
from tril.model.gpt import Block, GPTConfig
from tril.model.kv_cache import KVCache
from tril.model.masks import causal_mask, padding_mask
from tril.model.rope import rope_table

B, T, S, C, H, HIDDEN = 2, 6, 9, 24, 4, 40
TORCHS = {"norm": "layernorm", "bias": True, "mlp": "relu", "mlp_hidden": HIDDEN, "pos": "none", "qk_norm": "none"}
PADDING = torch.arange(S) < torch.tensor([[5], [8]])  # (B, S), True = a token


def make_block(**choices) -> Block:
    return randomize(Block(GPTConfig(**{"vocab_size": 1, "dim": C, "n_heads": H} | choices), cross=True)).eval()


def torchs_layer(block: Block) -> nn.TransformerDecoderLayer:
    """torch's layer with the weights of the block."""
    options = {"dim_feedforward": HIDDEN, "dropout": 0.0, "activation": "relu", "batch_first": True}
    layer = nn.TransformerDecoderLayer(C, H, norm_first=True, **options)
    mine = block.state_dict()
    state = {}
    for torchs, own in (("self_attn", "attn"), ("multihead_attn", "cross_attn")):
        for kind in ("weight", "bias"):
            state[f"{torchs}.in_proj_{kind}"] = torch.cat([mine[f"{own}.{part}_proj.{kind}"] for part in "qkv"])
            state[f"{torchs}.out_proj.{kind}"] = mine[f"{own}.o_proj.{kind}"]
    names = {"norm1": "norm1", "norm2": "norm_cross", "norm3": "norm2", "linear1": "mlp.up", "linear2": "mlp.down"}
    for torchs, own in names.items():
        state |= {f"{torchs}.{kind}": mine[f"{own}.{kind}"] for kind in ("weight", "bias")}
    layer.load_state_dict(state)
    return layer.eval()


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("padded", [False, True])
def test_the_block_equals_torchs_decoder_layer_with_its_gradients(padded, backend):
    block = make_block(**TORCHS, backend=backend)
    layer, gradient = torchs_layer(block), torch.randn(B, T, C)
    inputs = [torch.randn(B, n, C, requires_grad=True) for n in (T, S)]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    out = block(inputs[0], context=inputs[1], context_mask=padding_mask(PADDING) if padded else None)
    hidden = {"memory_key_padding_mask": ~PADDING if padded else None}  # torch's True = masked
    expected = layer(*copies, tgt_mask=~causal_mask(T, T), **hidden)
    assert (out - expected).abs().max() <= 1e-5
    out.backward(gradient), expected.backward(gradient)
    for actual, reference in zip(inputs, copies, strict=True):
        assert_close(actual.grad, reference.grad)
    assert (inputs[1].grad[~PADDING] == 0).all() == padded
    mine = {name: p.grad for name, p in block.named_parameters()}
    state = {name: p.grad for name, p in layer.named_parameters()}
    for kind in ("weight", "bias"):
        for torchs, own in (("self_attn", "attn"), ("multihead_attn", "cross_attn")):
            merged = torch.cat([mine[f"{own}.{part}_proj.{kind}"] for part in "qkv"])
            assert_close(merged, state[f"{torchs}.in_proj_{kind}"])
            assert_close(mine[f"{own}.o_proj.{kind}"], state[f"{torchs}.out_proj.{kind}"])
        assert_close(mine[f"norm_cross.{kind}"], state[f"norm2.{kind}"])
        assert_close(mine[f"mlp.down.{kind}"], state[f"linear2.{kind}"])


@torch.no_grad()
def test_a_mask_of_the_decoder_hides_its_padding_in_self_attention_only():
    block, x, context = make_block(**TORCHS), torch.randn(B, T, C), torch.randn(B, S, C)
    tokens = torch.arange(T) < torch.tensor([[4], [6]])  # (B, T)
    out = block(x, context=context, mask=padding_mask(tokens))
    hidden = {"tgt_mask": ~causal_mask(T, T), "tgt_key_padding_mask": ~tokens}
    assert_close(out, torchs_layer(block)(x, context, **hidden))


def attend(attn, x, context):
    """Cross-attention as formulas, one head after another."""
    q, k, v = attn.q_norm(attn.q_proj(x).unflatten(-1, (H, -1))), attn.k_proj(context), attn.v_proj(context)
    k, v = attn.k_norm(k.unflatten(-1, (2, -1))), v.unflatten(-1, (2, -1))  # two groups
    heads = []
    for h in range(H):
        weights = (q[:, :, h] @ k[:, :, h // 2].mT / q.shape[-1] ** 0.5).softmax(-1)  # (B, T, S)
        heads.append(weights @ v[:, :, h // 2])
    return attn.o_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("choices", [{}, {"window": 2}, {"causal": False}, {"mlp": "none"}], ids=str)
@torch.no_grad()
def test_the_context_is_all_visible_and_not_rotated(choices):
    """With grouped heads and q/k norm; window and causal restrict self-attention only."""
    block, x, context = make_block(n_kv_heads=2, **choices), torch.randn(B, T, C), torch.randn(B, S, C)
    rope = rope_table(T, C // H)
    y = x + block.attn(block.norm1(x), rope=rope)
    y = y + attend(block.cross_attn, block.norm_cross(y), context)
    y = y if block.mlp is None else y + block.mlp(block.norm2(y))
    assert_close(block(x, context=context, rope=rope), y)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("shape", [(T, S), (B, 1, T, S), (B, 1, 1, S), (S,)], ids=str)
@torch.no_grad()
def test_a_context_mask_of_any_shape_with_a_cache_and_for_the_last_position(shape, last_only):
    block, x, context = make_block(n_kv_heads=2), torch.randn(B, T, C), torch.randn(B, S, C)
    mask = (torch.rand(shape) < 0.5) | (torch.arange(S) == 0)
    rope = rope_table(T, C // H)
    whole = block(x, context=context, context_mask=mask, rope=rope)
    assert (whole - block(x, context=context, rope=rope)).abs().max() > 0.01
    if last_only:
        assert_close(block(x, context=context, context_mask=mask, rope=rope, last_only=True), whole[:, -1:])
        return
    cache, parts = KVCache(1, B, 2, T, C // H), []
    for start, end in ((0, 3), (3, 4), (4, 6)):
        by_query = len(shape) > 1 and shape[-2] == T
        part = {"context_mask": mask[..., start:end, :] if by_query else mask}
        part |= {"rope": tuple(table[start:end] for table in rope), "cache": cache.layer(0)}
        parts.append(block(x[:, start:end], context=context, **part))
        cache.advance(end - start)
    assert_close(torch.cat(parts, dim=1), whole)


@torch.no_grad()
def test_a_context_without_a_visible_position_adds_only_the_bias_of_the_output():
    block, x, context = make_block(**TORCHS), torch.randn(B, T, C), torch.randn(B, S, C)
    mask = padding_mask(torch.tensor([[0] * S, [1] * S]))
    y = x + block.attn(block.norm1(x))
    y = y + block.cross_attn.o_proj.bias
    y = y + block.mlp(block.norm2(y))
    assert_close(block(x, context=context, context_mask=mask)[0], y[0])


def test_a_context_and_cross_need_each_other():
    config, x, context = GPTConfig(1, dim=C, n_heads=H), torch.randn(B, T, C), torch.randn(B, S, C)
    message = r"context and Block\(config, cross=True\) need each other, and context_mask needs both"
    with pytest.raises(ValueError, match=message):
        Block(config)(x, context=context)
    with pytest.raises(ValueError, match=message):
        Block(config, cross=True)(x)
    with pytest.raises(ValueError, match=message):
        Block(config)(x, context_mask=torch.ones(T, S, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"cross=True needs heads, .* \(n_heads=0\); set n_heads"):
        Block(GPTConfig(1, dim=C, n_heads=0), cross=True)


def test_a_block_of_the_gpt_has_no_cross_attention():
    block = Block(GPTConfig(1, dim=C, n_heads=H))
    assert block.cross_attn is None and block.norm_cross is None
    assert not any("cross" in name for name in block.state_dict())
