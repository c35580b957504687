"""Token ids in, token ids out, one step at a time; `model.text` is the same for text.

B batch, T queries, S keys, L layers, H heads, V vocabulary.

Prompts of unequal length share a batch by padding on the left: a mask hides the padding and every row counts its own positions, so a
row's logits are those of the row alone. A row whose context is full goes on with the newer half of it, with the cache and without it
alike: one prefill for every half context, where dropping one token at a time would recompute everything at every step.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tril.model.generation.sampling import Choice, SamplingConfig, choose
from tril.model.generation.step import compiled_step, keep_address, skip_guard_eval
from tril.model.gpt import GPT

# Steps that a device is ahead of the reader, so that it never waits for the host; what it does beyond the end is dropped.
LATE = {"cuda": 1}


def generate_ids(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int | None = None,
    use_cache: bool = True,
    eot_id: int | None = None,
    vocab_size: int | None = None,
    first: Tensor | None = None,
    head_gate: Tensor | None = None,
    compile: bool = False,
) -> Iterator[Tensor]:
    """Continues each prompt; yields the new ids (B,) of one step after another, on the CPU.

    prompts         ids, at least one each; of more than `context_length` the newest count
    max_new_tokens  steps
    seed            of all draws; the same seed and batch give the same ids. None: a new one each time
    use_cache       keep keys and values; without it every step computes the whole context (as it does for a model without
                    causal=True, whose past changes with the future)
    eot_id          end-of-text: a row that has it repeats it, and the end of all rows is the end. None: no token ends a row
    vocab_size      ids from here on are padding of the vocabulary and never drawn; None: draw all
    first           boolean (B, vocab_size): which ids the first step may draw. None: all
    head_gate       as in `GPT.forward`
    compile         compile the step after the prompt, once for each model, number of prompts and way to choose (another temperature is the
                    same way), in seconds to a minute; needs the cache

    The model runs in evaluation mode and without gradients; between two steps it is as it was found. Raises ValueError for prompts,
    counts and seeds that cannot be.
    """
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    _check(prompts, max_new_tokens, seed, vocab_size, model.config.vocab_size)
    if compile and not use_cache:
        raise ValueError("compile=True needs use_cache=True: it compiles the step with the cache; change one of them")
    device = model.embed.weight.device
    generator = torch.Generator(device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    rows = Rows(
        model, prompts, max_new_tokens=max_new_tokens, use_cache=use_cache, head_gate=head_gate, compile=compile
    )
    seen = None if sampling.repetition_penalty == 1 else _seen(prompts, vocab_size, device)
    # A function that yields does nothing before its first step: what is wrong should show up here.
    return _steps(
        rows, max_new_tokens, Choice.of(sampling, len(prompts), vocab_size, device, seen), generator, eot_id, first
    )


def _steps(rows, max_new_tokens, choice, generator, eot_id, first) -> Iterator[Tensor]:
    batch_size, device = len(rows.padding), rows.ids.device
    ended = (
        torch.zeros(batch_size, dtype=torch.bool, device=device) if eot_id is not None and batch_size > 1 else None
    )  # (B,)
    late = LATE.get(device.type, 0)
    on_the_way = collections.deque()
    for step in range(max_new_tokens):
        choice.draw(generator)
        ids = rows.choose(
            choice._replace(allowed=first.to(device)) if step == 0 and first is not None else choice
        )  # (B,)
        if ended is not None:
            ids = ids.masked_fill(ended, eot_id)
            ended |= ids == eot_id
        if choice.seen is not None:
            choice.seen.scatter_(1, ids[:, None], True)
        rows.append(ids)
        on_the_way.append(to_host(ids))
        while on_the_way and (
            len(on_the_way) > late or step in (0, max_new_tokens - 1)
        ):  # the first is not made to wait for the second
            yield (ids := on_the_way.popleft()())
            if eot_id is not None and (ids == eot_id).all():  # a row that has ended repeats it
                return


def to_host(ids: Tensor) -> Callable[[], Tensor]:
    """Begins to copy `ids` to the host; the result waits for the copy alone, not for what the device was given to do after it."""
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
    """The token ids of a batch, left-padded to a rectangle, and the model's logits for the token after them.

    ids (B, context_length + 1), of which the first `length` columns count; padding: how many of them are hidden, for each row.
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
        self.model, self.head_gate, self.limit = model, head_gate, model.config.context_length
        self.modules = list(model.modules())  # once: the walk would take a tenth of a small model's step
        kept = [list(prompt[-self.limit :]) for prompt in prompts]
        self.length = max(map(len, kept))
        padding = [self.length - len(row) for row in kept]
        device = model.embed.weight.device
        self.ids = torch.zeros(len(kept), self.limit + 1, dtype=torch.long, device=device)  # (B, context_length + 1)
        self.ids[:, : self.length] = torch.tensor([[0] * hidden + row for hidden, row in zip(padding, kept)])
        self._pad(padding)
        capacity = (
            self.limit if compile else min(self.limit, self.length + max_new_tokens - 1)
        )  # nothing follows the last token
        self.cache = model.new_cache(len(prompts), capacity) if use_cache and model.config.causal else None
        self.step = compiled_step(device.type) if compile and self.cache is not None else None
        if self.step is not None:
            keep_address(self.cache)
            self.position = torch.zeros(1, dtype=torch.long, device=device)

    def logits(self) -> Tensor:
        """(B, V), for the next token of each row."""
        return self._next(None)

    def choose(self, choice: Choice) -> Tensor:
        """The next token of each row, (B,)."""
        return self._next(choice)

    def _next(self, choice: Choice | None) -> Tensor:
        if self.length > self.limit:
            self._make_room()
        start, end = 0 if self.cache is None else self.cache.length, self.length
        ids = self.ids[:, start:end]  # (B, T)
        with inference(self.modules):
            if self.step is not None and start > 0:
                self.cache.advance(1)
                shift = None if self.visible is None else self.shift
                with skip_guard_eval() if self.compiled else contextlib.nullcontext():
                    out = self.step(
                        self.model, self.cache, ids, self.position.fill_(start), shift, self.head_gate, choice
                    )
                self.compiled = True
            else:
                mask, positions = (
                    (None, None) if self.visible is None else (self.visible[..., :end], self.positions[:, start:end])
                )
                options = {"mask": mask, "positions": positions, "head_gate": self.head_gate}
                hidden = self.model.hidden(ids, cache=self.cache, **options, last_only=True)  # (B, 1, C)
                logits = self.model.logits(hidden)[:, 0]  # (B, V)
                out = logits if choice is None else choose(logits, choice)
        return out.clone()  # the next compiled step writes where this one wrote; and it can be changed in place outside of inference mode

    def append(self, ids: Tensor) -> None:
        """The next token of each row, (B,)."""
        self.ids[:, self.length] = ids
        self.length += 1

    def _make_room(self) -> None:
        """Rows that have outgrown the context keep its newer half; then all are computed anew, since positions have moved."""
        lengths = [self.length - hidden for hidden in self.padding]
        lengths = [n if n <= self.limit else max(1, self.limit // 2) for n in lengths]
        new = max(lengths)
        self.ids[:, :new] = self.ids[:, self.length - new : self.length].clone()
        self.length = new
        self._pad([new - n for n in lengths])
        if self.cache is not None:
            self.cache.length = 0

    def _pad(self, padding: list[int]) -> None:
        self.padding, self.visible = padding, None
        self.compiled = False  # with or without padding, the step has another form
        if any(padding):  # a batch of equal lengths needs neither mask nor positions
            columns = torch.arange(self.limit, device=self.ids.device)
            self.shift = torch.tensor(padding, device=self.ids.device)[:, None]  # (B, 1)
            self.visible = (columns >= self.shift)[:, None, None]  # (B, 1, 1, context_length)
            self.positions = (columns - self.shift).clamp(min=0)  # (B, context_length)


@contextlib.contextmanager
def inference(modules: Sequence[nn.Module]) -> Iterator[None]:
    """No gradients, and evaluation mode; afterwards each module is back in the mode it had."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def _seen(prompts, vocab_size: int, device: torch.device) -> Tensor:
    """Which tokens each prompt has: boolean (B, V)."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, prompt in zip(seen, prompts):
        row[list(prompt)] = True
    return seen.to(device)


def _check(prompts, max_new_tokens, seed, vocab_size, n_rows) -> None:
    wrong = [] if prompts else ["there is no prompt; give at least one"]
    if not _is_whole(max_new_tokens, 1):
        wrong.append(f"max_new_tokens={max_new_tokens!r} must be a whole number, at least 1")
    if seed is not None and not _is_whole(seed, 0, 2**64 - 1):  # what torch.Generator takes
        wrong.append(f"seed={seed!r} must be a whole number from 0 to 2**64 - 1, or null for a new one each time")
    if not 1 <= vocab_size <= n_rows:
        wrong.append(f"vocab_size={vocab_size} must be from 1 to the model's {n_rows}")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            wrong.append(f"prompt {number} is empty; begin with one token, such as end-of-text")
        elif min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong.append(
                f"prompt {number} has ids from {min(prompt)} to {max(prompt)}; legal are 0 to {vocab_size - 1}"
            )
    if wrong:
        raise ValueError("; ".join(wrong))


def _is_whole(value, least: int, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
