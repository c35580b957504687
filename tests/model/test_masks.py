"""Masks as literal arrays, and the effect of padding and prefixes on a model.

B batch, T queries, S keys, H heads, C width, V vocabulary.
"""

import math

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize, tiny_gpt
from tril.model.attention import MultiHeadAttention, attention, attention_weights
from tril.model.masks import (
    Masking,
    causal_mask,
    check_masking,
    document_mask,
    padding_mask,
    prefix_mask,
    split_documents,
)

V = 31


def pattern(*rows: str) -> torch.Tensor:
    """'x' may attend, '.' may not; one string per query."""
    return torch.tensor([[character == "x" for character in row] for row in rows])


@pytest.mark.parametrize(
    "n_queries, n_keys, window, expected",
    [
        (3, 3, None, pattern("x..", "xx.", "xxx")),
        (2, 4, None, pattern("xxx.", "xxxx")),
        (4, 2, None, pattern("..", "..", "x.", "xx")),
        (1, 4, None, pattern("xxxx")),
        (1, 1, None, pattern("x")),
        (3, 1, None, pattern(".", ".", "x")),
        (4, 4, 1, pattern("x...", ".x..", "..x.", "...x")),
        (4, 4, 2, pattern("x...", "xx..", ".xx.", "..xx")),
        (3, 3, 3, pattern("x..", "xx.", "xxx")),
        (3, 3, 99, pattern("x..", "xx.", "xxx")),
        (2, 5, 3, pattern(".xxx.", "..xxx")),
        (1, 5, 2, pattern("...xx")),
        (4, 2, 1, pattern("..", "..", "x.", ".x")),
    ],
)
def test_causal_mask_is_the_literal_array(n_queries, n_keys, window, expected):
    mask = causal_mask(n_queries, n_keys, window=window)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(
    "n_queries, n_keys, prefix, expected",
    [
        (4, 4, 0, pattern("x...", "xx..", "xxx.", "xxxx")),
        (4, 4, 1, pattern("x...", "xx..", "xxx.", "xxxx")),
        (4, 4, 2, pattern("xx..", "xx..", "xxx.", "xxxx")),
        (4, 4, 4, pattern("xxxx", "xxxx", "xxxx", "xxxx")),
        (2, 2, 99, pattern("xx", "xx")),
        (2, 4, 4, pattern("xxxx", "xxxx")),
        (3, 4, 3, pattern("xxx.", "xxx.", "xxxx")),
        (4, 2, 2, pattern("..", "..", "xx", "xx")),
    ],
)
def test_prefix_mask_is_the_literal_array(n_queries, n_keys, prefix, expected):
    mask = prefix_mask(n_queries, n_keys, prefix)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)
    rows = prefix_mask(n_queries, n_keys, torch.tensor([prefix, 0]))
    assert torch.equal(rows, torch.stack([expected, causal_mask(n_queries, n_keys)])[:, None])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_padding_mask_is_the_literal_array(dtype):
    visible = pattern("..xx", "xxx.", "....")
    mask = padding_mask(visible.to(dtype))
    assert mask.dtype == torch.bool and mask.shape == (3, 1, 1, 4)
    assert torch.equal(mask[:, 0, 0], visible)


def test_documents_are_the_literal_arrays():
    ids = torch.tensor([[5, 7, 0, 8, 9, 0, 0, 4], [0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])
    documents, positions = split_documents(ids, 0)
    assert documents.dtype == positions.dtype == torch.int64
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3], [1] * 8, [0] * 7 + [1]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1], list(range(8)), [*range(7), 0]]
    mask = document_mask(documents[:1, 1:7])
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 6, 6)
    assert torch.equal(mask[0, 0], pattern("x.....", ".xxx..", ".xxx..", ".xxx..", "....x.", ".....x"))


def test_mask_of_a_chunk_is_the_end_of_the_whole_mask():
    for mask in (lambda n: causal_mask(n, 9, window=4), lambda n: prefix_mask(n, 9, 5)):
        for n_queries in range(1, 10):
            assert torch.equal(mask(n_queries), mask(9)[-n_queries:])


@pytest.mark.parametrize("window", [0, -3])
def test_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=f"window={window} must be at least 1"):
        causal_mask(3, 3, window=window)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: prefix_mask(3, 3, -1), "prefix_length=-1 must be at least 0"),
        (lambda: prefix_mask(3, 3, 1.5), r"prefix_length of shape \(\) and torch.float32 must be an integer"),
        (lambda: prefix_mask(3, 3, torch.ones(2, 1).long()), r"prefix_length of shape \(2, 1\)"),
        (lambda: padding_mask(torch.ones(3).long()), r"padding of shape \(3,\) must be \(B, S\)"),
        (lambda: padding_mask(torch.ones(2, 3)), r"torch.float32.*mask.bool\(\)"),
    ],
)
def test_wrong_arguments_of_masks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masks_are_created_on_the_given_device():
    assert causal_mask(3, 3, device="meta").device.type == "meta"
    assert prefix_mask(3, 3, 2, device="meta").device.type == "meta"
    assert prefix_mask(3, 3, torch.ones(2, dtype=torch.int64, device="meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (5, 1), (3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 5, 7)])
def test_broadcastable_masks_are_accepted(shape, dtype):
    check_masking(Masking(torch.ones(shape, dtype=dtype), None, False, None), (2, 3, 5, 7))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7), (2, 5, 7), (3, 1, 5, 7), (1, 2, 3, 5, 7)])
