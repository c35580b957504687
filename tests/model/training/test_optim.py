"""Muon and AdamW against those of torch, and which parameter is updated by which rule."""

import io
import math

import pytest
import torch
from torch import nn

from tril.model.gpt import GPT, GPTConfig
from tril.model.training import optim
from tril.model.training.optim import MuonAdamW, build_optimizer, orthogonalize, param_groups
from tril.model.training.settings import OptimConfig

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "original"}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
SHAPES = [(24, 24), (48, 16), (16, 48), (16, 24), (24, 24), (16, 48)]  # square, tall, wide; equal ones are in one batch

# bf16 has 8 significant bits, so a product is rounded by up to 2^-8; 5 iterations have 15 products, whose errors are
# independent and add up like a random walk.
BF16_TOLERANCE = math.sqrt(15) * 2**-8


def new_gpt(seed: int = 0, **choices) -> GPT:
    """With every sort of parameter."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 11, "context_length": 6, "n_layers": 2, "dim": 8, "n_heads": 2, "mlp": "swiglu"}
    return GPT(GPTConfig(**shape | {"pos": "learned", "bias": True, "tie_embeddings": False} | choices))


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model.nll(ids[:, :-1], ids[:, 1:]).mean().backward()
        optimizer.step()


def run_both(shapes, ours: dict, theirs: type, **options) -> tuple[list, list, list]:
    """Start, and end after the same five gradients, of MuonAdamW with one group and of torch's optimizer `theirs`."""
    start, mine, reference = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)]
        for _ in range(3)
    )
    optimizers = MuonAdamW([{**ours, "params": mine}]), theirs(reference, **options)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 + step)
        for a, b in zip(mine, reference, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return start, mine, reference


@pytest.mark.parametrize(
    "change",
    [{"adjust_lr": "match_rms_adamw"}, {"nesterov": False}, {"weight_decay": 0.0}, {"ns_steps": 3, "momentum": 0.5}],
)
def test_muon_equals_torch_in_float32(monkeypatch, change):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own casts to bf16 everywhere
    group = MUON | change
    options = {"adjust_lr_fn" if key == "adjust_lr" else key: value for key, value in group.items()}
    for start, mine, reference in zip(
        *run_both(SHAPES, group | {"kind": "muon"}, torch.optim.Muon, **options), strict=True
    ):
        # float32 rounding; at most the order of summation differs
        assert (mine - reference).norm() < 1e-5 * (reference - start).norm()


@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-3}])
def test_adamw_equals_torch_to_the_bit(change):
    group = ADAMW | change
    _, mine, reference = run_both([(7, 5), (5,), ()], group | {"kind": "adamw"}, torch.optim.AdamW, **group)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("16-mixed", torch.float32), ("bf16-mixed", torch.bfloat16)]
)
def test_muons_products_have_the_precision_of_the_run(monkeypatch, precision, dtype):
    seen = set()
    monkeypatch.setattr(optim, "orthogonalize", lambda x, steps: seen.add(x.dtype) or x)
    model = new_gpt()
    optimizer = build_optimizer(model, OptimConfig(), precision)
    other = build_optimizer(new_gpt(), OptimConfig(), "32-true" if precision == "bf16-mixed" else "bf16-mixed")
    optimizer.load_state_dict(other.state_dict())  # of a run in another precision
    train(model, optimizer, range(1))
    assert seen == {dtype}


@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (12, 40), (40, 12)])
def test_singular_values_follow_the_polynomial_and_end_near_one(rows, columns):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(3, rows, columns, dtype=torch.float64, generator=generator)
    left, _, right = torch.linalg.svd(draw, full_matrices=False)
    values = torch.logspace(0, -2, min(rows, columns), dtype=torch.float64).repeat(3, 1)
    matrices = left @ values.diag_embed() @ right
    expected = values / values.norm(dim=-1, keepdim=True)
    assert expected.min() > 0.002  # where the documented band begins
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(orthogonalize(matrices, steps=5), left @ expected.diag_embed() @ right)
    in_float32 = torch.linalg.svdvals(orthogonalize(matrices.float(), steps=5))
    assert 0.68 < in_float32.min() and in_float32.max() < 1.21


