"""A loss under test, and the state that its tests leave unchanged.

B batch, T positions.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from tril.model.causality.case import SLACK, Result
from tril.model.causality.subject import randomize, same_random_numbers

Losses = Callable[[Tensor, Tensor], Tensor]

MAX_RELATIVE_NOISE = 1e-4  # of the largest loss: two runs of one batch that differ more are not repeatable
ROUNDING = 1e-5  # of the largest loss, for functions that round differently when a hidden token changes
REDRAWS = 6  # of two kinds each, next to those of special ids


def per_target(losses: Losses, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, (B, T).

    Raises:
        ValueError: `losses` returns anything else.
    """
    out = losses(inputs, targets)
    if not isinstance(out, Tensor) or out.shape != targets.shape:
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        needed = f"needs one loss per target, {tuple(targets.shape)}"
        raise ValueError(f'losses(inputs, targets) returns {found} but {needed}; use reduction="none"')
    return out


@dataclass
class LossProbe:
    """A loss on one batch, in one mode of the model.

    Attributes:
        losses: inputs and targets (B, T) -> nats of each target (B, T).
        case: names weights and mode.
        model: None: its mode is unknown.
        ignored: a token whose loss is always 0, such as one for padding; None: only negative targets are ignored.
        low_precision: of the last losses.
        base, bound: losses (B, T) of the batch, and how far those that should be equal may differ from them.
    """

    losses: Losses
    inputs: Tensor
    targets: Tensor
    vocab_size: int
    model: nn.Module | None
    case: str = "current mode"
    ignored: int | None = None
    low_precision: bool = False
    base: Tensor = field(default_factory=lambda: torch.empty(0))
    bound: float = 0.0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        parameter = None if self.model is None else next(self.model.parameters(), None)
        self.device = self.inputs.device if parameter is None else parameter.device
        self.inputs, self.targets = self.inputs.to(self.device), self.targets.to(self.device)

    @property
    def counted(self) -> Tensor:
        """(B, T) bool: targets that are not ignored."""
        return (self.targets >= 0) & (self.targets != (-1 if self.ignored is None else self.ignored))

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T) float64, without gradient and with the same random numbers every time."""
        random.seed(0)
        np.random.seed(0)
        with same_random_numbers(self.device), torch.set_grad_enabled(self.model is not None and self.model.training):
            losses = per_target(self.losses, inputs.clone(), targets.clone()).detach()
        self.low_precision = losses.dtype in (torch.bfloat16, torch.float16)
        return losses.double()

    def measure(self) -> Result:
        """Sets `base` and `bound` from two runs of the batch, which have to agree."""
        self.base = self(self.inputs, self.targets)
        scale = self.base[self.counted].abs().max().item()
        noise, limit = (self(self.inputs, self.targets) - self.base).abs().max().item(), MAX_RELATIVE_NOISE * scale
        self.bound = max(SLACK * noise, ROUNDING * scale)
        where = "" if noise <= limit else f"the losses of two runs of one batch differ by {noise:.2g} nats"
        return self.result("repeatable", noise, limit, self.base.numel(), where)

    def replacements(self, tokens: Tensor) -> Iterator[Tensor]:
        """(B, T) each: random tokens, those of the batch in another order, and ids that often have a meaning."""
        usual = tokens[tokens >= 0]
        for _ in range(REDRAWS):
            yield torch.randint(self.vocab_size, tokens.shape, generator=self.generator).to(tokens)
            yield usual[torch.randint(len(usual), tokens.shape, generator=self.generator).to(usual.device)]
        for token in sorted({0, 1, 2, self.vocab_size - 2, self.vocab_size - 1} & set(range(self.vocab_size))):
            yield torch.full_like(tokens, token)

    def result(
        self,
        check: str,
        worst: float,
        bound: float,
        tested: int,
        where: str,
        query: int | None = None,
        key: int | None = None,
    ) -> Result:
        """A result that fails if `where` says so."""
        return Result(check, self.case, self.inputs.shape[1], not where, worst, bound, tested, where, query, key)


def modes(model: nn.Module | None) -> Iterator[str]:
    """Names of the weights and modes to test, which the model has while they are."""
    if model is None:
        yield "current mode"
        return
    parameter = next(model.parameters(), None)
    for weights in ("own",) if parameter is None else ("own", "random"):
        if parameter is not None and weights == "random":  # weights of 0 hide what a loss depends on
            randomize(model, torch.Generator(parameter.device).manual_seed(0))
        for training in (False, True):
            model.train(training)
            yield f"weights={weights} mode={mode_name(training)}"


def mode_name(training: bool) -> str:
    return "training" if training else "evaluation"


@contextlib.contextmanager
def restored(model: nn.Module | None) -> Iterator[None]:
    """Restores parameters, buffers, gradients and modes of the model, and the random states of torch on its device,
    numpy and Python."""
    modules = list(model.modules()) if model else []
    parameters = list(model.parameters()) if model else []
    training, buffers = [module.training for module in modules], [dict(module._buffers) for module in modules]
    tensors = [*parameters, *(x for kept in buffers for x in kept.values() if x is not None)]
    values, gradients = [x.detach().clone() for x in tensors], [p.grad for p in parameters]
    python, numpy = random.getstate(), np.random.get_state()
    for p in parameters:
        p.grad = None
    try:
        with same_random_numbers(parameters[0].device if parameters else torch.device("cpu")):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, mode, kept in zip(modules, training, buffers, strict=True):
            module.training = mode
            module._buffers.update(kept)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if not torch.equal(tensor, value):  # expanded buffers cannot be written
                    tensor.copy_(value)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
