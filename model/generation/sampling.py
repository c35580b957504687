"""Logits of the last position -> ids of the next tokens.

Letters: B batch, V vocabulary.

A filter sets logits to -inf and always keeps the most probable token. The order is that of Hugging Face transformers:
repetition penalty, temperature, top-k, top-p, min-p. Each filter sees what the previous one kept. (vLLM applies min-p
before top-k.)
"""

import math
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from tril.data.settings import strict_settings

MIN_TEMPERATURE = 1e-3  # keeps logits / temperature within the range of float32
MIN_NOISE = torch.finfo(torch.float32).tiny


def _zero_or_large(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        limit = f"0 (always the most probable token) or at least {MIN_TEMPERATURE}"
        raise ValueError(f"temperature={temperature} must be {limit}; use 0 for greedy decoding")
    return temperature


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_zero_or_large)]


@dataclass(frozen=True, config=strict_settings())
class SamplingConfig:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep the k most probable tokens; None: all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least this (Holtzman et al.
            2020); None: all.
        min_p: keep tokens with at least this share of the highest probability (Nguyen et al. 2024); None: all.
        repetition_penalty: above 1, tokens that the row already contains become less likely (CTRL, Keskar et al. 2019);
            1: off.

    Raises:
        pydantic.ValidationError: a value is out of range; a ValueError that lists every wrong value.
    """

    temperature: Temperature = 0.8
    top_k: Annotated[int, Field(ge=1)] | None = 50
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class Choice(NamedTuple):
    """How one step chooses its tokens, with the random numbers drawn in advance.

    Everything that differs between steps is a tensor, and so is the temperature: a compiled step serves them all.

    Attributes:
        config: the filters. Its temperature only matters in that 0 is greedy.
        vocab_size: ids from this one on are never chosen.
        temperature: () tensor, unused without `noise`.
        noise: (B, vocab_size) uniform on [0, 1); None: take the most probable token.
        seen: (B, vocab_size) bool, True = the row contains this token; None: no repetition penalty.
        allowed: (B, vocab_size) bool, True = may be chosen; None: all may.
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
        """A choice with memory for the noise, which `draw` fills."""
        noise = torch.empty(batch_size, vocab_size, device=device) if config.temperature > 0 else None
        return cls(config, vocab_size, torch.full((), config.temperature, device=device), noise, seen)

    def draw(self, generator: torch.Generator | None) -> None:
        """Draws new noise in place; does nothing at temperature 0."""
        if self.noise is not None:
            self.noise.uniform_(generator=generator)


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """Logits (B, V) -> ids (B,), without synchronizing with the device."""
    if choice.noise is None:
        return restrict(logits, choice).argmax(-1)
    # An exponential race: of independent Exp(p_i) variables, variable i is the smallest with probability p_i.
    # torch.multinomial would synchronize with a GPU to check the probabilities. MIN_NOISE keeps each variable finite,
    # and noise < 1 keeps it above 0; otherwise a single token kept by a filter could tie with the removed ones.
    exponential = -(choice.noise + MIN_NOISE).log()
    return (probabilities(logits, choice) / exponential).argmax(-1)  # (B,)


def probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """The distribution that `choose` draws from: logits (B, V) -> (B, vocab_size); one-hot at temperature 0."""
    logits = restrict(logits, choice)
    if choice.noise is None:
        return F.one_hot(logits.argmax(-1), choice.vocab_size).float()
    return apply_filters(logits / choice.temperature, choice.config).softmax(-1)


def restrict(logits: Tensor, choice: Choice) -> Tensor:
    """Logits (B, V) -> float32 (B, vocab_size): -inf where not allowed, with the repetition penalty."""
    logits = logits[:, : choice.vocab_size].float()
    if choice.allowed is not None:
        logits = logits.masked_fill(~choice.allowed, -math.inf)
    if choice.seen is not None:
        logits = penalize_repetition(logits, choice.seen, choice.config.repetition_penalty)
    return logits


def apply_filters(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Applies top-k, top-p and min-p to logits (B, V) that are already divided by the temperature."""
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None and config.min_p > 0:
        logits = keep_min_p(logits, config.min_p)
    return logits


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides the positive logits (B, V) of `seen` tokens by `penalty` and multiplies the negative ones by it."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the k largest of each row of (B, V), and all ties with the k-th."""
    kth = logits.topk(min(k, logits.shape[-1]), sorted=False).values.amin(-1, keepdim=True)  # (B, 1)
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of most probable tokens of each row of (B, V) whose probabilities sum to at least p."""
    descending, order = logits.sort(descending=True)
    probabilities = descending.softmax(-1)
    drop = probabilities.cumsum(-1) - probabilities >= p  # the more probable tokens already reach p; never the first
    return logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Keeps tokens of each row of (B, V) with at least `share` of the highest probability."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(share), -math.inf)
