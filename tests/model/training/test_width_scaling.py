"""optim.scale_with_width: the factors, what stays as it is, and the sizes of activations over the width."""

import copy
import functools
import math

import pytest
import torch
from torch import Tensor, nn

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import MuonAdamW, build_optimizer, param_groups
from tril.model.training.settings import OptimConfig
from tril.model.training.width_scaling import scale_initial_values

VOCABULARY, LENGTH, BATCH = 97, 32, 8
BASE = OptimConfig(base_width=64, base_head_dim=16)  # of a width of 64 with four heads
RATES = {"adamw": {"lr": 0.004}, "muon": {"lr": 0.02, "muon_lr": 0.02}}
WIDTHS = (64, 128, 256, 512)
WIDE = {"dim": 256, "n_layers": 1, "n_heads": 4, "mlp": "swiglu", "context_length": 16, "pos": "learned", "bias": True}
SCALED = {"scale_with_width": True, "base_width": 64, "base_head_dim": 16}


@functools.cache
def windows(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) of a Markov chain."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    next_token, generator = (3 * logits).softmax(-1), torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(torch.multinomial(next_token[tokens[-1]], 1, generator=generator)[:, 0])
    ids = torch.stack(tokens, 1)
    return ids[:, :-1], ids[:, 1:]


def train(width: int, kind: str, *, scaled: bool, steps: int, **choices) -> GPT:
    """A model of four heads after a few steps on `windows`."""
    torch.manual_seed(0)
    shape = {"context_length": LENGTH, "n_layers": 1, "n_heads": 4, "dim": width}
    model = GPT(GPTConfig(VOCABULARY, **{**shape, **choices}))
    base = {"scale_with_width": scaled, "base_width": 64, "base_head_dim": 16}
    optimizer = build_optimizer(model, OptimConfig(kind=kind, **RATES[kind], **base))
    if scaled:
        scale_initial_values(model, BASE)
    for step in range(steps):
        optimizer.zero_grad()
        model.nll(*windows(step)).mean().backward()
        optimizer.step()
    return model


def rates(model: GPT, config: OptimConfig) -> dict[str, float]:
    """The learning rate of the group of each parameter of the first block and outside of the blocks."""
    names = {id(p): name.removeprefix("blocks.0.") for name, p in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in param_groups(model, config) for p in group["params"]}


def parameters_of(model: GPT) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def test_adamw_factors_at_four_times_the_width():
    """All sizes are four times those of the base, so heads are too: / 4, and sqrt(1 / 4) for the scores."""
    found = rates(GPT(GPTConfig(VOCABULARY, **WIDE)), OptimConfig(kind="adamw", lr=0.5, **SCALED))
    matrices = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.up", "mlp.gate", "mlp.down")
    quarter = {f"{name}.weight" for name in matrices} | {"norm.weight"}
    factors = {name: 0.25 if name in quarter else 0.5 if name == "attn.q_norm.weight" else 1.0 for name in found}
    assert found == {name: 0.5 * factor for name, factor in factors.items()}
    assert {"embed.weight", "pos_embed.weight", "norm1.weight", "attn.k_norm.weight", "mlp.up.bias"} <= found.keys()


def test_heads_of_constant_size_and_number():
    """Only the stream grows: q, k, v have 4 times the inputs, o 4 times the outputs; the scores stay as they are."""
    model = GPT(GPTConfig(VOCABULARY, **WIDE | {"head_dim": 16}))
    by_adamw = rates(model, OptimConfig(kind="adamw", lr=0.5, **SCALED))
    assert by_adamw["attn.q_proj.weight"] == by_adamw["attn.v_proj.weight"] == 0.5 / 4
    assert by_adamw["attn.o_proj.weight"] == by_adamw["attn.q_norm.weight"] == 0.5
    by_muon = rates(model, OptimConfig(muon_lr=0.5, **SCALED))
    # Spectral norm sqrt(m / n): half for q; twice for o, which `original` has given it already by sqrt(256 / 64).
    assert (by_muon["attn.q_proj.weight"], by_muon["attn.o_proj.weight"]) == (0.25, 0.5)


