"""Logits of the next position -> its token.

B batch, V vocabulary. A filter sets logits to -inf, and always leaves the most probable token. The order is that of Hugging Face's
transformers: repetition penalty, temperature, top-k, top-p, min-p, each on what the ones before it left. (vLLM differs in one place:
its min-p stands before top-k.)
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUMBER = int | float
SMALLEST = torch.finfo(torch.float32).tiny
LEGAL = {  # type, range, and both in words
    "temperature": (
        NUMBER,
        lambda t: t == 0 or t >= 1e-3,
        "0 (the most probable token) or a number from 0.001 up",
    ),  # float32 bounds logits / t
    "top_k": (int | None, lambda k: k >= 1, "a whole number, at least 1, or null for all tokens"),
    "top_p": (NUMBER | None, lambda p: 0 < p <= 1, "a number above 0 and at most 1, or null for all tokens"),
    "min_p": (NUMBER | None, lambda p: 0 <= p <= 1, "a number from 0 to 1, or null for all tokens"),
    "repetition_penalty": (NUMBER, lambda r: r > 0, "a number above 0 (1 is off)"),
}


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. Raises one ValueError that lists every wrong value.

    temperature         logits are divided by it; 0 takes the most probable token
    top_k               only the k most probable tokens; None: all
    top_p               only the most probable tokens that together reach this probability (Holtzman et al. 2020); None: all
    min_p               only tokens with at least this share of the greatest probability (Nguyen et al. 2024); None: all
    repetition_penalty  above 1 disfavours the tokens that the row already has (CTRL, Keskar et al. 2019); 1: off
    """

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        values = {name: getattr(self, name) for name in LEGAL}
        wrong = [
            f"{name}={value!r} must be {LEGAL[name][2]}"
            for name, value in values.items()
            if not _legal(value, *LEGAL[name][:2])
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def _legal(value, types, in_range) -> bool:
    if not isinstance(value, types) or isinstance(value, bool):
        return False
    return value is None or (math.isfinite(value) and in_range(value))


class Choice(NamedTuple):
    """How one step chooses, with all chance drawn beforehand. What differs from step to step is a tensor, and so is the temperature: to a
    compiler they are the same program.

    config       of it all but the temperature counts, and whether that is 0
    vocab_size   ids from here on are never chosen
    temperature  (), unused where `noise` is None
    noise        uniform on [0, 1), (B, vocab_size); None: take the most probable token
    seen         boolean (B, vocab_size), True = the row has this token already; None: no repetition penalty
    allowed      boolean (B, vocab_size); None: all are
    """

    config: SamplingConfig
    vocab_size: int
    temperature: Tensor
    noise: Tensor | None = None
    seen: Tensor | None = None
    allowed: Tensor | None = None

    @classmethod
    def of(
        cls, config: SamplingConfig, batch_size: int, vocab_size: int, device: torch.device, seen: Tensor | None = None
    ) -> "Choice":
        """With memory for the noise, which `draw` fills."""
        noise = torch.empty(batch_size, vocab_size, device=device) if config.temperature > 0 else None
        return cls(config, vocab_size, torch.full((), config.temperature, device=device), noise, seen)

    def draw(self, generator: torch.Generator | None) -> None:
        """New noise in the place of the old; none at temperature 0."""
        if self.noise is not None:
            self.noise.uniform_(generator=generator)


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """Logits (B, V) -> ids (B,), without waiting for the device."""
    logits = logits[:, : choice.vocab_size].float()
    if choice.allowed is not None:
        logits = logits.masked_fill(~choice.allowed, -math.inf)
    if choice.seen is not None:
        logits = penalise_repetition(logits, choice.seen, choice.config.repetition_penalty)
    if choice.noise is None:
        return logits.argmax(-1)
    probabilities = filtered(logits / choice.temperature, choice.config).softmax(-1)  # (B, vocab_size)
    # The first of independent exponential clocks with rates p rings at i with probability p_i: the smallest Exp(1) / p. Unlike
    # torch.multinomial this does not check the probabilities, for which a GPU would have to be waited for. No clock is 0, since no noise
    # is 1, nor infinite: the lone token that a filter left would then be no better than the others.
    clocks = -(choice.noise + SMALLEST).log()
    return (probabilities / clocks).argmax(-1)  # (B,)


def next_token(
    logits: Tensor, config: SamplingConfig, generator: torch.Generator | None = None, seen: Tensor | None = None
) -> Tensor:
    """Logits (B, V) -> ids (B,), without waiting for the device.

    generator  on the device of the logits; unused at temperature 0. None: torch's global one
    seen       boolean (B, V), True = the row has this token already; without it there is no repetition penalty
    """
    choice = Choice.of(config, *logits.shape, device=logits.device, seen=seen)
    choice.draw(generator)
    return choose(logits, choice)


def filtered(logits: Tensor, config: SamplingConfig) -> Tensor:
    """The filters of `config` in their order, on logits (B, V) that temperature has already divided."""
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None and config.min_p > 0:
        logits = keep_min_p(logits, config.min_p)
    return logits


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides the positive logits (B, V) of `seen` tokens by `penalty` and multiplies the negative ones by it."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Only the k greatest of each row of (B, V); equals of the k-th stay too."""
    kth = logits.topk(min(k, logits.shape[-1]), sorted=False).values.amin(-1, keepdim=True)  # (B, 1)
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The shortest list of most probable tokens of each row of (B, V) whose probabilities reach p."""
    descending, order = logits.sort(descending=True)
    probabilities = descending.softmax(-1)
    drop = (
        probabilities.cumsum(-1) - probabilities >= p
    )  # the more probable ones suffice; never for the first, which has none
    return logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Only tokens of each row of (B, V) with at least `share` of the probability of the most probable one."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(share), -math.inf)
