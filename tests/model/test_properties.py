"""What must hold for every shape, head count, group, window, length and dtype: `hypothesis` picks them, plain loops are the oracle.

B batch, T queries, S keys, H query heads, G key/value heads (H = G * group), D head size, C width, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import BACKENDS, TRAINABLE, assert_close, randomise
from tril.model.attention import attention, causal_mask
from tril.model.config import CHOICES
from tril.model.gpt import GPT, GPTConfig

V = 29
SELDOM_FLEX = 4 * TRAINABLE + ("flex",)  # slow on a CPU, where it makes a block mask for nearly every call
COMMON = {"derandomize": True, "deadline": None}  # the same examples every time, however slow the machine
VISIBILITY = ["all", "mask", "causal", "causal mask", "causal window", "causal window mask"]
seeds = st.integers(0, 9)


def windows(longest: int):
    return st.none() | st.integers(1, longest + 1)


# -- attention, one query at a time ----------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """The arguments of one call of `attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    window: int | None

    def __repr__(self):  # what hypothesis prints of a failure
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", self.q), ("k", self.k)))
        return f"{shapes}, {self.q.dtype}, causal={self.causal}, window={self.window}, mask={self.mask}"

    def choices(self) -> dict:
        return {"mask": self.mask, "causal": self.causal, "window": self.window}


@st.composite
def masks(draw, shape):
    """Boolean, of any shape that broadcasts to `shape`, from a single value on; often with rows that are False throughout."""
    shape = shape[4 - draw(st.integers(0, 4)) :]
    shape = [draw(st.sampled_from(sorted({1, size}))) for size in shape]
    return torch.rand(shape) < draw(st.sampled_from([0.2, 0.7]))


@st.composite
def cases(draw, visibility, dtypes=(torch.float32, torch.float64, torch.bfloat16), lengths=st.integers(1, 7)):
    batch, n_kv_heads, group, size = (draw(st.integers(1, most)) for most in (2, 3, 3, 9))
    n_queries = draw(lengths)
    n_keys = draw(lengths | st.just(n_queries))
    shape = (batch, n_kv_heads * group, n_queries, n_keys)
    window = draw(st.integers(1, n_keys + 1)) if "window" in visibility else None
    torch.manual_seed(draw(seeds))
    mask = draw(masks(shape)) if "mask" in visibility else None
    dtype = draw(st.sampled_from(dtypes))
    # Bounded numbers bound the scores, whose size multiplies the roundings; and outputs are at most 1, like v.
    q = torch.empty(*shape[:3], size).uniform_(-2, 2).to(dtype)
    k, v = torch.empty(2, batch, n_kv_heads, n_keys, size).uniform_(-1, 1).to(dtype)
    return Case(q, 2 * k, v, mask, "causal" in visibility, window)


def by_loops(case: Case) -> tuple[np.ndarray, np.ndarray, float]:
    """Float64, one query after another: the output (B, H, T, D), which queries saw nothing (B, H, T), and the largest score."""
    q, k, v = (x.detach().double().numpy() for x in (case.q, case.k, case.v))
    (n_rows, n_heads, n_queries, size), n_keys = q.shape, k.shape[2]
    group = n_heads // k.shape[1]
    allowed = np.broadcast_to(True if case.mask is None else case.mask.numpy(), (n_rows, n_heads, n_queries, n_keys))
    out, blind, largest = np.zeros(q.shape), np.zeros(q.shape[:3], dtype=bool), 0.0
    for b, h, i in np.ndindex(n_rows, n_heads, n_queries):
        at = i + n_keys - n_queries  # the last query stands at the last key
        first = 0 if case.window is None else max(0, at - case.window + 1)
        keys = [j for j in (range(first, at + 1) if case.causal else range(n_keys)) if allowed[b, h, i, j]]
        if not keys:
            blind[b, h, i] = True
            continue
        scores = k[b, h // group, keys] @ q[b, h, i] / math.sqrt(size)
        weights = np.exp(scores)
        out[b, h, i] = weights @ v[b, h // group, keys] / weights.sum()
        largest = max(largest, np.abs(scores).max())
    return out, blind, largest


def assert_equals_loops(case: Case, backend: str) -> None:
    with torch.no_grad():
        out = attention(case.q, case.k, case.v, backend=backend, **case.choices())
    expected, blind, largest = by_loops(case)
    assert out.dtype == case.q.dtype
    assert (out[torch.from_numpy(blind)] == 0).all()
    # bfloat16 (sums run in float32) rounds product, score, weight and output, by half an epsilon each. A weight is an exponential over
    # a sum of exponentials, so what the first two are off counts twice in it, times the size of the score.
    roundings = 2 * largest + 1 if case.q.dtype == torch.bfloat16 else 64
    assert_close(out, torch.from_numpy(expected), roundings=roundings)


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("backend", TRAINABLE)
@settings(**COMMON, max_examples=40)
@given(data=st.data())
def test_attention_is_the_plain_loop(backend, visibility, data):
    assert_equals_loops(data.draw(cases(visibility)), backend)


@pytest.mark.parametrize("visibility", VISIBILITY)
@settings(**COMMON, max_examples=6)
@given(data=st.data())
def test_flex_is_the_plain_loop(visibility, data):
    assert_equals_loops(data.draw(cases(visibility)), "flex")


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(**COMMON, max_examples=2)
@given(data=st.data())
def test_attention_is_the_plain_loop_around_the_block_size_of_kernels(backend, visibility, data):
    lengths = st.sampled_from([127, 128, 129])
    assert_equals_loops(data.draw(cases(visibility, dtypes=[torch.float32], lengths=lengths)), backend)


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("backend", TRAINABLE)
@settings(**COMMON, max_examples=15)
@given(data=st.data())
def test_gradients_are_finite_and_none_pass_through_a_blind_query(backend, visibility, data):
    case = data.draw(cases(visibility))
    qkv = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    out = attention(*qkv, backend=backend, **case.choices())
    gradients = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert all(gradient.isfinite().all() for gradient in gradients)
    _, blind, _ = by_loops(case)
    assert (gradients[0][torch.from_numpy(blind)] == 0).all()


@settings(**COMMON, max_examples=100)
@given(n_queries=st.integers(1, 12), n_keys=st.integers(1, 12), window=windows(12))
def test_causal_mask_is_a_double_loop(n_queries, n_keys, window):
    mask = causal_mask(n_queries, n_keys, window=window)
    assert mask.shape == (n_queries, n_keys)
    for i in range(n_queries):
        for j in range(n_keys):
            back = (i + n_keys - n_queries) - j  # how far key j lies behind query i
            assert mask[i, j].item() == (back >= 0 and (window is None or back < window))


# -- whole models ----------------------------------------------------------------------------------------------------------------------


@st.composite
def models(draw, backends=SELDOM_FLEX) -> GPT:
    """A GPT of a random legal configuration, with all weights random, in evaluation mode."""
    n_kv_heads, group, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 8]))
    n_heads, context_length = n_kv_heads * group, draw(st.integers(2, 9))
    free_width = draw(st.booleans())  # head_dim chosen apart from dim
    config = GPTConfig(
        vocab_size=V,
        context_length=context_length,
        n_layers=draw(st.integers(1, 3)),
        dim=draw(st.integers(8, 20)) if free_width else n_heads * size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=size if free_width else None,
        window=draw(windows(context_length)),
        mlp_ratio=draw(st.sampled_from([0.5, 1.0, 2.5])),
        logit_softcap=draw(st.sampled_from([None, 5.0])),
        backend=draw(st.sampled_from(backends)),
        **{name: draw(st.sampled_from(CHOICES[name])) for name in ("mlp", "norm", "pos")},
        **{name: draw(st.booleans()) for name in ("bias", "qk_norm", "tie_embeddings")},
    )
    torch.manual_seed(draw(seeds))
    return randomise(GPT(config)).eval()


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Of float64 models: a layer norm over few numbers that happen to be alike magnifies roundings, and 4096 of them are still 1e-12."""
    assert actual.dtype == torch.float64
    assert_close(actual, expected, roundings=4096)


def random_ids(model: GPT, n_rows: int = 2) -> torch.Tensor:
    """(B, T), T the whole context"""
    return torch.randint(V, (n_rows, model.config.context_length))


@st.composite
def chunkings(draw, total: int) -> list[int]:
    """Sizes of pieces that make up `total`."""
    ends = draw(st.sets(st.integers(1, total - 1))) | {total}
    return np.diff([0, *sorted(ends)]).tolist()


@settings(**COMMON, max_examples=50)
@given(model=models(backends=["explicit"]), data=st.data())
@torch.no_grad()
def test_later_tokens_change_no_bit_of_earlier_logits(model, data):
    ids = random_ids(model)
    t = data.draw(st.integers(1, ids.shape[1] - 1), label="first changed token")
    changed = ids.clone()
    changed[:, t:] = (ids[:, t:] + 1) % V
    before, after = model(ids), model(changed)
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.equal(after[:, t], before[:, t])  # the change did reach the model


@settings(**COMMON, max_examples=40)
@given(model=models(), data=st.data())
@torch.no_grad()
def test_pieces_through_the_cache_are_the_full_pass(model, data):
    ids, model = random_ids(model), model.double()
    length = ids.shape[1]
    full = model(ids)
    for chunks in ([1] * length, data.draw(chunkings(length), label="pieces")):
        cache = model.new_cache(len(ids))
        pieces = [model(piece, cache=cache) for piece in ids.split(chunks, dim=1)]
        assert_same_logits(torch.cat(pieces, dim=1), full)


@settings(**COMMON, max_examples=50)
@given(model=models(), data=st.data())
@torch.no_grad()
def test_left_padded_rows_are_the_rows_alone(model, data):
    ids, model = random_ids(model, n_rows=3), model.double()
    length = ids.shape[1]
    n_pads = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3), label="paddings"))[
        :, None
    ]
    column = torch.arange(length)
    logits = model(ids, mask=(column >= n_pads)[:, None, None], positions=(column - n_pads).clamp(min=0))
    for row, n, got in zip(ids, n_pads.flatten().tolist(), logits):
        assert_same_logits(got[n:], model(row[None, n:])[0])
