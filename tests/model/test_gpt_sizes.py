"""Parameter counts, FLOPs and initialization of the GPT against closed forms."""

import math
import re

import pytest
import torch
from torch import nn

from tests.conftest import GPT2, MODEL_CHOICES, assert_close, tiny_gpt
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import causal_mask

B, T, V = 2, 9, 31


def on_meta(**choices) -> GPT:
    """A model on the meta device: shapes without values. Not tied by default."""
    with torch.device("meta"):
        return GPT(GPTConfig(**{"tie_embeddings": False, **choices}))


# --- sizes


def test_gpt2_has_124_million_parameters():
    model = on_meta(**GPT2)
    assert model.n_parameters() == 124_439_808
    assert model.n_parameters(embeddings=False) == 124_439_808 - 50257 * 768 - 1024 * 768


@pytest.mark.parametrize(
    "choices, block, outside, last_norm",
    [
        # C = 64 throughout, V = 100, context 256; q + k + v + o, FFN, two norms, gains of q and k
        ({}, 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"n_kv_heads": 2, "qk_norm": False}, 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 256 + 2 * 64, 2 * 100 * 64, 64),
        ({"head_dim": 10}, 4 * 64 * 40 + 2 * 64 * 256 + 2 * 64 + 2 * 10, 2 * 100 * 64, 64),
        ({"mlp": "swiglu"}, 4 * 64 * 64 + 3 * 64 * 170 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        (
            {"pos": "learned", "tie_embeddings": True},
            4 * 64 * 64 + 2 * 64 * 256 + 2 * 64 + 2 * 16,
            100 * 64 + 256 * 64,
            64,
        ),
        ({"bias": True, "norm": "layernorm"}, 4 * 65 * 64 + 65 * 256 + 257 * 64 + 4 * 64 + 2 * 16, 2 * 100 * 64, 128),
        ({"norm": "layernorm", "pos": "none"}, 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"n_heads": 0}, 2 * 64 * 256 + 64, 2 * 100 * 64, 64),
        ({"n_heads": 0, "bias": True, "norm": "layernorm"}, 65 * 256 + 257 * 64 + 2 * 64, 2 * 100 * 64, 128),
        ({"mlp": "none"}, 4 * 64 * 64 + 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"pos": "alibi"}, 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"qkv_bias": True, "n_kv_heads": 2}, 2 * 64 * 64 + 2 * 64 * 32 + 128 + 2 * 64 * 256 + 160, 2 * 100 * 64, 64),
        ({"bias": True, "qkv_bias": False}, 4 * 64 * 64 + 64 + 65 * 256 + 257 * 64 + 2 * 64 + 32, 2 * 100 * 64, 64),
        ({"mlp_hidden": 100}, 4 * 64 * 64 + 2 * 64 * 100 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"mlp": "swiglu", "mlp_hidden": 100}, 4 * 64 * 64 + 3 * 64 * 100 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
        ({"qk_norm": "layernorm"}, 4 * 64 * 64 + 2 * 64 * 256 + 2 * 64 + 2 * 16, 2 * 100 * 64, 64),
    ],
)
def test_parameter_counts_equal_the_closed_form(choices, block, outside, last_norm):
    model = on_meta(**{"vocab_size": 100, "dim": 64, "n_heads": 4, "n_layers": 3, **choices})
    assert model.n_parameters(embeddings=False) == 3 * block + last_norm
    assert model.n_parameters() == 3 * block + last_norm + outside


def test_flops_of_gpt2_equal_palms_formula():
    model = on_meta(**{**GPT2, "vocab_size": 50304, "bias": False})
    matrices = 12 * 12 * 768**2 + 50304 * 768
    gains = 25 * 768  # PaLM's N leaves them out, which gives the usual 854.7 MFLOP
    assert 6 * matrices + 12 * 12 * 768 * 1024 == 854_654_976
    assert model.flops_per_token(masked=True) == 854_654_976 + 6 * gains
    assert model.flops_per_token() == 854_654_976 + 6 * gains - 12 * 12 * 768 * 1023 // 2


@pytest.mark.parametrize("window", [None, 1, 2, 7, 63, 64, 100])
@pytest.mark.parametrize("length", [1, 10, 64])
def test_flops_count_the_scores_that_the_mask_leaves(length, window):
    shape = {"vocab_size": 100, "context_length": 64, "dim": 32, "n_heads": 4, "head_dim": 6, "n_layers": 3}
    model = on_meta(**shape, window=window)
    weights = model.n_parameters() - 100 * 32  # all but the embedding table
    visible = int(causal_mask(length, length, window=window).sum())  # of all queries
    assert model.flops_per_token(length) == round(6 * weights + 12 * 3 * 24 * visible / length)
    band = min(length, window or length)
    assert model.flops_per_token(length, masked=True) == 6 * weights + 12 * 3 * 24 * band
    if length == 64:
        assert model.flops_per_token() == model.flops_per_token(64)


def test_a_model_that_is_not_causal_computes_every_score():
    model = on_meta(vocab_size=100, context_length=64, dim=32, n_heads=4, n_layers=3, causal=False)
    weights = model.n_parameters() - 100 * 32
    assert model.flops_per_token() == model.flops_per_token(masked=True) == 6 * weights + 12 * 3 * 32 * 64


