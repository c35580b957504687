"""Muon and AdamW against those of torch, and learning rates against formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.conftest import NANO_PARTS, assert_close
from tril.data.settings import canonical
from tril.model.gpt import GPT, GPTConfig
from tril.model.training import optim
from tril.model.training.optim import MuonAdamW, build_optimizer, param_groups
from tril.model.training.schedule import ScheduleConfig, lr_factor
from tril.model.training.settings import OptimConfig

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "original"}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
SHAPES = [(24, 24), (48, 16), (16, 48), (16, 24), (24, 24), (16, 48)]  # square, tall, wide; equal ones are in one batch
MATRICES = [f"attn.{x}_proj" for x in "qkvo"] + ["mlp.up", "mlp.gate", "mlp.down"]


def new_gpt(**choices) -> GPT:
    """With every sort of parameter."""
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "context_length": 6, "n_layers": 2, "dim": 8, "n_heads": 2, "mlp": "swiglu"}
    return GPT(GPTConfig(**shape | NANO_PARTS | {"pos": "learned", "bias": True, "tie_embeddings": False} | choices))


def run_both(shapes, ours: dict, theirs: type, **options) -> tuple[list, list, list]:
    """Start, and end after the same five gradients, of MuonAdamW with one group and of torch's optimizer `theirs`."""
    start = [torch.randn(shape) for shape in shapes]
    mine, reference = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    optimizers = MuonAdamW([{**ours, "params": mine}]), theirs(reference, **options)
    for _ in range(5):
        for a, b in zip(mine, reference, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return start, mine, reference


@pytest.mark.parametrize(
    "change", [{"adjust_lr": "match_rms_adamw", "nesterov": False}, {"ns_steps": 3, "momentum": 0.5}]
)
def test_muon_equals_torch_in_float32(monkeypatch, change):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own casts to bf16 everywhere
    group = MUON | change
    options = {"adjust_lr_fn" if key == "adjust_lr" else key: value for key, value in group.items()}
    results = run_both(SHAPES, group | {"kind": "muon", "normalize_rows": False}, torch.optim.Muon, **options)
    for start, mine, reference in zip(*results, strict=True):
        # float32 rounding; at most the order of summation differs
        assert (mine - reference).norm() < 1e-5 * (reference - start).norm()


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_normalized_rows_have_equal_norms_if_a_factor_of_two_suffices(shape):
    updates, grad = {}, torch.randn(shape)
    grad[1], grad[2] = 0.0, 1e-4 * grad[2]
    for normalize_rows in (False, True):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = grad.clone()
        group = MUON | {"kind": "muon", "weight_decay": 0.0, "normalize_rows": normalize_rows, "params": [p]}
        MuonAdamW([group]).step()
        updates[normalize_rows] = p.detach()
    norms = updates[False].norm(dim=1, keepdim=True)
    factors = (norms.square().mean().sqrt() / norms).clamp(max=2)  # of the row of zeros: 2
    assert factors.min() < 1 and factors[2] == 2
    torch.testing.assert_close(updates[True], factors * updates[False], rtol=1e-3, atol=1e-7)


def test_adamw_equals_torch_bit_for_bit():
    _, mine, reference = run_both([(7, 5), (5,), ()], ADAMW | {"kind": "adamw"}, torch.optim.AdamW, **ADAMW)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muons_direction_does_not_depend_on_the_size_of_the_gradient(dtype):
    matrices = torch.randn(2, 16, 24).to(dtype)
    expected = optim.orthogonalize(matrices, 5)
    for scale in (2.0**-100, 1e-10, 1.0, 1e20):
        assert_close(optim.orthogonalize(matrices * scale, 5), expected)
    assert optim.orthogonalize(torch.zeros(1, 4, 4, dtype=dtype), 5).count_nonzero() == 0


WRONG = [*(("exp_avg", x) for x in (torch.ones(2, 2), torch.ones(()), 3, None)), ("step", torch.ones(7, 5))]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_state_that_does_not_fit_its_parameter_is_an_error(name, value):
    weight = nn.Parameter(torch.randn(7, 5))
    optimizer = MuonAdamW([{**ADAMW, "kind": "adamw", "params": [weight]}])
    weight.grad = torch.ones(7, 5)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0][name] = value
    with pytest.raises(ValueError, match=name):
        MuonAdamW([{**ADAMW, "kind": "adamw", "params": [weight]}]).load_state_dict(state)


