"""Short trainings of small models of several widths, for the tests of optim.scale_with_width."""

import functools

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import OptimConfig, build_optimizer
from tril.model.training.schedule import ScheduleConfig, lr_factor
from tril.model.training.width_scaling import scale_initial_values

VOCABULARY, LENGTH, BATCH = 97, 32, 8
BASE = OptimConfig(base_width=64, base_head_dim=16)  # of a width of 64 with four heads
RATES = {"adamw": {"lr": 0.004}, "muon": {"lr": 0.02, "muon_lr": 0.02}}


@functools.cache
def next_token() -> Tensor:
    """Probabilities of the next token (V, V), with an entropy of 2.1 nats: learnable, but not within some steps."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    return (3 * logits).softmax(-1)


@functools.cache
def windows(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a Markov chain."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(torch.multinomial(next_token()[tokens[-1]], 1, generator=generator)[:, 0])
    ids = torch.stack(tokens, 1)
    return ids[:, :-1], ids[:, 1:]


def trained(
    width: int, kind: str, *, scaled: bool, steps: int, lr_scale: float = 1.0, seed=0, decay=False, **choices
) -> GPT:
    """A model of four heads after a few steps on `windows`, at a constant rate or one that decays to 0."""
    torch.manual_seed(seed)
    shape = {"context_length": LENGTH, "n_layers": 1, "n_heads": 4, "dim": width}
    model = GPT(GPTConfig(VOCABULARY, **{**shape, **choices}))
    base = {"scale_with_width": scaled, "base_width": 64, "base_head_dim": 16}
    optimizer = build_optimizer(model, OptimConfig(kind=kind, lr_scale=lr_scale, **RATES[kind], **base))
    if scaled:
        scale_initial_values(model, BASE)
    config = ScheduleConfig(kind="linear" if decay else "constant", warmup_steps=5 if decay else 0)
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, steps, config))
    for step in range(steps):
        optimizer.zero_grad()
        model.nll(*windows(step)).mean().backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def loss(model: GPT) -> float:
    """Of windows that no training reads, in nats per token."""
    return sum(model.nll(*windows(10_000 + i)).mean().item() for i in range(8)) / 8
