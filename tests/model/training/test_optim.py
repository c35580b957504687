"""Muon and AdamW against those of torch, and which parameter is updated by which rule at which rate."""

import io
import math

import pytest
import torch
from torch import nn

from tril.model.gpt import GPT, GPTConfig
from tril.model.training import optim
from tril.model.training.optim import MuonAdamW, build_optimizer, orthogonalize, param_groups
from tril.model.training.settings import OptimConfig

MUON = {
    "kind": "muon",
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "adjust_lr": "original",
}
ADAMW = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
SHAPES = [
    (24, 24),
    (48, 16),
    (16, 48),
    (16, 24),
    (24, 24),
    (16, 48),
]  # square, tall, wide; equal shapes go in one batch

# bf16 has 8 significant bits, so a product is rounded by up to 2^-8; 5 iterations have 15 products, whose errors are
# independent and add up like a random walk.
BF16_TOLERANCE = math.sqrt(15) * 2**-8


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """A stand-in with every sort of parameter that a model has."""

    def __init__(self, dim: int = 8, vocab: int = 11):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def random_params(shapes, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def run_both(
    shapes, ours: dict, theirs: type, steps: int = 5, products=torch.float32, **kwargs
) -> tuple[list, list, list]:
    """Start, and end after the same gradients, of MuonAdamW with one group and of torch's optimizer `theirs`."""
    start, mine, reference = random_params(shapes), random_params(shapes), random_params(shapes)
    optimizers = MuonAdamW([{**ours, "params": mine}], products), theirs(reference, **kwargs)
    for step in range(steps):
        for params, optimizer in zip((mine, reference), optimizers, strict=False):
            set_grads(params, step)
            optimizer.step()
    return start, mine, reference


def relative_distances(start, mine, reference) -> list[float]:
    return [((a - b).norm() / (b - p).norm()).item() for p, a, b in zip(start, mine, reference, strict=False)]


def torch_muon_kwargs(group: dict) -> dict:
    return {"adjust_lr_fn" if key == "adjust_lr" else key: value for key, value in group.items() if key != "kind"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"adjust_lr": "match_rms_adamw"},
        {"nesterov": False},
        {"weight_decay": 0.0},
        {"ns_steps": 3, "momentum": 0.5},
    ],
)
def test_muon_equals_torch_in_float32(monkeypatch, change):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own casts to bf16 everywhere
    group = MUON | change
    distances = relative_distances(*run_both(SHAPES, group, torch.optim.Muon, **torch_muon_kwargs(group)))
    assert max(distances) < 1e-5  # float32 rounding; at most the order of summation differs


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("16-mixed", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
    ],
)
def test_muons_products_have_the_precision_of_the_run(monkeypatch, precision, dtype):
    seen = []
    monkeypatch.setattr(optim, "orthogonalize", lambda x, steps: seen.append((x.dtype, tuple(x.shape), steps)) or x)
    model = net()
    optimizer = build_optimizer(model, OptimConfig(), precision)
    other = build_optimizer(net(), OptimConfig(), "32-true" if precision == "bf16-mixed" else "bf16-mixed")
    optimizer.load_state_dict(other.state_dict())  # of a run in another precision
    train(model, optimizer, range(1))
    assert {x for x, *_ in seen} == {dtype}


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


@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-3}])
def test_adamw_equals_torch_to_the_bit(change):
    group = ADAMW | change
    kwargs = {key: value for key, value in group.items() if key != "kind"}
    _, mine, reference = run_both([(7, 5), (5,), ()], group, torch.optim.AdamW, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=False))


def test_each_group_follows_its_own_rule():
    mine, reference = net(), net()
    config = OptimConfig(lr=0.005, muon_lr=0.02, momentum=0.95, weight_decay=0.1, muon_weight_decay=0.2)
    optimizer = build_optimizer(mine, config, "bf16-mixed")  # torch's Muon is in bf16 on every machine
    blocks = [p for p in reference.blocks.parameters() if p.ndim == 2]
    norms = [p for p in reference.parameters() if p.ndim < 2]
    adamw = {"lr": 0.005, "betas": (0.9, 0.95), "fused": True}
    oracles = [
        torch.optim.Muon(blocks, lr=0.02, weight_decay=0.2),
        torch.optim.AdamW([reference.embed.weight, reference.head.weight], weight_decay=0.1, **adamw),
        torch.optim.AdamW(norms, weight_decay=0.0, **adamw),
    ]
    for step in range(3):
        loss_of(mine, step).backward()
        for a, b in zip(mine.parameters(), reference.parameters(), strict=False):
            b.grad = a.grad.clone()  # the same gradients for both, so that only the update is compared
        optimizer.step()
        for oracle in oracles:
            oracle.step()
        optimizer.zero_grad()
    start = dict(net().named_parameters())
    for (name, a), b in zip(mine.named_parameters(), reference.parameters(), strict=False):
        moved = (b - start[name]).norm()
        assert (a - b).norm() <= (BF16_TOLERANCE if name.startswith("blocks.") and a.ndim == 2 else 0) * moved, name


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_state_dict_round_trip_continues_to_the_bit(kind):
    config = OptimConfig(kind=kind, weight_decay=0.1)
    straight, first = net(), net()
    train(straight, build_optimizer(straight, config), range(6))

    optimizer = build_optimizer(first, config)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = net(seed=1)
    second.load_state_dict(saved["model"])
    resumed = build_optimizer(second, config)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=False))


# --- groups


def names_by_group(model: nn.Module, config: OptimConfig) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in param_groups(model, config)}


BIASES_AND_NORMS = {"norm.weight", "norm.bias"} | {
    f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "norm.bias", "up.bias")
}
BLOCK_MATRICES = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}


def test_groups_of_a_gpt():
    model = GPT(
        GPTConfig(
            vocab_size=7,
            context_length=5,
            n_layers=1,
            dim=8,
            n_heads=2,
            mlp="swiglu",
            pos="learned",
            bias=True,
            tie_embeddings=False,
        )
    )
    got = names_by_group(model, OptimConfig())
    matrices = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.up", "mlp.gate", "mlp.down")
    assert got["muon"] == {f"blocks.0.{name}.weight" for name in matrices}
    assert got["decay"] == {"embed.weight", "pos_embed.weight", "head.weight"}
    assert (
        got["no_decay"]
        == {name for name, p in model.named_parameters() if p.ndim == 1}
        > {f"blocks.0.{m}.bias" for m in matrices}
    )


def test_tied_weights_and_frozen_parameters():
    model = net()
    model.head.weight = model.embed.weight
    model.norm.requires_grad_(False)
    got = names_by_group(model, OptimConfig())
    assert got["decay"] == {"embed.weight"}
    assert got["no_decay"] == BIASES_AND_NORMS - {"norm.weight", "norm.bias"}


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
