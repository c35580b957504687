"""Generates token ids from token ids, one step at a time; `model.generation.language_model` does the same for text.

Letters: B batch, T queries, S keys, C width, L layers, H heads, V vocabulary.

Prompts of unequal length share a batch by padding on the left: a mask hides the padding and positions count from each
row's first token, so the logits of a row do not depend on the other rows. A row whose context is full continues with
the newer half of it, with and without a KV cache: one prefill per half context. Dropping one token at a time would
recompute the whole context at every step.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tril.model.generation.sampling import Choice, SamplingConfig
from tril.model.generation.step import compiled_step, next_tokens
from tril.model.gpt import GPT

# Steps that a device may run ahead of the reader, so that it never waits for the host. Extra results are dropped.
STEPS_AHEAD = {"cuda": 1}
TOKENS_PER_BATCH = 2048  # of texts that are scored: all CPU cores are busy, and the logits of a large vocabulary fit


def generate_ids(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    eot_id: int | None = None,
    vocab_size: int | None = None,
    first: Tensor | None = None,
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
        **options: use_cache, head_gate, compile and step of `Rows`.

    Yields:
        The new ids (B,) of each step, on the CPU.
    """
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    assert vocab_size <= model.config.vocab_size and all(min(ids) >= 0 and max(ids) < vocab_size for ids in prompts)
    device, n_steps = model.embed.weight.device, sampling.max_new_tokens
    generator = torch.Generator(device)
    generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
    rows = Rows(model, prompts, max_new_tokens=n_steps, **options)
    choice = Choice.of(sampling, prompts, vocab_size, device)
    first_choice = choice if first is None else choice._replace(allowed=first.to(device))
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # (B,)
    pending = collections.deque()
    for step in range(n_steps):
        choice.draw(generator)
        ids = rows.choose(choice if step else first_choice)  # (B,)
        if eot_id is not None and len(prompts) > 1:
            ids = ids.masked_fill(ended, eot_id)
            ended |= ids == eot_id
        if choice.seen is not None:
            choice.seen.scatter_(1, ids[:, None], True)
        rows.append(ids)
        pending.append(to_host(ids))
        # The first token is returned before the second is computed, and the last step returns all that remain.
        ahead = 0 if step in (0, n_steps - 1) else STEPS_AHEAD.get(device.type, 0)
        while len(pending) > ahead:
            yield (ids := pending.popleft()())
            if eot_id is not None and (ids == eot_id).all():
                return


def to_host(ids: Tensor) -> Callable[[], Tensor]:
    """Starts to copy `ids` to the host; the returned function waits for this copy alone, not for later device work."""
    if ids.device.type != "cuda":
        return ids.cpu
    host, copied = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(ids, non_blocking=True)
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


class Rows:
    """The token ids of a batch, left-padded to a rectangle, and the model's logits for the next token.

    Args:
        use_cache: keep keys and values. Without a cache every step computes the whole context, and so it does for a
            model with causal=False, whose past states depend on the future.
        head_gate: see `GPT.forward`.
        compile: compile the step after the prompt; needs the cache. It takes seconds to a minute for each combination
            of model, number of prompts and sampling filters; the temperature may change.
        step: instead of a compiled step; such as `decode_step`, the function that is compiled, to test it.

    Attributes:
        ids: (B, context_length + 1) int64, of which the first `length` columns are in use.
        padding: number of hidden columns at the left of each row.
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
        step: Callable[..., Tensor] | None = None,
    ):
        self.model, self.head_gate, self.limit = model, head_gate, model.config.context_length
        self.modules = list(model.modules())  # listed once: it takes a tenth of a small model's step
        kept = [list(prompt[-self.limit :]) for prompt in prompts]
        self.length = max(map(len, kept))
        padding = [self.length - len(row) for row in kept]
        device = model.embed.weight.device
        self.ids = torch.zeros(len(kept), self.limit + 1, dtype=torch.long, device=device)  # (B, context_length + 1)
        self.ids[:, : self.length] = torch.tensor([[0] * n + row for n, row in zip(padding, kept, strict=True)])
        self._pad(padding)
        # No position follows the last token. A compiled step has one capacity for all lengths.
        capacity = self.limit if compile or step else min(self.limit, self.length + max_new_tokens - 1)
        self.cache = model.new_cache(len(prompts), capacity) if use_cache and model.config.causal else None
        self.compiled, self.step = compile, step if self.cache is not None else None
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        if compile and self.cache is not None:
            self.step = compiled_step(device.type)
            for tensor in (*self.cache.keys, *self.cache.values):  # which a CUDA graph then writes instead of a copy
                torch._dynamo.mark_static_address(tensor, guard=False)

    def logits(self) -> Tensor:
        """(B, V), for the next token of each row."""
        return self.choose(None)

    def choose(self, choice: Choice | None) -> Tensor:
        """The next token of each row, (B,); without a choice, the logits (B, V)."""
        if self.length > self.limit:
            self._make_room()
        start = 0 if self.cache is None else self.cache.length
        with inference(self.modules):
            out = self._compiled(start, choice) if self.step and start > 0 else self._eager(start, choice)
        return out.clone()  # the next compiled step reuses its output memory; also, a clone may be changed in place

    def _eager(self, start: int, choice: Choice | None) -> Tensor:
        ids = self.ids[:, start : self.length]
        columns = torch.arange(start, self.length, device=ids.device)
        options = {"cache": self.cache, "head_gate": self.head_gate, "last_only": True}
        return next_tokens(self.model, ids, columns, self.length, self.shift, choice, **options)

    def _compiled(self, start: int, choice: Choice | None) -> Tensor:
        assert self.cache is not None and self.step is not None
        self.cache.advance(1)
        inputs = self.ids[:, start : self.length], self.position.fill_(start), self.shift, self.head_gate, choice
        # After a call with the same model, kind of choice and shapes, torch need not check every weight's guards again:
        # https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
        same = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True) if self.guards_checked else None
        with same or contextlib.nullcontext():
            out = self.step(self.model, self.cache, *inputs)
        self.guards_checked = self.compiled
        return out

    def append(self, ids: Tensor) -> None:
        """Adds the next token of each row, (B,)."""
        self.ids[:, self.length] = ids
        self.length += 1

    def _make_room(self) -> None:
        """Keeps the newer half of each row that exceeds the context. All positions move, so the cache starts again."""
        lengths = [self.length - hidden for hidden in self.padding]
        lengths = [n if n <= self.limit else max(1, self.limit // 2) for n in lengths]
        longest = max(lengths)
        self.ids[:, :longest] = self.ids[:, self.length - longest : self.length].clone()
        self.length = longest
        self._pad([longest - n for n in lengths])
        if self.cache is not None:
            self.cache.length = 0

    def _pad(self, padding: list[int]) -> None:
        self.padding, self.shift = padding, None
        self.guards_checked = False  # the step is another program with padding than without
        if any(padding):  # a batch of equal lengths needs no mask
            self.shift = torch.tensor(padding, device=self.ids.device)[:, None]  # (B, 1)


@contextlib.contextmanager
def inference(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disables gradients and sets evaluation mode; afterwards each module is back in its previous mode."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
