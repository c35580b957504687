"""Token ids in, token ids out, one step at a time; `model.text` is the same for text.

B batch, T queries, S keys, L layers, H heads, V vocabulary.

Prompts of unequal length share a batch by padding on the left: a mask hides the padding and every row counts its own positions, so a
row's logits are those of the row alone. A row whose context is full goes on with the newer half of it, with the cache and without it
alike: one prefill for every half context, where dropping one token at a time would recompute everything at every step.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from model.gpt import GPT
from model.sampling import SamplingConfig, next_token


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
) -> Iterator[Tensor]:
    """Continues each prompt; yields the new ids (B,) of one step after another, on the model's device.

    prompts         ids, at least one each; of more than `context_length` the newest count
    max_new_tokens  steps
    seed            of all draws; the same seed and batch give the same ids. None: a new one each time
    use_cache       keep keys and values; without it every step computes the whole context (as it does for a model without
                    causal=True, whose past changes with the future)
    eot_id          end-of-text: a row that has it repeats it, and the end of all rows is the end. None: no token ends a row
    vocab_size      ids from here on are padding of the vocabulary and never drawn; None: draw all
    first           boolean (B, vocab_size): which ids the first step may draw. None: all
    head_gate       as in `GPT.forward`

    The model runs in evaluation mode and without gradients; between two steps it is as it was found. Raises ValueError for prompts,
    counts and seeds that cannot be.
    """
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    _check(prompts, max_new_tokens, seed, vocab_size, model.config.vocab_size)
    device = model.embed.weight.device
    generator = torch.Generator(device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    rows = Rows(model, prompts, max_new_tokens=max_new_tokens, use_cache=use_cache, head_gate=head_gate)
    seen = None if sampling.repetition_penalty == 1 else _seen(prompts, vocab_size, device)
    # A function that yields does nothing before its first step: what is wrong should show up here.
    return _steps(rows, max_new_tokens, sampling, generator, seen, eot_id, vocab_size, first)


def _steps(rows, max_new_tokens, sampling, generator, seen, eot_id, vocab_size, first) -> Iterator[Tensor]:
    ended = torch.zeros(len(rows.padding), dtype=torch.bool, device=rows.ids.device)  # (B,)
    for step in range(max_new_tokens):
        logits = rows.logits()[:, :vocab_size]  # (B, vocab_size)
        if step == 0 and first is not None:
            logits = logits.masked_fill(~first.to(logits.device), -math.inf)
        ids = next_token(logits, sampling, generator, seen)  # (B,)
        if eot_id is not None:
            ids = ids.masked_fill(ended, eot_id)
            ended |= ids == eot_id
        if seen is not None:
            seen.scatter_(1, ids[:, None], True)
        rows.append(ids)
        yield ids
        if eot_id is not None and ended.all():
            return


class Rows:
    """The token ids of a batch, left-padded to a rectangle, and the model's logits for the token after them.

    ids (B, S); padding: how many columns at the left are hidden, for each row.
    """

    def __init__(
        self, model: GPT, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, use_cache: bool = True, head_gate: Tensor | None = None
    ):
        self.model, self.head_gate, self.limit = model, head_gate, model.config.context_length
        self.modules = list(model.modules())  # once: the walk would take a tenth of a small model's step
        kept = [list(prompt[-self.limit :]) for prompt in prompts]
        longest = max(map(len, kept))
        self.ids = torch.tensor([[0] * (longest - len(row)) + row for row in kept], device=model.embed.weight.device)  # (B, S)
        self._pad([longest - len(row) for row in kept])
        capacity = min(self.limit, longest + max_new_tokens - 1)  # nothing follows the last token
        self.cache = model.new_cache(len(prompts), capacity) if use_cache and model.config.causal else None

    def logits(self) -> Tensor:
        """(B, V), for the next token of each row."""
        self._make_room()
        start, end = 0 if self.cache is None else self.cache.length, self.ids.shape[1]
        mask, positions = None, None
        if self.visible is not None:
            mask = self.visible[..., :end]  # (B, 1, 1, S)
            positions = (torch.arange(start, end, device=self.ids.device) - self.shift).clamp(min=0)  # (B, T)
        with inference(self.modules):
            hidden = self.model.hidden(
                self.ids[:, start:], cache=self.cache, mask=mask, positions=positions, head_gate=self.head_gate
            )  # (B, T, C)
            return self.model.logits(hidden[:, -1:])[:, 0]  # (B, V)

    def append(self, ids: Tensor) -> None:
        """The next token of each row, (B,)."""
        self.ids = torch.cat((self.ids, ids[:, None]), dim=1)

    def _make_room(self) -> None:
        """Rows that have outgrown the context keep its newer half; then all are computed anew, since positions have moved."""
        lengths = [self.ids.shape[1] - hidden for hidden in self.padding]
        if max(lengths) <= self.limit:
            return
        lengths = [n if n <= self.limit else max(1, self.limit // 2) for n in lengths]
        self.ids = self.ids[:, -max(lengths) :]
        self._pad([max(lengths) - n for n in lengths])
        if self.cache is not None:
            self.cache.length = 0

    def _pad(self, padding: list[int]) -> None:
        self.padding, self.visible = padding, None
        if any(padding):  # a batch of equal lengths needs neither mask nor positions
            self.shift = torch.tensor(padding, device=self.ids.device)[:, None]  # (B, 1)
            columns = torch.arange(self.limit, device=self.ids.device)
            self.visible = (columns >= self.shift)[:, None, None]  # (B, 1, 1, S)


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
            wrong.append(f"prompt {number} has ids from {min(prompt)} to {max(prompt)}; legal are 0 to {vocab_size - 1}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _is_whole(value, least: int, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