def test_each_group_follows_its_own_rule():
    mine, reference = new_gpt(), new_gpt()
    config = OptimConfig(lr=0.005, muon_lr=0.02, momentum=0.95, weight_decay=0.1, muon_weight_decay=0.2)
    optimizer = build_optimizer(mine, config, "bf16-mixed")  # torch's Muon is in bf16 on every machine
    blocks = [p for p in reference.blocks.parameters() if p.ndim == 2]
    tables = [reference.embed.weight, reference.pos_embed.weight, reference.head.weight]
    adamw = {"lr": 0.005, "betas": (0.9, 0.95), "fused": True}
    oracles = [
        torch.optim.Muon(blocks, lr=0.02, weight_decay=0.2),
        torch.optim.AdamW(tables, weight_decay=0.1, **adamw),
        torch.optim.AdamW([p for p in reference.parameters() if p.ndim < 2], weight_decay=0.0, **adamw),
    ]
    for step in range(3):
        train(mine, optimizer, range(step, step + 1))
        for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
            b.grad = a.grad.clone()  # the same gradients for both, so that only the update is compared
        for oracle in oracles:
            oracle.step()
    start = dict(new_gpt().named_parameters())
    for (name, a), b in zip(mine.named_parameters(), reference.parameters(), strict=True):
        moved = (b - start[name]).norm()
        assert (a - b).norm() <= (BF16_TOLERANCE if name.startswith("blocks.") and a.ndim == 2 else 0) * moved, name


def test_a_state_dict_continues_to_the_bit():
    straight, first, second = new_gpt(), new_gpt(), new_gpt(seed=1)
    config = OptimConfig(weight_decay=0.1)
    train(straight, build_optimizer(straight, config), range(6))
    optimizer, resumed = build_optimizer(first, config), build_optimizer(second, config)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_in_one_group_and_frozen_ones_are_in_none(tied):
    model = new_gpt(n_layers=1, tie_embeddings=tied)
    model.norm.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {group["name"]: {names[id(p)] for p in group["params"]} for group in param_groups(model, OptimConfig())}
    matrices = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.up", "mlp.gate", "mlp.down")
    assert found["muon"] == {f"blocks.0.{name}.weight" for name in matrices}
    assert found["decay"] == {"embed.weight", "pos_embed.weight"} | ({"head.weight"} if not tied else set())
    assert found["no_decay"] == {name for name, p in model.named_parameters() if p.ndim == 1 and p.requires_grad}
    assert found["no_decay"] >= {f"blocks.0.{name}.bias" for name in matrices}
    everything = param_groups(model, OptimConfig(kind="adamw"))
    assert [group["name"] for group in everything] == ["decay", "no_decay"]


def test_a_setting_without_effect_is_at_its_default_in_the_canonical_form():
    """Muon's have no effect on AdamW, and those of the base model have one for scaled rates only."""
    changes = {"muon_lr": 0.1, "muon_weight_decay": 0.1, "momentum": 0.1, "nesterov": False, "ns_steps": 1}
    for name, value in (changes | {"adjust_lr": "match_rms_adamw"}).items():
        assert OptimConfig(kind="adamw", **{name: value}).canonical() == OptimConfig(kind="adamw")
        assert OptimConfig(**{name: value}).canonical() == OptimConfig(**{name: value}) != OptimConfig()
    for name in ("base_width", "base_head_dim"):
        assert OptimConfig(**{name: 64}).canonical() == OptimConfig()
        scaled = OptimConfig(scale_with_width=True, **{name: 64})
        assert scaled.canonical() == scaled
