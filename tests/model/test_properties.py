"""Properties that hold for all shapes, windows, lengths and dtypes: `hypothesis` draws them, plain loops check them.

B batch, T queries, S keys, H query heads, G key/value heads (H = G * group), D head size, D_v size of a value, C width,
V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import BACKENDS_SLOW_FLEX, MODEL_CHOICES, TRAINABLE, assert_close, randomize
from tril.model.attention import attention, causal_mask
from tril.model.gpt import GPT, GPTConfig

V = 29
COMMON = {"derandomize": True, "deadline": None}  # the same examples every time, however slow the machine is
VISIBILITY = ["all", "mask", "causal", "causal mask", "causal window", "causal window mask", "causal window mask bias"]
SLOW_VISIBILITY = [*(pytest.param(name, marks=pytest.mark.slow) for name in VISIBILITY[:-1]), VISIBILITY[-1]]
LENGTHS = st.integers(1, 7)
seeds = st.integers(0, 9)


def windows(longest: int):
    return st.none() | st.integers(1, longest + 1)


# --- attention, one query at a time


@dataclass
class Case:
    """The arguments of one call of `attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    causal: bool
    window: int | None

    def __repr__(self):  # hypothesis prints it for a failing example
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        choices = ", ".join(f"{name}={value}" for name, value in self.choices().items())
        return f"{shapes}, {self.q.dtype}, {choices}"

    def choices(self) -> dict:
        return {"mask": self.mask, "bias": self.bias, "causal": self.causal, "window": self.window}


@st.composite
def masks(draw, shape):
    """Boolean, of any shape that broadcasts to `shape`, including (); often with fully masked rows."""
    shape = shape[4 - draw(st.integers(0, 4)) :]
    shape = [draw(st.sampled_from(sorted({1, size}))) for size in shape]
    return torch.rand(shape) < draw(st.sampled_from([0.2, 0.7]))


@st.composite
def cases(draw, visibility, dtypes=(torch.float32, torch.float64, torch.bfloat16), lengths=LENGTHS):
    batch, n_kv_heads, group, size, v_size = (draw(st.integers(1, most)) for most in (2, 3, 3, 9, 9))
    n_queries = draw(lengths)
    n_keys = draw(lengths | st.just(n_queries))
    shape = (batch, n_kv_heads * group, n_queries, n_keys)
    window = draw(st.integers(1, n_keys + 1)) if "window" in visibility else None
    torch.manual_seed(draw(seeds))
    mask = draw(masks(shape)) if "mask" in visibility else None
    dtype = draw(st.sampled_from(dtypes))
    # Bounded inputs bound the scores, whose size multiplies the rounding errors, and the outputs, which are at most 1.
    q = torch.empty(*shape[:3], size).uniform_(-2, 2).to(dtype)
    k, v = (torch.empty(batch, n_kv_heads, n_keys, n).uniform_(-1, 1).to(dtype) for n in (size, v_size))
    bias = None
    if "bias" in visibility:  # -inf where another random mask is False
        finite = draw(masks(shape))
        bias = torch.empty(finite.shape).uniform_(-2, 2).to(dtype).masked_fill(~finite, -math.inf)
    return Case(q, 2 * k, v, mask, bias, "causal" in visibility, window)


def by_loops(case: Case) -> tuple[np.ndarray, np.ndarray, float]:
    """In float64, one query after another.

    Returns:
        The output (B, H, T, D_v), the fully masked rows (B, H, T), and the largest score.
    """
    q, k, v = (x.detach().double().numpy() for x in (case.q, case.k, case.v))
    (n_rows, n_heads, n_queries, size), n_keys = q.shape, k.shape[2]
    group = n_heads // k.shape[1]
    shape = (n_rows, n_heads, n_queries, n_keys)
    bias = np.broadcast_to(0.0 if case.bias is None else case.bias.detach().double().numpy(), shape)
    allowed = np.broadcast_to(True if case.mask is None else case.mask.numpy(), shape) & (bias != -math.inf)
    out, fully_masked, largest = np.zeros((*shape[:3], v.shape[3])), np.zeros(shape[:3], dtype=bool), 0.0
    for b, h, i in np.ndindex(n_rows, n_heads, n_queries):
        position = i + n_keys - n_queries  # the last query is at the position of the last key
        first = 0 if case.window is None else max(0, position - case.window + 1)
        keys = [j for j in (range(first, position + 1) if case.causal else range(n_keys)) if allowed[b, h, i, j]]
        if not keys:
            fully_masked[b, h, i] = True
            continue
        scores = k[b, h // group, keys] @ q[b, h, i] / math.sqrt(size) + bias[b, h, i, keys]
        weights = np.exp(scores)
        out[b, h, i] = weights @ v[b, h // group, keys] / weights.sum()
        largest = max(largest, np.abs(scores).max())
    return out, fully_masked, largest


def assert_equals_loops(case: Case, backend: str) -> None:
    with torch.no_grad():
        out = attention(case.q, case.k, case.v, backend=backend, **case.choices())
    expected, fully_masked, largest = by_loops(case)
    assert out.dtype == case.q.dtype
    assert (out[torch.from_numpy(fully_masked)] == 0).all()
    # In bfloat16, product, score, weight and output are each rounded by half an epsilon; sums are in float32. A weight
    # is an exponential over a sum of exponentials: errors of the first two count twice in it, times the score.
    roundings = 2 * largest + 1 if case.q.dtype == torch.bfloat16 else 64
    assert_close(out, torch.from_numpy(expected), roundings=roundings)


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("backend", TRAINABLE)
@settings(**COMMON, max_examples=20)
@given(data=st.data())
def test_attention_equals_the_plain_loop(backend, visibility, data):
    assert_equals_loops(data.draw(cases(visibility)), backend)


@pytest.mark.slow
@pytest.mark.parametrize("visibility", VISIBILITY)
@settings(**COMMON, max_examples=6)
@given(data=st.data())
def test_flex_equals_the_plain_loop(visibility, data):
    assert_equals_loops(data.draw(cases(visibility)), "flex")


@pytest.mark.parametrize("visibility", SLOW_VISIBILITY)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@settings(**COMMON, max_examples=2)
@given(data=st.data())
def test_attention_equals_the_plain_loop_around_the_block_size_of_kernels(backend, visibility, data):
    lengths = st.sampled_from([127, 128, 129])
    assert_equals_loops(data.draw(cases(visibility, dtypes=[torch.float32], lengths=lengths)), backend)


@pytest.mark.parametrize("visibility", VISIBILITY)
@pytest.mark.parametrize("backend", TRAINABLE)
@settings(**COMMON, max_examples=15)
@given(data=st.data())
def test_gradients_are_finite_and_zero_for_fully_masked_rows(backend, visibility, data):
    case = data.draw(cases(visibility))
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v, case.bias) if x is not None]
    out = attention(*inputs[:3], backend=backend, **case.choices())
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(gradient.isfinite().all() for gradient in gradients)
    _, fully_masked, _ = by_loops(case)
    assert (gradients[0][torch.from_numpy(fully_masked)] == 0).all()


@settings(**COMMON, max_examples=100)
@given(n_queries=st.integers(1, 12), n_keys=st.integers(1, 12), window=windows(12))
def test_causal_mask_equals_a_double_loop(n_queries, n_keys, window):
    mask = causal_mask(n_queries, n_keys, window=window)
    assert mask.shape == (n_queries, n_keys)
    for i in range(n_queries):
        for j in range(n_keys):
            distance = (i + n_keys - n_queries) - j  # positions from key j to query i
            assert mask[i, j].item() == (distance >= 0 and (window is None or distance < window))


# --- whole models


@st.composite
def models(draw, backends=TRAINABLE) -> GPT:
    """A GPT of a random valid configuration, with all weights random, in evaluation mode."""
    n_kv_heads, group, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 8]))
    n_heads, context_length = n_kv_heads * group, draw(st.integers(2, 9))
    free_width = draw(st.booleans())  # head_dim and dim are drawn separately
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
        **{name: draw(st.sampled_from(MODEL_CHOICES[name])) for name in ("mlp", "norm", "pos", "qk_norm")},
        qkv_bias=draw(st.sampled_from([None, True, False])),
        norm_eps=draw(st.sampled_from([None, 1e-3])),
        **{name: draw(st.booleans()) for name in ("bias", "tie_embeddings")},
    )
    torch.manual_seed(draw(seeds))
    return randomize(GPT(config)).eval()


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """For float64 models. A layer norm over few similar numbers magnifies roundings; 4096 of them are still 1e-12."""
    assert actual.dtype == torch.float64
    assert_close(actual, expected, roundings=4096)


def random_ids(model: GPT, n_rows: int = 2) -> torch.Tensor:
    """(B, T), where T is the context length."""
    return torch.randint(V, (n_rows, model.config.context_length))


@st.composite
def chunkings(draw, total: int) -> list[int]:
    """Sizes of chunks that add up to `total`."""
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
    assert not torch.equal(after[:, t], before[:, t])  # the change has an effect


def check_decoding_in_chunks(model, data):
    ids, model = random_ids(model), model.double()
    length = ids.shape[1]
    full = model(ids)
    for chunks in ([1] * length, data.draw(chunkings(length), label="chunks")):
        cache = model.new_cache(len(ids))
        logits = [model(chunk, cache=cache) for chunk in ids.split(chunks, dim=1)]
        assert_same_logits(torch.cat(logits, dim=1), full)


def check_left_padding(model, data):
    ids, model = random_ids(model, n_rows=3), model.double()
    length = ids.shape[1]
    n_pads = data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3), label="paddings")
    n_pads = torch.tensor(n_pads)[:, None]
    column = torch.arange(length)
    logits = model(ids, mask=(column >= n_pads)[:, None, None], positions=(column - n_pads).clamp(min=0))
    for row, n, row_logits in zip(ids, n_pads.flatten().tolist(), logits, strict=True):
        assert_same_logits(row_logits[n:], model(row[None, n:])[0])


@settings(**COMMON, max_examples=30)
@given(model=models(), data=st.data())
@torch.no_grad()
def test_decoding_in_chunks_equals_the_full_pass(model, data):
    check_decoding_in_chunks(model, data)


@settings(**COMMON, max_examples=30)
@given(model=models(), data=st.data())
@torch.no_grad()
def test_left_padded_rows_equal_the_rows_alone(model, data):
    check_left_padding(model, data)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_decoding_in_chunks, check_left_padding])
@settings(**COMMON, max_examples=4)
@given(model=models(backends=["flex"]), data=st.data())
@torch.no_grad()
def test_models_with_flex(check, model, data):
    check(model, data)
