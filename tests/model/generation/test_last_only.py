"""`last_only=True` returns the last position of the whole pass, from all keys and values, with and without a cache."""

import pytest
import torch

from tests.conftest import TRAINABLE, assert_close, randomize, tiny_gpt
from tests.model.generation.test_generate import PARTS
from tril.model.attention import MultiHeadAttention
from tril.model.masks import causal_mask
from tril.model.positions import rope_table

B, T, C, H = 2, 6, 24, 4
MASKS = {
    "none": None,
    "queries": torch.rand(B, H, T, T, generator=torch.Generator().manual_seed(0)) < 0.5,
    "fully masked": causal_mask(T, T)[None, None] & (torch.arange(T) < T - 1)[:, None],  # the last query sees nothing
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", [*TRAINABLE, pytest.param("flex", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention(backend, mask):
    attn = randomize(MultiHeadAttention(C, H, backend=backend, window=3, n_kv_heads=2))
    x, options = torch.randn(B, T, C), {"mask": mask, "rope": rope_table(T, C // H), "need_weights": True}
    out, weights = attn(x, last_only=True, **options)  # (B, 1, C), (B, H, 1, T)
    whole, whole_weights = attn(x, **options)
    assert_close(out, whole[:, -1:])
    assert_close(weights, whole_weights[:, :, -1:])


@pytest.mark.parametrize("parts", [*PARTS, {"mlp": "none"}, {"n_layers": 1}], ids=str)
@torch.no_grad()
def test_the_model_and_its_cache(parts):
    """Two parts one after another, each with its last position only: the second attends to all keys and values."""
    model = tiny_gpt(**parts)
    ids = torch.randint(31, (B, min(9, model.config.context_length)))
    hidden = model.hidden(ids)  # (B, T, C)
    assert_close(model.hidden(ids, last_only=True), hidden[:, -1:])
    if model.config.causal:
        cache, parts = model.new_cache(B), [part for part in (ids[:, :5], ids[:, 5:]) if part.shape[1]]
        ends = torch.tensor([part.shape[1] for part in parts]).cumsum(0) - 1
        assert_close(torch.cat([model.hidden(part, cache=cache, last_only=True) for part in parts], 1), hidden[:, ends])
