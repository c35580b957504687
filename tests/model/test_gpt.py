"""The GPT against formulas; decoding, documents and gates as properties over all its parts; its initialization.

B batch, T queries, H query heads, D head size, C width, V vocabulary, L layers.
"""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from tests.conftest import BACKENDS, MODEL_CHOICES, NANO_PARTS, assert_close, tiny_gpt
from tril.data.batches import IGNORE
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import document_options
from tril.model.positions import POSITIONS, Positions

B, T, V, H, L = 2, 9, 31, 4, 2  # V, H and L are those of tiny_gpt
PARTS = {name: st.sampled_from(values) for name, values in MODEL_CHOICES.items() if name not in ("backend", "mlp")}
PARTS |= {
    **{name: st.booleans() for name in ("bias", "key_offset", "tie_embeddings", "embed_skip", "value_embed")},
    "mlp": st.sampled_from(["relu", "swiglu"]),  # each kind has its formula in test_layers.py
    "n_kv_heads": st.sampled_from([None, 1, 2]),
    "window": st.sampled_from([None, 3]),
    "head_dim": st.sampled_from([None, 6]),
    "logit_softcap": st.sampled_from([None, 15.0]),
    "backend": st.sampled_from(BACKENDS),
}
WITHOUT = {"n_heads": 0, "n_kv_heads": None, "head_dim": None, "window": None}, {"mlp": "none"}
MODELS = st.fixed_dictionaries(PARTS)


@torch.no_grad()
@settings(deadline=None, max_examples=40, derandomize=True)
@given(MODELS, st.integers(1, 5), st.integers(4, 16), st.sampled_from([{}, {}, *WITHOUT]))
def test_decoding_in_chunks_and_packed_documents_equal_one_full_pass(parts, chunk, length, without):
    model, ids = tiny_gpt(**parts | without, context_length=16), torch.randint(1, V, (B, length))
    full, cache, last = model(ids), model.new_cache(B), model.new_cache(B)
    pieces = ids.split(chunk, dim=1)
    assert_close(torch.cat([model(piece, cache=cache) for piece in pieces], 1), full)
    ends = torch.tensor([piece.shape[1] for piece in pieces]).cumsum(0) - 1  # the last position of each, alone
    hidden = torch.cat([model.hidden(piece, cache=last, last_only=True) for piece in pieces], 1)
    assert_close(model.logits(hidden), full[:, ends])
    assert model(ids[:, :0], cache=cache).shape == (B, 0, V)
    assert cache.length == last.length == length
    for tokens in (1 + ids % (V - 1), ids):  # other ones, which are forgotten
        cache.length = 2
        logits = model(tokens[:, 2:], cache=cache)
    assert_close(logits, full[:, 2:])
    ids[:, 3:4] = 0  # a document begins
    assert_close(model(ids, **document_options(ids, 0))[:, 3:], model(ids[:, 3:]))
    with pytest.raises(ValueError, match="positions exceed context_length=16"):
        model(torch.zeros(B, 17, dtype=torch.long))


def test_a_position_table_in_float32_leaves_the_embeddings_in_bf16(monkeypatch):
    class Table(Positions):
        def embed(self, x, positions):
            return x + torch.ones(len(positions), x.shape[-1])  # float32, as the tables of Positions

    monkeypatch.setitem(POSITIONS, "none", Table)
    assert tiny_gpt(pos="none").bfloat16()(torch.zeros(B, T, dtype=torch.long)).dtype == torch.bfloat16


def test_nll_is_the_negative_log_softmax_at_the_target():
    model, (ids, targets) = tiny_gpt(logit_softcap=0.5), torch.randint(V, (2, B, T))
    plain = tiny_gpt()
    plain.load_state_dict(model.state_dict())
    log_p = (0.5 * torch.tanh(plain(ids).double() / 0.5)).log_softmax(-1)
    expected = -log_p.gather(-1, targets[..., None]).squeeze(-1)
    expected[0, 3:], targets[0, 3:] = 0.0, IGNORE
    assert_close(model.nll(ids, targets), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).dtype == torch.bfloat16
        loss = model.nll(ids, targets)
    assert loss.dtype == torch.float32
    loss.mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_a_gate_of_another_shape_is_refused():
    for shape, model in (((), tiny_gpt()), ((L + 1, H), tiny_gpt()), ((L, 0), tiny_gpt(n_heads=0))):
        with pytest.raises(ValueError, match="head_gate of shape"):
            model(torch.zeros(B, T, dtype=torch.long), head_gate=torch.ones(shape))


