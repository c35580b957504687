"""Generates token ids from token ids, one step at a time; `model.generation.language_model` does the same for text.

B batch, T queries, S keys (the capacity of the cache in a compiled step), V vocabulary.

Prompts of unequal length share a batch by padding on the left: a mask hides the padding and positions count from each
row's first token, so the logits of a row do not depend on the other rows. A row whose context is full continues with
the newer half of it, with and without a KV cache: one prefill per half context. Dropping one token at a time would
recompute the whole context at every step.

A filter sets logits to -inf and always keeps the most probable token. The order is that of Hugging Face transformers:
repetition penalty, temperature, top-k, top-p, min-p. Each filter sees what the previous one kept. (vLLM applies min-p
before top-k.)
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.generation.config import SamplingConfig
from tril.model.gpt import GPT, raise_recompile_limit

TOKENS_PER_BATCH = 2048  # of texts that are scored: all CPU cores are busy, and the logits of a large vocabulary fit
COMPILE_OPTIONS = {
    "cuda": {"mode": "reduce-overhead"},
    # One C++ function for all kernels; matrix-vector products as generated loops instead of library calls.
    "cpu": {"options": {"cpp_wrapper": True, "post_grad_fusion_options": {"decompose_mm_pass": {}}}},
}

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


def generate_ids(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    eot_id: int | None = None,
    vocab_size: int | None = None,
    first: Tensor | None = None,
    observe: Callable[[Tensor, Choice, int], None] | None = None,
    **options,
) -> Iterator[Tensor]:
    """Continues each prompt.

    The model runs in evaluation mode and without gradients; between two steps it is in the mode of the caller.

    Args:
        prompts: B sequences of at least one id. Only the last `context_length` ids of a longer one count.
        sampling: its stop strings are for texts and have no effect here.
        eot_id: end-of-text token. A row that has reached it repeats it, and generation ends when all rows have. None:
            no token ends a row.
        vocab_size: ids from this one on pad the vocabulary and are never drawn; None: all may be drawn.
        first: (B, vocab_size) bool, the ids that the first step may draw; None: all.
        observe: called in each step with the logits (B, V), how the ids are chosen, and the length of the context.
        **options: use_cache, head_gate and compile of `Rows`.

    Yields:
        The new ids (B,) of each step, on the CPU.
    """
    device = model.embed.weight.device
    generator = torch.Generator(device)
    generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
    rows = Rows(model, prompts, max_new_tokens=sampling.max_new_tokens, **options)
    choice = Choice.of(sampling, prompts, vocab_size or model.config.vocab_size, device)
    choice = choice._replace(allowed=None if first is None else first.to(device))
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # (B,)
    for _ in range(sampling.max_new_tokens):
        choice.draw(generator)
        if observe is None:
            ids = rows.next(choice)  # (B,)
        else:
            observe(logits := rows.next(), choice, rows.length)
            ids = choose(logits, choice)
        choice = choice._replace(allowed=None)
        if eot_id is not None:
            ids = ids.masked_fill(ended, eot_id)
            ended |= ids == eot_id
        if choice.seen is not None:
            choice.seen.scatter_(1, ids[:, None], True)
        rows.append(ids)
        yield (ids := ids.cpu())
        if eot_id is not None and (ids == eot_id).all():
            return


class Rows:
    """The token ids of a batch, left-padded to a rectangle, and the model's logits for the next token.

    Args:
        use_cache: keep keys and values. Without a cache every step computes the whole context, and so it does for a
            model with causal=False, whose past states depend on the future.
        head_gate: see `GPT.forward`.
        compile: compile the step after the prompt; needs the cache. It takes seconds to a minute for each combination
            of model, number of prompts and sampling filters; the temperature may change.

    Attributes:
        ids: (B, context_length + 1) int64, of which the first `length` columns are in use.
        shift: (B, 1), number of hidden columns at the left of each row; None: no row has any.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        use_cache: bool = True,
        head_gate: Tensor | None = None,
        compile: bool = False,
    ):
        self.model, self.limit, device = model, model.config.context_length, model.embed.weight.device
        self.head_gate = None if head_gate is None else head_gate.to(device)
        self.ids = torch.zeros(len(prompts), self.limit + 1, dtype=torch.long, device=device)  # (B, context_length + 1)
        self.cache, self.step = None, None
        self._start([torch.tensor(prompt[-self.limit :], device=device) for prompt in prompts])
        if use_cache and model.config.causal:
            # No position follows the last token. A compiled step has one capacity for all lengths.
            capacity = self.limit if compile else min(self.limit, self.length + max_new_tokens - 1)
            self.cache = model.new_cache(len(prompts), capacity)
        if compile and self.cache is not None:
            self.step, self.position = compiled_step(device.type), torch.zeros(1, dtype=torch.long, device=device)
            for tensor in (*self.cache.keys, *self.cache.values):  # which a CUDA graph then writes instead of a copy
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _start(self, rows: Sequence[Tensor]) -> None:
        """Starts with these ids of each row, (T,) each, and with an empty cache."""
        self.length = max(map(len, rows))
        self.padding = [self.length - len(row) for row in rows]
        for ids, row, n in zip(self.ids, rows, self.padding, strict=True):
            ids[n : self.length] = row
        # Equal rows need no mask.
        self.shift = torch.tensor(self.padding, device=self.ids.device)[:, None] if any(self.padding) else None
        self.guards_checked = False  # the step is another program with padding than without
        if self.cache is not None:
            self.cache.length = 0

    def next(self, choice: Choice | None = None) -> Tensor:
        """The next token of each row, (B,); without a choice, the logits (B, V)."""
        if self.length > self.limit:  # all positions move, so the cache starts again
            rows = [ids[n : self.length].clone() for ids, n in zip(self.ids, self.padding, strict=True)]
            self._start([row[-max(1, self.limit // 2) :] if len(row) > self.limit else row for row in rows])
        start = 0 if self.cache is None else self.cache.length
        step, options = decode_step, {"cache": self.cache, "head_gate": self.head_gate}
        stance = contextlib.nullcontext()
        if self.cache is None or self.step is None or start == 0:
            columns, n_keys = torch.arange(start, self.length, device=self.ids.device), self.length
            options["last_only"] = True
        else:
            self.cache.advance(1)
            step, n_keys = self.step, self.cache.capacity
            options["cache_position"] = columns = self.position.fill_(start)
            # After a call with the same model, kind of choice and shapes, torch need not check every weight's guards:
            # https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
            if self.guards_checked:
                stance = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
            self.guards_checked = True
        with inference(self.model), stance:
            out = step(self.model, self.ids[:, start : self.length], columns, n_keys, self.shift, choice, **options)
        return out.clone()  # the next compiled step reuses its output memory; also, a clone may be changed in place

    def append(self, ids: Tensor) -> None:
        """Adds the next token of each row, (B,)."""
        self.ids[:, self.length] = ids
        self.length += 1


def decode_step(
    model: GPT,
    ids: Tensor,
    columns: Tensor,
    n_keys: int,
    shift: Tensor | None = None,
    choice: Choice | None = None,
    **options,
) -> Tensor:
    """The tokens (B,) that follow ids (B, T); without a choice, the logits (B, V).

    Compiled, only values of tensors differ between two steps.

    Args:
        columns: of the ids among the keys, (T,).
        n_keys: S, those of earlier tokens included.
        shift: number of left-padding tokens of each row, (B, 1), which no query sees; None: no row has any.
        **options: of `GPT.hidden`.
    """
    mask, positions = None, columns
    if shift is not None:
        mask = (torch.arange(n_keys, device=ids.device) >= shift)[:, None, None]  # (B, 1, 1, S)
        positions = (columns - shift).clamp(min=0)  # (B, T)
    logits = model.logits(model.hidden(ids, mask=mask, positions=positions, **options))[:, -1]  # (B, V)
    return logits if choice is None else choose(logits, choice)


@functools.cache
def compiled_step(device_type: str) -> Callable[..., Tensor]:
    """`decode_step`, compiled once per model, batch size and kind of choice.

    On a GPU each version becomes a CUDA graph, because launching the kernels one by one would take longer than they
    run; on a CPU it becomes one C++ function, because calling them from Python would take as long.
    """
    raise_recompile_limit()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice to compute less exactly
    return torch.compile(decode_step, **COMPILE_OPTIONS.get(device_type, {}), fullgraph=True, dynamic=False)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Disables gradients and sets evaluation mode; afterwards each module is back in its previous mode."""
    # The list takes a tenth of a small model's step, so a model in evaluation mode goes without.
    training = [module for module in model.modules() if module.training] if model.training else []
    try:
        for module in training:
            module.training = False
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


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
