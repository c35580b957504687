"""The canary test: a model that learns to predict uniformly random tokens sees them.

The expected loss of any causal model on fresh tokens that are uniform over K kinds is at least ln K (Gibbs'
inequality). A loss below that by more than chance comes from the future. The test assumes nothing about the inside of
the model.

B batch, T positions, K kinds of tokens.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.causality.subject import Subject, randomize, same_random_numbers

LENGTH = 32  # of its texts, or the context length where that is shorter
KINDS = 4  # few kinds, so that a model which copies them learns it in a few steps
WARMUP = 10  # steps
Z = 5.0  # standard errors below ln K that count as a leak; chance reaches that once in 3.5 million tests


@dataclass(frozen=True)
class Canary:
    """Mean loss on fresh tokens, its standard error, and the lower bound for causal models, in nats per token."""

    loss: float
    error: float
    bound: float
    n_tokens: int
    length: int

    @property
    def passed(self) -> bool:
        return self.below <= Z  # False for NaN

    @property
    def below(self) -> float:
        """Standard errors below the bound, 0 for a loss above it."""
        return 0.0 if self.margin >= 0 else -self.margin / self.error

    @property
    def margin(self) -> float:
        """Loss minus bound, in nats per token."""
        return self.loss - self.bound


def canary(
    subject: Subject, *, steps: int | None = None, batch_size: int = 8, lr: float = 3e-3, seed: int = 0
) -> Canary:
    """Trains a copy of the subject's module on random tokens, then measures its loss on fresh ones.

    The copy has random weights: from an initialization with zeros or small values, it takes hundreds of steps more to
    learn through a leak.

    Args:
        steps: None: 60, or 120 for a model of less than a million parameters, which needs more and costs less.
    """
    generator = torch.Generator().manual_seed(seed)
    n_kinds, length = min(KINDS, subject.vocab_size), min(LENGTH, subject.context_length)
    kinds = torch.randperm(subject.vocab_size, generator=generator)[:n_kinds].to(subject.device)
    subject = copy.deepcopy(subject)
    assert subject.module is not None, "a plain function cannot be trained"
    model = randomize(subject.module, torch.Generator(subject.device).manual_seed(seed)).train()
    if steps is None:
        steps = 120 if subject.n_parameters() < 1e6 else 60

    def random_texts(batch_size: int) -> Tensor:
        """Numbers of kinds, (B, T + 1)."""
        return torch.randint(n_kinds, (batch_size, length + 1), generator=generator).to(subject.device)

    def losses(texts: Tensor) -> Tensor:
        logits = subject.run(kinds[texts[:, :-1]])[..., kinds].float()  # the bound holds for the kinds alone, too
        return F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten(), reduction="none")

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    with same_random_numbers(subject.device):  # for dropout
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP)
            losses(random_texts(batch_size)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        fresh = losses(random_texts(16 * batch_size))
    return Canary(fresh.mean().item(), (fresh.std() / len(fresh) ** 0.5).item(), math.log(n_kinds), len(fresh), length)