QKV_UP_GATE, RESIDUAL, TABLES = r"(q_proj|k_proj|v_proj|up|gate)\.weight$", r"(o_proj|down)\.weight$", "^(pos_)?embed"
INITIAL = {"weight": 1.0, "bias": 0.0, "embed_factor": 0.1, "value_factor": 0.0}  # of vectors
EXPECTED_STD = {  # for C = 64 and L = 2; the first pattern that fits
    ("zero_out", False): {QKV_UP_GATE: 0.5 / 8, RESIDUAL: 0.0, "^pos_embed": 0.02, "^embed": 1.0, "^head": 0.0},
    ("zero_out", True): {QKV_UP_GATE: 0.5 / 8, RESIDUAL: 0.0, TABLES: 0.02},
    ("gpt2", False): {QKV_UP_GATE: 0.02, RESIDUAL: 0.02 / 2, TABLES: 0.02, "^head": 0.02},
}


@pytest.mark.parametrize(("init", "tied"), EXPECTED_STD)
def test_initialization_follows_its_table(init, tied):
    parts = {"mlp": "swiglu", "norm": "layernorm", "pos": "learned", "bias": True, **NANO_PARTS}
    model = GPT(GPTConfig(200, dim=64, n_layers=2, init=init, tie_embeddings=tied, **parts))
    assert (model.head.weight is model.embed.weight) == tied
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == INITIAL[name.split(".")[-1]]).all(), name
            continue
        expected = EXPECTED_STD[init, tied] | {"^value_embed": 0.5}
        std = next(std for pattern, std in expected.items() if re.search(pattern, name))
        # five standard errors of a normal sample's deviation and of its mean
        assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name
        assert abs(p.mean().item()) <= 5 * std / math.sqrt(p.numel()), name
        if init == "zero_out" and re.search(QKV_UP_GATE, name):
            assert p.abs().max() <= std * math.sqrt(3), name  # a uniform distribution has no tails


@pytest.mark.parametrize("change", [{"n_layers": 3}, {"n_heads": 1}, {"mlp": "swiglu"}, {"pos": "learned"}], ids=str)
def test_models_of_one_seed_share_the_values_of_the_matrices_that_they_share(change):
    def draw(seed=0, **choices):
        torch.manual_seed(seed)
        return GPT(GPTConfig(V, **{"dim": 32, "n_layers": 2, "n_heads": 4} | NANO_PARTS | choices)).state_dict()

    first, second = draw(), draw(**change)
    shared = [name for name in first if name in second and first[name].shape == second[name].shape]
    assert len(shared) >= 9 and all(torch.equal(first[name], second[name]) for name in shared)
    matrices = [first[name] for name in shared if name != "head.weight" and first[name].ndim == 2 and first[name].any()]
    assert len({x.flatten()[:4].abs().sum().item() for x in matrices}) == len(matrices), "each has its own stream"
    assert not torch.equal(draw(1)["embed.weight"], first["embed.weight"])


def test_checkpointed_activations_give_the_same_gradients_from_fewer_tensors():
    """A layer keeps its input alone for the backward pass."""
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model, kept = tiny_gpt(attn_dropout=0.2, resid_dropout=0.1, checkpoint_activations=checkpoint).train(), []
        with saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            nll = model.nll(*torch.randint(V, (2, 3, 12)))
        nll.mean().backward()
        results.append((nll, [p.grad for p in model.parameters()], len(kept)))
    (nll, gradients, n_kept), (again, same, n_fewer) = results
    assert torch.equal(nll, again) and all(map(torch.equal, gradients, same)) and n_fewer < n_kept / 2


TABLES = "embed.weight", "pos_embed.weight", "value_embed.weight"
COUNTED = [{}, {"window": 6}, {"causal": False}, {"n_heads": 0}, {"tie_embeddings": True, "pos": "learned"}]


@pytest.mark.parametrize("parts", COUNTED)
def test_flops_are_six_for_each_weight_and_twelve_for_each_visible_key(parts):
    """PaLM, appendix B; of several lengths their mean over the tokens."""
    model = tiny_gpt(context_length=16, **parts)
    config, tables = model.config, TABLES[model.config.tie_embeddings :]  # a tied table is multiplied as the head
    weights = sum(p.numel() for name, p in model.named_parameters() if name not in tables)
    keys = sum(min(query + 1, config.window or 16) if config.causal else 16 for query in range(16)) / 16
    expected = 6 * weights + 12 * L * config.n_heads * config.head_size * keys
    assert model.flops_per_token() == pytest.approx(expected, abs=0.5)
    four, eight = (tiny_gpt(context_length=length, **parts).flops_per_token() for length in (4, 8))
    mean = 0.25 * four + 0.5 * eight + 0.25 * model.flops_per_token()
    assert model.flops_per_token({4: 0.25, 8: 0.75, 16: 1.0}) == pytest.approx(mean, abs=1)