def test_a_missing_part_has_no_flops():
    shape = {"vocab_size": 100, "context_length": 64, "dim": 32, "n_layers": 3, "norm": "rmsnorm"}
    ffn, attention, scores = 3 * (2 * 32 * 128 + 32), 3 * (4 * 32 * 32 + 32 + 2 * 8), 3 * 32 * 65 // 2
    ends = 100 * 32 + 32  # the head and the last norm
    assert on_meta(**shape, n_heads=4).flops_per_token() == 6 * (ffn + attention + ends) + 12 * scores
    assert on_meta(**shape, n_heads=0).flops_per_token() == 6 * (ffn + ends)
    assert on_meta(**shape, n_heads=4, mlp="none").flops_per_token() == 6 * (attention + ends) + 12 * scores


def test_a_tied_head_is_the_embedding():
    model = tiny_gpt(tie_embeddings=True)
    assert model.head.weight is model.embed.weight
    untied = tiny_gpt(tie_embeddings=False)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()
    assert untied.n_parameters() - model.n_parameters() == V * 32


# --- initialization

QKV_UP_GATE = r"(q_proj|k_proj|v_proj|up|gate)\.weight$"
RESIDUAL = r"(o_proj|down)\.weight$"
EXPECTED_STD = {  # for C = 64 and L = 2; the first pattern that fits
    ("zero_out", False): [
        (QKV_UP_GATE, 0.5 / 8),
        (RESIDUAL, 0.0),
        ("^pos_embed", 0.02),
        ("^embed", 1.0),
        ("^head", 0.0),
    ],
    ("zero_out", True): [(QKV_UP_GATE, 0.5 / 8), (RESIDUAL, 0.0), ("^pos_embed", 0.02), ("^embed", 0.02)],
    ("gpt2", False): [
        (QKV_UP_GATE, 0.02),
        (RESIDUAL, 0.02 / 2),
        ("^pos_embed", 0.02),
        ("^embed", 0.02),
        ("^head", 0.02),
    ],
    ("gpt2", True): [(QKV_UP_GATE, 0.02), (RESIDUAL, 0.02 / 2), ("^pos_embed", 0.02), ("^embed", 0.02)],
}


@pytest.mark.parametrize("init, tied", EXPECTED_STD)
def test_initialization_follows_its_table(init, tied):
    parts = {"mlp": "swiglu", "norm": "layernorm", "pos": "learned", "bias": True}
    model = GPT(GPTConfig(200, dim=64, n_layers=2, init=init, tie_embeddings=tied, **parts))
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        std = next(std for pattern, std in EXPECTED_STD[init, tied] if re.search(pattern, name))
        # five standard errors of a normal sample's deviation and of its mean
        assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name
        assert abs(p.mean().item()) <= 5 * std / math.sqrt(p.numel()), name
        if init == "zero_out" and re.search(QKV_UP_GATE, name):
            assert p.abs().max() <= std * math.sqrt(3), name  # a uniform distribution has no tails


@pytest.mark.parametrize("choices", [{"n_heads": 0}, {"mlp": "none"}])
def test_gpt2_initialization_counts_only_existing_residual_branches(choices):
    """L branches instead of 2 L, each with twice the variance, so that the variance of their sum is the same."""
    model = GPT(GPTConfig(200, **{"dim": 64, "n_layers": 2, "n_heads": 4, "init": "gpt2", **choices}))
    for name, p in model.named_parameters():
        if re.search(RESIDUAL, name):
            std = 0.02 / math.sqrt(2)
            assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name


@pytest.mark.parametrize("pos", MODEL_CHOICES["pos"])
def test_zero_out_starts_at_the_loss_of_a_uniform_distribution(pos):
    model = GPT(GPTConfig(V, context_length=T, dim=32, pos=pos, tie_embeddings=False))
    ids, targets = torch.randint(V, (2, B, T))
    assert_close(model.nll(ids, targets), torch.full((B, T), math.log(V)), roundings=4)


def test_zero_out_starts_with_identity_blocks():
    model = GPT(GPTConfig(V, context_length=T, dim=32, mlp="swiglu", bias=True))
    x = torch.randn(B, T, 32)
    for block in model.blocks:
        assert torch.equal(block(x), x)


def test_initialization_follows_the_seed():
    def draw(seed):
        torch.manual_seed(seed)
        return GPT(GPTConfig(V, dim=32)).state_dict()

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


@pytest.mark.parametrize("change", [{"n_layers": 3}, {"n_heads": 1}, {"mlp": "swiglu"}, {"pos": "learned"}], ids=str)
def test_models_of_one_seed_share_the_values_of_the_matrices_that_they_share(change):
    def draw(**choices):
        torch.manual_seed(0)
        return GPT(GPTConfig(V, **{"dim": 32, "n_layers": 2, "n_heads": 4} | choices)).state_dict()

    first, second = draw(), draw(**change)
    shared = [name for name in first if name in second and first[name].shape == second[name].shape]
    assert len(shared) >= 9 and all(torch.equal(first[name], second[name]) for name in shared)
    drawn = [
        first[name].flatten()
        for name in shared
        if name != "head.weight" and first[name].ndim == 2 and first[name].any()
    ]
    assert len({tensor[:4].abs().sum().item() for tensor in drawn}) == len(drawn), "each has a stream of its own"


def test_state_dict_holds_parameters_only():
    model = tiny_gpt(tie_embeddings=False)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    other = tiny_gpt(tie_embeddings=False)
    other.load_state_dict(model.state_dict())
    ids = torch.randint(V, (B, T))
    assert torch.equal(other(ids), model(ids))


def test_every_projection_is_a_separate_linear():
    """As Muon, tensor parallelism and the tools for heads expect."""
    modules = tiny_gpt(mlp="swiglu").named_modules()
    names = {name.split(".")[-1] for name, module in modules if isinstance(module, nn.Linear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "up", "gate", "down", "head"}
