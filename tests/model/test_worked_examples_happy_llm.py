"""Examples of happy-llm, chapter 2 (https://github.com/datawhalechina/happy-llm), and of public notes on it.

B batch, T queries, S keys, H heads, D head size, C width.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import BACKENDS_SLOW_FLEX, assert_close
from tests.model.printed import assert_prints_as
from tril.model import attention as attention_module
from tril.model.attention import MultiHeadAttention, attention
from tril.model.masks import causal_mask


def heads_of(monkeypatch, attn: MultiHeadAttention, *inputs: Tensor) -> dict[str, Tensor]:
    """q, k, v, the scores' weights and the head outputs inside the module."""
    parts = {}

    def recording(q, k, v, **choices):
        out, weights = attention(q, k, v, **choices)
        parts.update(q=q, k=k, v=v, weights=weights, heads=out)
        return out, weights

    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "attention", recording)
        parts["out"], _ = attn(*inputs, need_weights=True)
    return parts


# --- a query, keys and values


def test_a_lookup_is_a_weighted_sum():
    """ "fruit" takes 0.6 of apple = 10, 0.4 of banana = 5 and nothing of chair = 2: 8."""
    scores = torch.tensor([[0.6, 0.4, 0.0]]).log()  # log 0 is -inf, which hides the chair
    values = torch.tensor([[10.0], [5.0], [2.0]])
    out, weights = attention(torch.zeros(1, 1), torch.zeros(3, 1), values, bias=scores, need_weights=True)
    assert_prints_as(weights, [[0.6, 0.4, 0.0]])
    assert_prints_as(out, [[8.0]])


def test_rows_of_weights_mix_the_values_of_four_words():
    """The third of four words takes 0.3, 0.4, 0.2 and 0.1 of the words; every row sums to 1."""
    rows = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1], [0.3, 0.4, 0.2, 0.1], [0.4, 0.1, 0.2, 0.3]])
    words = torch.randn(1, 4, 64)
    zero = torch.zeros(1, 4, 64)
    out, weights = attention(zero, zero, words, bias=rows.log(), need_weights=True)
    assert_prints_as(weights[0], rows.tolist())
    assert_close(out[0, 2], 0.3 * words[0, 0] + 0.4 * words[0, 1] + 0.2 * words[0, 2] + 0.1 * words[0, 3])


@pytest.mark.parametrize("dims", [(), (3,), (3, 4)])
def test_the_function_returns_output_and_weights(dims):
    """attention(query, key, value, dropout): (.., T, d_k), (.., S, d_k), (.., S, d_v) -> (.., T, d_v), (.., T, S)."""
    q, k, v = torch.randn(*dims, 5, 8), torch.randn(*dims, 7, 8), torch.randn(*dims, 7, 6)
    out, weights = attention(q, k, v, need_weights=True)
    assert out.shape == (*dims, 5, 6) and weights.shape == (*dims, 5, 7)
    assert_close(weights, (q @ k.mT / math.sqrt(8)).softmax(-1))
    assert_close(out, weights @ v)


def test_self_attention_takes_one_tensor_three_times():
    x = torch.randn(2, 5, 8)
    assert_close(attention(x, x, x), (x @ x.mT / math.sqrt(8)).softmax(-1) @ x)


# --- masks


@pytest.mark.parametrize("shape", [(1, 6, 6), (1, 1, 6, 6), (6, 6)])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_minus_infinity_above_the_diagonal_is_causal(backend, shape):
    """torch.full((1, T, T), -inf).triu(1), added to the scores."""
    q, k, v = torch.randn(3, 2, 3, 6, 8)
    bias = torch.full(shape, -torch.inf).triu(1)
    out = attention(q, k, v, bias=bias, backend=backend)
    assert_close(out, attention(q, k, v, causal=True, backend=backend))
    assert torch.equal(out[:, :, 0], v[:, :, 0])  # the first query sees its own value alone


@pytest.mark.parametrize("n", [1, 4, 10])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_a_buffer_of_the_largest_length_is_cut(backend, n):
    """(1, 1, max, max)[:, :, :T, :T], registered once for the longest text."""
    buffer = torch.full((1, 1, 10, 10), -torch.inf).triu(1)
    x = torch.randn(2, n, 24)
    everything = MultiHeadAttention(24, 4, causal=False, backend=backend)
    causal = MultiHeadAttention(24, 4, backend=backend)
    causal.load_state_dict(everything.state_dict())
    assert_close(everything(x, bias=buffer[:, :, :n, :n]), causal(x))


