"""Logits of the last position -> ids of the next tokens.

Letters: B batch, V vocabulary.

A filter sets logits to -inf and always keeps the most probable token. The order is that of Hugging Face transformers:
repetition penalty, temperature, top-k, top-p, min-p. Each filter sees what the previous one kept. (vLLM applies min-p
before top-k.)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.generation.config import SamplingConfig

MIN_NOISE = torch.finfo(torch.float32).tiny
MIN_TEMPERATURE = 1e-3  # keeps logits / temperature within float32; below, only equal logits share the probability


class Choice(NamedTuple):
    """How one step chooses its tokens, with the random numbers drawn in advance.

    Everything that differs between steps is a tensor, and so is the temperature: a compiled step serves them all.

    Attributes:
        config: the filters.
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
        cls, config: SamplingConfig, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> "Choice":
        """A choice for the tokens after B prompts, with memory for the noise, which `draw` fills."""
        noise = torch.empty(len(prompts), vocab_size, device=device) if config.temperature > 0 else None
        seen = None
        if config.repetition_penalty not in (None, 1):
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[list(prompt)] = True
            seen = seen.to(device)
        temperature = torch.full((), max(config.temperature, MIN_TEMPERATURE), device=device)
        return cls(config, vocab_size, temperature, noise, seen)

    def draw(self, generator: torch.Generator | None) -> None:
        """Draws new noise in place; does nothing at temperature 0."""
        if self.noise is not None:
            self.noise.uniform_(generator=generator)


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """Logits (B, V) -> ids (B,), without synchronizing with the device."""
    logits = filter_logits(logits, choice)
    if choice.noise is None:
        return logits.argmax(-1)
    # An exponential race: of independent Exp(p_i) variables, variable i is the smallest with probability p_i.
    # torch.multinomial would synchronize with a GPU to check the probabilities. MIN_NOISE keeps each variable finite,
    # and noise < 1 keeps it above 0; otherwise a single token kept by a filter could tie with the removed ones.
    exponential = -(choice.noise + MIN_NOISE).log()
    return (logits.softmax(-1) / exponential).argmax(-1)  # (B,)


def probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """The distribution that `choose` draws from: logits (B, V) -> (B, vocab_size); one-hot at temperature 0."""
    logits = filter_logits(logits, choice)
    return F.one_hot(logits.argmax(-1), choice.vocab_size).float() if choice.noise is None else logits.softmax(-1)


def filter_logits(logits: Tensor, choice: Choice) -> Tensor:
    """Logits (B, V) -> float32 (B, vocab_size), divided by the temperature and -inf where a filter removes the token.

    At temperature 0 the most probable token is the same without division and filters.
    """
    config, logits = choice.config, logits[:, : choice.vocab_size].float()
    if choice.allowed is not None:
        logits = logits.masked_fill(~choice.allowed, -math.inf)
    if choice.seen is not None and (penalty := config.repetition_penalty) is not None:
        logits = torch.where(choice.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if choice.noise is None:
        return logits
    logits = logits / choice.temperature
    if config.top_k is not None:  # all ties with the k-th stay
        kth = logits.topk(min(config.top_k, logits.shape[-1]), sorted=False).values.amin(-1, keepdim=True)  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if config.top_p is not None and config.top_p < 1:
        descending, order = logits.sort(descending=True)
        probabilities = descending.softmax(-1)
        drop = probabilities.cumsum(-1) - probabilities >= config.top_p  # if the more probable ones already reach p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    if config.min_p is not None and config.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(config.min_p), -math.inf)
    return logits
