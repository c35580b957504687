"""The canary: tokens drawn uniformly at random cannot be predicted, so a model that learns to predict them sees them.

Whatever a causal model has learned, its expected loss on fresh tokens that are uniform over K kinds is at least ln K (Gibbs' inequality). A
lower one, by more than chance, comes from the future. Nothing is assumed about how the model looks inside.

B batch, T positions, K kinds of tokens.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.causality.subject import Subject, randomise, same_random_numbers

LENGTH = 32  # of its texts, or the context where that is shorter
KINDS = 4  # few kinds: a copying model learns them in a few steps
WARMUP = 10  # steps
Z = 5.0  # standard errors below ln K that are a leak: chance does that once in 3.5 million canaries


@dataclass(frozen=True)
class Canary:
    """Mean loss on fresh tokens and its standard error, in nats per token, and what no causal model falls below."""

    loss: float
    error: float
    bound: float
    n_tokens: int
    length: int

    @property
    def passed(self) -> bool:
        return self.below <= Z  # a NaN fails

    @property
    def below(self) -> float:
        """Standard errors below the bound, 0 where it is kept."""
        return 0.0 if self.margin >= 0 else -self.margin / self.error

    @property
    def margin(self) -> float:
        """How far the loss lies above the bound, in nats per token."""
        return self.loss - self.bound


def canary(
    subject: Subject, *, steps: int | None = None, batch_size: int = 8, lr: float = 3e-3, seed: int = 0
) -> Canary:
    """Trains a copy of the subject's module on random tokens, then measures it on fresh ones.

    From weights drawn at random: from an initialisation with zeros, or a small one, a leak is found hundreds of steps later. steps None:
    60, and 120 for a model of less than a million parameters, which needs more and costs less.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds, length = min(KINDS, subject.vocab_size), min(LENGTH, subject.context_length)
    some = torch.randperm(subject.vocab_size, generator=generator)[:kinds]
    twin = copy.deepcopy(subject)
    model = randomise(twin.module, torch.Generator(subject.device).manual_seed(seed)).train()
    if steps is None:
        steps = 120 if subject.n_parameters() < 1e6 else 60

    def draw(batch_size: int) -> Tensor:
        return some[torch.randint(kinds, (batch_size, length + 1), generator=generator)].to(subject.device)

    def losses(ids: Tensor) -> Tensor:
        return F.cross_entropy(twin.run(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    with same_random_numbers(subject.device):  # of dropout
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP)
            losses(draw(batch_size)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        fresh = losses(draw(16 * batch_size))
    return Canary(fresh.mean().item(), (fresh.std() / len(fresh) ** 0.5).item(), math.log(kinds), len(fresh), length)