def test_masks_that_do_not_broadcast_are_refused(shape):
    with pytest.raises(ValueError) as error:
        check_masking(Masking(torch.ones(shape, dtype=torch.bool), None, False, None), (2, 3, 5, 7))
    assert str(shape) in str(error.value) and "(2, 3, 5, 7)" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_zero_masks_as_in_masked_fill(backend, dtype):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = (torch.rand(2, 1, 5, 5) < 0.6).to(dtype)
    mask[:, :, 0] = 1
    mask[1, 0, 3] = 0  # fully masked
    weights = (q @ k.mT / math.sqrt(8)).masked_fill(mask == 0, -math.inf).softmax(-1).nan_to_num(0.0)  # (B, H, T, S)
    assert_close(attention(q, k, v, mask=mask, backend=backend), weights @ v)
    assert_close(attention_weights(q, k, mask), weights)

    attn, x = randomize(MultiHeadAttention(32, 4, backend=backend)), torch.randn(2, 5, 32)
    integers, booleans = attn(x, mask=mask, need_weights=True), attn(x, mask=mask != 0, need_weights=True)
    assert torch.equal(integers[0], booleans[0]) and torch.equal(integers[1], booleans[1])


@pytest.mark.parametrize(
    "mask, message", [(torch.ones(5, 5), "torch.float32"), (torch.ones(5, 4).bool(), r"\(5, 4\) does not broadcast")]
)
def test_attention_weights_refuses_the_masks_that_attention_refuses(mask, message):
    q, k = torch.randn(2, 1, 2, 5, 8)
    with pytest.raises(ValueError, match=message):
        attention_weights(q, k, mask)


@pytest.mark.parametrize("pos", ["learned", "rope"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(backend, causal, pos):
    model = tiny_gpt(backend=backend, causal=causal, pos=pos)
    ids, visible = torch.randint(V, (3, 8)), pattern("...xxxxx", "xxxxxx..", "xxxxxxxx")
    positions = (visible.cumsum(1) - 1).clamp(min=0)  # a left-padded row starts at position 0
    logits = model(ids, mask=padding_mask(visible), positions=positions)
    for row in range(3):
        assert_close(logits[row, visible[row]], model(ids[row : row + 1, visible[row]])[0])


@pytest.mark.parametrize("backend", TRAINABLE)
def test_the_receptive_field_of_prefix_positions(backend):
    """By gradients. Two layers with a prefix mask have the same receptive field as one."""
    model, ids = tiny_gpt(causal=False, backend=backend), torch.randint(V, (2, 5))
    embeddings = model.embed(ids).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: embeddings)
    logits = model(ids, mask=prefix_mask(5, 5, torch.tensor([3, 1])))
    gradients = [
        torch.autograd.grad((logits[:, t] * torch.randn(V)).sum(), embeddings, retain_graph=True)[0] for t in range(5)
    ]
    depends = torch.stack(gradients, dim=1).abs().amax(-1) != 0  # (B, T, S)
    assert torch.equal(depends[0], pattern("xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"))
    assert torch.equal(depends[1], pattern("x....", "xx...", "xxx..", "xxxx.", "xxxxx"))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_an_empty_prefix_is_causal_and_a_full_one_is_not(backend):
    full, causal = tiny_gpt(causal=False, backend=backend), tiny_gpt(backend=backend)
    causal.load_state_dict(full.state_dict())
    ids = torch.randint(V, (2, 8))
    assert_close(full(ids, mask=prefix_mask(8, 8, torch.tensor([0, 8]))), torch.stack([causal(ids)[0], full(ids)[1]]))
    explicit = tiny_gpt(causal=False, backend="explicit")
    explicit.load_state_dict(full.state_dict())
    assert_close(full(ids, mask=prefix_mask(8, 8, 5)), explicit(ids, mask=prefix_mask(8, 8, 5)))


@pytest.mark.parametrize("causal, make", [
    (True, lambda: padding_mask(pattern("xxxxx", "....."))),
    (False, lambda: padding_mask(pattern("xxxxx", "....."))),
    (True, lambda: padding_mask(pattern("xxxxx", "..xxx"))),
    (True, lambda: document_mask(torch.tensor([[0, 0, 1, 1, 1]] * 2)) & padding_mask(pattern("xxxxx", "xx..x"))),
    (False, lambda: prefix_mask(5, 5, torch.tensor([3, 2])) & padding_mask(pattern("xxxxx", "..xxx"))),
])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_fully_masked_rows_are_zeros_with_finite_gradients(backend, causal, make):
    mask, attn, x = make(), randomize(MultiHeadAttention(32, 4, causal=causal, backend=backend)), torch.randn(2, 5, 32)
    fully_masked = ~(mask & (causal_mask(5, 5) if causal else True)).any(-1).expand(2, 1, 5)[:, 0]  # (B, T)
    assert not fully_masked[0].any() and fully_masked[1].any()
    with torch.no_grad():
        out = attn(x, mask=mask)
        assert torch.equal((out == 0).all(-1), fully_masked) and out.isfinite().all()
    if backend == "flex":  # no backward pass on a CPU
        return
    x.requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        attn(x, mask=mask).square().sum().backward()
    gradients = [x.grad, *(p.grad for p in attn.parameters())]
    assert all(g.isfinite().all() and (g != 0).any() for g in gradients)
    assert (x.grad[1][fully_masked[1]] == 0).all()  # masked as keys, too