@pytest.mark.parametrize("init", ["zero_out", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_initial_values(init, tied):
    model = GPT(GPTConfig(VOCABULARY, **WIDE | {"init": init, "tie_embeddings": tied}))
    before = copy.deepcopy(parameters_of(model))
    scale_initial_values(model, BASE)
    matrix = 0.5 if init == "gpt2" else 1.0  # 1 / sqrt(4); zero_out has it already
    for name, parameter in model.named_parameters():
        outside = {"norm.weight": 0.25, "norm.bias": 0.25, "blocks.0.attn.q_norm.weight": 0.5}
        factor = outside.get(name, matrix if "blocks." in name and parameter.ndim == 2 else 1.0)
        assert torch.equal(parameter, factor * before[name]), name


@pytest.mark.parametrize("kind", RATES)
def test_at_the_base_nothing_changes_to_the_bit(kind):
    with_option, without = (parameters_of(train(64, kind, scaled=scaled, steps=3)) for scaled in (True, False))
    assert all(torch.equal(with_option[name], without[name]) for name in without)
    config, model = OptimConfig(kind=kind), GPT(GPTConfig(VOCABULARY))
    plain, scaled = (param_groups(model, each) for each in (config, OptimConfig(kind=kind, scale_with_width=True)))
    for one, other in zip(plain, scaled, strict=True):
        assert [id(p) for p in one.pop("params")] == [id(p) for p in other.pop("params")] and one == other


@pytest.mark.parametrize("qk_norm", ["rmsnorm", "none"])
def test_gains_equal_fixed_factors_in_the_model(qk_norm):
    """muP as it is written: logits * 1/4 and scores * 1/2, in a model that has its usual gains and rates.

    Adam's step does not depend on the size of a gradient, up to eps. Dividing by 4 is exact in binary.
    """

    class Factor(nn.Module):
        def __init__(self, module: nn.Module, factor: float):
            super().__init__()
            self.module, self.factor = module, factor

        def forward(self, x):
            return self.factor * self.module(x)

    choices = WIDE | {"qk_norm": qk_norm, "bias": False, "mlp": "relu2"}
    torch.manual_seed(0)
    ours = GPT(GPTConfig(VOCABULARY, **choices))
    theirs = copy.deepcopy(ours)
    config = OptimConfig(kind="adamw", lr=0.004, eps=1e-20, **SCALED)
    scale_initial_values(ours, BASE)
    usual = {"norm.weight": 4, "blocks.0.attn.q_norm.weight": 2, "blocks.0.attn.q_proj.weight": 1}
    if qk_norm == "none":
        usual["blocks.0.attn.q_proj.weight"] = 2
    groups = [  # as ours, with the usual rates of what carries a factor in ours
        group | {"params": [theirs.get_parameter(name)], "lr": group["lr"] * usual.get(name, 1)}
        for group in param_groups(ours, config)
        for name in (name for name, p in ours.named_parameters() if any(p is q for q in group["params"]))
    ]
    theirs.head = Factor(theirs.head, 1 / 4)
    attn = theirs.blocks[0].attn
    attn.q_norm = Factor(attn.q_norm, 1 / 2)
    for model, optimizer in ((ours, build_optimizer(ours, config)), (theirs, MuonAdamW(groups))):
        for step in range(4):
            optimizer.zero_grad()
            ids, targets = windows(step)
            model.nll(ids[:, :16], targets[:, :16]).mean().backward()
            optimizer.step()
    ids, _ = windows(99)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids[:, :16]), theirs(ids[:, :16]), rtol=1e-4, atol=1e-5)


# --- coordinate check


@torch.no_grad()
def activations(model: GPT) -> dict[str, float]:
    """Root mean square of what each part writes, the parts of the last block, and of the logits."""
    found = {}

    def record(name):
        return lambda module, inputs, output: found.update({name: output.square().mean().sqrt().item()})

    parts = {"embed": model.embed, "attn": model.blocks[-1].attn, "mlp": model.blocks[-1].mlp, "logits": model.head}
    for name, part in parts.items():
        part.register_forward_hook(record(name))
    model(windows(10_000)[0])
    return found


def slopes(kind: str, *, scaled: bool, **choices) -> dict[str, float]:
    """The exponent of the width in each activation after some steps: log-log least squares over WIDTHS."""
    found = [
        activations(train(width, kind, scaled=scaled, steps=5, n_layers=2, mlp_ratio=2.0, **choices))
        for width in WIDTHS
    ]
    x = torch.tensor([math.log(width) for width in WIDTHS])
    x = x - x.mean()
    return {name: float(x @ torch.tensor([each[name] for each in found]).log() / (x @ x)) for name in found[0]}


GPT2_LIKE = {"init": "gpt2", "qk_norm": "none", "norm": "layernorm", "bias": True, "pos": "learned"}
CASES = {"adamw, gpt2": ("adamw", GPT2_LIKE), "muon": ("muon", {})}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_activations_do_not_grow_with_the_width(case):
    kind, choices = CASES[case]
    scaled, plain = (slopes(kind, scaled=each, **choices) for each in (True, False))
    assert max(map(abs, scaled.values())) < 0.2 and plain["logits"] > 0.4, (scaled, plain)