PRODUCTS = [("32-true", torch.float32), ("16-mixed", torch.float32), ("bf16-mixed", torch.bfloat16)]


@pytest.mark.parametrize(("precision", "dtype"), PRODUCTS)
def test_muons_products_have_the_precision_of_the_run_also_after_resuming(monkeypatch, precision, dtype):
    seen, model = set(), new_gpt()
    monkeypatch.setattr(optim, "orthogonalize", lambda x, steps: seen.add(x.dtype) or x)
    optimizer = build_optimizer(model, OptimConfig(), precision)
    optimizer.load_state_dict(build_optimizer(new_gpt(), OptimConfig(), "bf16-true").state_dict())
    model.nll(*torch.randint(11, (2, 4, 6))).mean().backward()
    optimizer.step()
    assert seen == {dtype}


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_in_one_group_and_frozen_ones_are_in_none(tied):
    model = new_gpt(n_layers=1, tie_embeddings=tied)
    model.norm.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    config = OptimConfig(lr=0.005, muon_lr=0.02, weight_decay=0.1, muon_weight_decay=0.2, lr_scale=2)
    groups = {group["name"]: group for group in param_groups(model, config)}
    found = {name: {names[id(p)] for p in group["params"]} for name, group in groups.items()}
    assert found["muon"] == {f"blocks.0.{name}.weight" for name in MATRICES}
    tables = {"embed.weight", "pos_embed.weight", "value_embed.weight"}
    assert found["decay"] == tables | ({"head.weight"} if not tied else set())
    assert found["no_decay"] == {name for name, p in model.named_parameters() if p.ndim == 1 and p.requires_grad}
    rates = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    assert rates == {"muon": (0.04, 0.2), "decay": (0.01, 0.1), "no_decay": (0.01, 0.0)}
    assert [group["name"] for group in param_groups(model, OptimConfig(kind="adamw"))] == ["decay", "no_decay"]


# --- schedule


def formula(kind: str, step: int, total: int, warmup: int, floor: float, share: float) -> float:
    warmup = total // 10 if warmup > total else warmup
    if step < warmup:
        return (step + 1) / (warmup + 1)
    decay = {"linear": total - warmup, "cosine": total - warmup, "wsd": min(round(share * total), total - warmup)}
    left = total - step
    if kind == "constant" or left > decay[kind]:
        return 1.0
    p = max(0.0, left / decay[kind]) if left > 0 else 0.0  # of the decay that is left
    return floor + (1 - floor) * ((1 - math.cos(math.pi * p)) / 2 if kind == "cosine" else p)


KINDS = st.sampled_from(["linear", "cosine", "wsd", "constant"])


@given(KINDS, st.integers(1, 40), st.integers(0, 45), st.sampled_from([0.0, 0.1]), st.sampled_from([0.01, 0.2, 1.0]))
def test_the_factor_is_that_of_the_formula(kind, total, warmup, floor, share):
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, min_lr_ratio=floor, decay_fraction=share)
    for step in range(total + 3):
        expected = formula(kind, step, total, warmup, floor, share)
        assert lr_factor(step, total, config) == pytest.approx(expected, abs=1e-12), step
        assert expected > 0 or step >= total, "no step of the run is wasted"


def test_a_setting_without_effect_is_at_its_default_in_the_canonical_form():
    """Muon's have no effect on AdamW."""
    changes = {"muon_lr": 0.1, "muon_weight_decay": 0.1, "momentum": 0.1, "nesterov": False, "ns_steps": 1}
    for name, value in (changes | {"adjust_lr": "match_rms_adamw"}).items():
        assert canonical(OptimConfig(kind="adamw", **{name: value})) == OptimConfig(kind="adamw")
        assert canonical(OptimConfig(**{name: value})) == OptimConfig(**{name: value}) != OptimConfig()
