"""Sizes, shapes and claims of "Attention Is All You Need" (Vaswani et al. 2017) and "The Annotated Transformer" (2018).

The code of the second is at https://github.com/harvardnlp/annotated-transformer.

B batch, T queries, S keys, H heads, D size of queries and keys (d_k), D_v size of values (d_v), C width (d_model).
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tril.model.attention import MultiHeadAttention, attention
from tril.model.masks import causal_mask, padding_mask

C, H, D = 512, 8, 64  # the base model


def n_parameters(attn: nn.Module) -> int:
    return sum(p.numel() for p in attn.parameters())


def flops(attn: MultiHeadAttention, n: int) -> int:
    """Of a forward pass on n tokens, counted from the matrix products. "meta" tensors have shapes only."""
    x = torch.empty(1, n, attn.q_proj.in_features, device="meta")
    with FlopCounterMode(display=False) as counter:
        attn.to("meta")(x)
    return counter.get_total_flops()


# --- section 3.2.1: scaled dot-product attention


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_queries_are_packed_into_a_matrix(backend):
    """Q is (T, D): each row of the result is that of its query alone, for 2, 3 and 4 dimensions."""
    q, k, v = torch.randn(4, D), torch.randn(7, D), torch.randn(7, D)
    out = attention(q, k, v, backend=backend)
    assert out.shape == (4, D)
    for i in range(4):
        assert_close(attention(q[i : i + 1], k, v, backend=backend)[0], out[i])
    for dims in ((None,), (None, None)):
        assert torch.equal(attention(q[dims], k[dims], v[dims], backend=backend).flatten(0, -2), out)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("d_v", [16, 64, 128])
def test_values_have_a_size_of_their_own(d_v, backend):
    """Queries and keys of dimension d_k, values of dimension d_v. The Annotated Transformer assumes d_v = d_k."""
    q, k, v = torch.randn(2, 3, 5, D), torch.randn(2, 3, 7, D), torch.randn(2, 3, 7, d_v)
    out = attention(q, k, v, backend=backend)
    assert out.shape == (2, 3, 5, d_v)
    assert_close(out, (q @ k.mT / 8).softmax(-1) @ v)


def test_the_output_is_a_weighted_sum_of_the_values():
    q, k, v = torch.randn(3, 2, H, 6, D)
    out, weights = attention(q, k, v, causal=True, need_weights=True)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(2, H, 6))
    assert torch.equal(out, weights @ v)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_without_the_scaling_gradients_are_small(backend):
    """Products of d = 512 numbers have standard deviation 22.6, so softmax selects one key and its slope vanishes."""
    q, k = torch.randn(512, C), torch.randn(64, C)
    values = torch.eye(64, C)  # the first 64 outputs are the weights

    def slope(factor: float) -> float:
        """Median over the queries of the gradient of the largest weight with respect to the scores."""
        bias = torch.zeros(512, 64, requires_grad=True)  # added to the scores, so its gradient is theirs
        weights = attention(q * factor, k, values, bias=bias, backend=backend)[:, :64]
        weights.amax(-1).sum().backward()
        assert bias.grad is not None
        return bias.grad.norm(dim=-1).median().item()

    assert slope(math.sqrt(C)) < 0.15 * slope(1.0)


# --- section 3.2.2: multi-head attention


def test_projections_of_the_base_model():
    """W_i^Q, W_i^K and W_i^V are (512, 64), W^O is (512, 512): eight heads of d_k = d_v = 512 / 8 = 64."""
    attn = MultiHeadAttention(C, H)
    assert (attn.head_dim, attn.v_head_dim) == (64, 64)
    for layer in (attn.q_proj, attn.k_proj, attn.v_proj):
        assert layer.weight.view(H, D, C).mT.shape == (8, 512, 64)  # nn.Linear stores the transposed matrix
    assert attn.o_proj.weight.shape == (512, 512)


@pytest.mark.parametrize("n_heads, d_k", [(1, 512), (4, 128), (8, 64), (16, 32), (32, 16)])
def test_heads_share_the_cost_of_one_full_head(n_heads, d_k):
    """Table 3 (A): more heads of a smaller size have the same parameters and the same number of multiplications."""
    attn = MultiHeadAttention(C, n_heads, backend="explicit")
    assert attn.head_dim == d_k
    assert n_parameters(attn) == 4 * C * C
    assert flops(attn, 100) == 2 * 100 * (4 * C * C) + 2 * 2 * 100 * 100 * C


@pytest.mark.parametrize("d_k, millions", [(16, 58), (32, 60)])
def test_smaller_keys_save_the_published_number_of_parameters(d_k, millions):
    """Table 3 (B): d_k alone shrinks and d_v stays 64. The base model has 65 million parameters in 18 attentions."""
    base, small = MultiHeadAttention(C, H), MultiHeadAttention(C, H, head_dim=d_k, v_head_dim=64)
    assert small(torch.randn(1, 3, C)).shape == (1, 3, C)
    n_attentions = 6 + 2 * 6  # one per encoder layer, two per decoder layer
    saved = n_attentions * (n_parameters(base) - n_parameters(small))
    assert round(65 - saved / 1e6) == millions


def test_the_big_model_has_heads_of_the_same_size():
    attn = MultiHeadAttention(1024, 16)
    assert (attn.head_dim, attn.v_head_dim) == (64, 64)


# --- section 4: cost of a layer


def test_cost_grows_with_the_square_of_the_length():
    """Table 1: n^2 d multiplications per layer for the scores, and as many for the sum; the projections take n d^2."""
    attn = MultiHeadAttention(C, H, backend="explicit")
    for n in (50, 100, 200):
        assert flops(attn, n) - 2 * n * n_parameters(attn) == 2 * (2 * n * n * C)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_any_two_positions_are_one_step_apart(backend):
    """Table 1: maximum path length 1. A window of r keys needs n / r layers."""
    x = torch.randn(1, 9, 32, requires_grad=True)

    def sources(*layers: MultiHeadAttention) -> list[bool]:
        h = x
        for layer in layers:
            h = layer(h)
        (gradient,) = torch.autograd.grad(h[0, -1].sum(), x)
        return gradient[0].abs().amax(-1).gt(0).tolist()

    assert sources(MultiHeadAttention(32, 4, backend=backend)) == [True] * 9
    restricted = [MultiHeadAttention(32, 4, window=3, backend=backend) for _ in range(4)]
    for n_layers in range(1, 5):
        assert sources(*restricted[:n_layers]).count(True) == 2 * n_layers + 1  # the position itself, and 2 per layer


# --- The Annotated Transformer: masks


def test_the_subsequent_mask_of_twenty():
    """(1, 20, 20), the ones above the diagonal compared with 0."""
    above = torch.ones(1, 20, 20).triu(1).to(torch.uint8)
    assert torch.equal(causal_mask(20, 20)[None], above == 0)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_one_mask_for_all_heads(backend):
    """A mask (B, T, S) gets a dimension of 1 for the heads; here padding (token 2) and the future in one mask."""
    tokens = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 2, 2]])
    mask = (tokens != 2)[:, None] & causal_mask(5, 5)  # (B, 1, T) & (T, T) -> (B, T, T)
    assert mask.shape == (2, 5, 5)
    x = torch.randn(2, 5, 32)
    attn = MultiHeadAttention(32, 4, causal=False, backend=backend)
    out, weights = attn(x, mask=mask[:, None], need_weights=True)
    assert (weights != 0).eq(mask[:, None]).all()
    assert torch.equal(attn(x, mask=mask[:, None].int()), attn(x, mask=mask[:, None]))
    causal = MultiHeadAttention(32, 4, backend=backend)
    causal.load_state_dict(attn.state_dict())
    assert_close(causal(x, mask=padding_mask(tokens != 2)), out)


@torch.no_grad()
def test_a_mask_of_ones_hides_nothing():
    """src_mask = torch.ones(1, 1, 10), as integers: 0 = masked."""
    x = torch.randn(1, 10, C)
    attn = MultiHeadAttention(C, H, causal=False)
    assert_close(attn(x, mask=torch.ones(1, 1, 10).int()), attn(x))


# --- The Annotated Transformer: the module


def test_four_linears_with_biases():
    assert n_parameters(MultiHeadAttention(C, H, qkv_bias=True, out_bias=True)) == 4 * (512 * 512 + 512)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_weights_returned_are_those_after_dropout(p):
    """attention(query, key, value, mask, dropout) returns the output and p_attn, and output = p_attn @ value."""
    q, k, v = torch.randn(3, 2, H, 6, D)
    out, weights = attention(q, k, v, mask=causal_mask(6, 6), dropout_p=p, need_weights=True)
    assert torch.equal(out, weights @ v)
    kept = weights[weights != 0]
    assert kept.numel() < 2 * H * 21 if p else kept.numel() == 2 * H * 21  # 21 visible pairs
    _, exact = attention(q, k, v, mask=causal_mask(6, 6), need_weights=True)
    assert_close(kept, exact[weights != 0] / (1 - p))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_one_two_or_three_arguments(backend):
    """self_attn(x, x, x), src_attn(x, memory, memory), and three independent inputs, as torch.nn.MultiheadAttention."""
    attn = randomize(MultiHeadAttention(32, 4, backend=backend))
    reference = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    weights = [layer.weight for layer in (attn.q_proj, attn.k_proj, attn.v_proj)]
    reference.in_proj_weight.copy_(torch.cat(weights))
    reference.out_proj.weight.copy_(attn.o_proj.weight)
    x, memory, values = torch.randn(2, 5, 32), torch.randn(2, 7, 32), torch.randn(2, 7, 32)

    def expected(query, key, value, hidden=None):
        return reference(query, key, value, attn_mask=hidden, need_weights=False)[0]

    future = ~causal_mask(5, 5)  # in torch's mask True means masked
    assert_close(attn(x), expected(x, x, x, future))
    assert_close(attn(x, x, x), expected(x, x, x, future))
    assert_close(attn(x, memory), expected(x, memory, memory))
    assert_close(attn(x, memory, memory), expected(x, memory, memory))
    assert_close(attn(x, memory, values), expected(x, memory, values))