def test_the_mask_of_a_sentence_between_bos_and_eos():
    inf = math.inf
    expected = [
        # BOS I  like  you  EOS   <- keys; each row is a query
        [0, -inf, -inf, -inf, -inf],  # BOS
        [0, 0, -inf, -inf, -inf],  # I
        [0, 0, 0, -inf, -inf],  # like
        [0, 0, 0, 0, -inf],  # you
        [0, 0, 0, 0, 0],  # EOS
    ]
    added = torch.tensor(expected)
    assert torch.equal(added == 0, causal_mask(5, 5))
    x = torch.randn(5, 8)
    assert_close(attention(x, x, x, bias=added), attention(x, x, x, causal=True))


# --- heads


@torch.no_grad()
def test_concatenated_matrices_give_concatenated_results():
    """x (2, 3, 4) times two matrices (4, 2) side by side; twenty-four small matrices become three wide ones."""
    x, first, second = torch.randn(2, 3, 4), torch.randn(4, 2), torch.randn(4, 2)
    q_proj = MultiHeadAttention(4, 2).q_proj
    q_proj.weight.copy_(torch.cat([first, second], dim=1).T)
    assert_close(q_proj(x), torch.cat([x @ first, x @ second], dim=-1))
    layers = [m for m in MultiHeadAttention(512, 8).children() if isinstance(m, nn.Linear)]
    assert len(layers) == 4 and all(layer.bias is None for layer in layers)


@torch.no_grad()
def test_numbers_0_to_23_in_four_heads(monkeypatch):
    """(1, 3, 8) -> (1, 3, 4, 2) -> (1, 4, 3, 2): a word's row is cut into heads, and then the heads come first."""
    attn = MultiHeadAttention(8, 4, out_proj=False)
    attn.v_proj.weight.copy_(torch.eye(8))
    parts = heads_of(monkeypatch, attn, torch.arange(24.0).view(1, 3, 8))
    assert parts["v"][0].tolist() == [
        [[0, 1], [8, 9], [16, 17]],
        [[2, 3], [10, 11], [18, 19]],
        [[4, 5], [12, 13], [20, 21]],
        [[6, 7], [14, 15], [22, 23]],
    ]
    assert parts["out"][0, 0].tolist() == list(range(8))  # the first word sees itself; its heads are joined again


@pytest.mark.parametrize("batch, length", [(10, 6), (4, 8), (10, 60), (2, 3)])
@torch.no_grad()
def test_shapes_inside_the_module(monkeypatch, batch, length):
    """Width 512, 8 heads. One of the texts prints (10, 8, 512) for the joined heads; it is (10, 6, 512)."""
    x = torch.randn(batch, length, 512)
    attn = MultiHeadAttention(512, 8)
    assert attn.q_proj(x).shape == (batch, length, 512)
    parts = heads_of(monkeypatch, attn, x)
    assert all(parts[name].shape == (batch, 8, length, 64) for name in ("q", "k", "v", "heads"))
    assert parts["weights"].shape == (batch, 8, length, length)
    assert parts["heads"].transpose(1, 2).flatten(2).shape == parts["out"].shape == (batch, length, 512)


@torch.no_grad()
def test_sizes_that_must_be_equal(monkeypatch):
    """D_q = D_k and L_k = L_v; the number of queries and D_v are free."""
    attn = MultiHeadAttention(24, 4, head_dim=5, v_head_dim=7, kv_dim=16, out_dim=9)
    parts = heads_of(monkeypatch, attn, torch.randn(2, 6, 24), torch.randn(2, 8, 16), torch.randn(2, 8, 16))
    assert parts["q"].shape == (2, 4, 6, 5) and parts["k"].shape == (2, 4, 8, 5)
    assert parts["v"].shape == (2, 4, 8, 7) and parts["heads"].shape == (2, 4, 6, 7)
    assert parts["weights"].shape == (2, 4, 6, 8) and parts["out"].shape == (2, 6, 9)
    with pytest.raises(ValueError, match="must be"):
        attention(torch.randn(6, 5), torch.randn(8, 4), torch.randn(8, 4))
    with pytest.raises(ValueError, match="must be"):
        attention(torch.randn(6, 5), torch.randn(8, 5), torch.randn(7, 5))


@torch.no_grad()
def test_dropout_of_weights_and_of_the_output():
    """attn_dropout and resid_dropout: both in training mode only."""
    x = torch.randn(1, 40, 32)
    for choices in ({"attn_dropout": 0.5}, {"resid_dropout": 0.5}):
        attn = MultiHeadAttention(32, 4, **choices)
        exact = attn.eval()(x)
        assert torch.equal(attn(x), exact)
        assert not torch.equal(attn.train()(x), exact)
        if "resid_dropout" in choices:
            out = attn(x)
            assert_close(out[out != 0], 2 * exact[out != 0])
