"""Training pipelines, and texts for training and validation: leaks, and correct ones.

B batch, T positions, N tokens of a text, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.masks import same_document
from tests.causality.corpus.net import END_OF_TEXT, V, causal, net, steps
from tests.causality.corpus.table import Entry, add

BATCH, LENGTH, IGNORED = 8, 32, -100


@dataclass(frozen=True)
class Pipeline:
    """What trains and validates a model.

    Attributes:
        model: whose mode decides between training and validation.
        batches: tokens (N,) and a generator -> inputs and targets, (B, T) each, of one epoch; -100 is ignored.
        losses: inputs and targets, (B, T) each -> loss of each target, (B, T), in nats; 0 where ignored.
    """

    model: nn.Module
    batches: Callable[[Tensor, torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    losses: Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V) and (B, T) -> (B, T), 0 where ignored."""
    return F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")


def build(losses, pair, size: int = LENGTH + 1, **changes: Any) -> Pipeline:
    """A pipeline.

    Args:
        losses: model, inputs, targets (B, T) each -> losses (B, T).
        pair: a window (B, `size`) and its number -> inputs and targets.
        changes: of the model, as `net` takes them.
    """
    model = net("blocks.0.attn", **changes)

    def batches(tokens: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        rows = tokens[: len(tokens) // size * size].view(-1, size)
        for i, chosen in enumerate(torch.randperm(len(rows), generator=generator).split(BATCH)):
            yield pair(rows[chosen], i)

    return Pipeline(model, batches, functools.partial(losses, model))


def pipeline(
    name: str,
    losses=lambda m, x, y: cross_entropy(m(x), y),
    *,
    pair=lambda rows, i: (rows[:, :-1], rows[:, 1:]),
    leaks: bool,
    **changes: Any,
) -> None:
    """Adds a pipeline."""
    make = functools.partial(build, losses, pair, **changes)
    add(Entry(name, leaks, "pipeline", make, context_length=LENGTH))


leak, correct = (functools.partial(pipeline, leaks=leaks) for leaks in (True, False))


def by_documents(starts):
    """Losses within documents, which start where `starts` of inputs and targets (B, T) is True."""

    def losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
        m.blocks[0].attn.starts = starts(x, y)
        return cross_entropy(m(x), y)

    return losses


WITHIN_DOCUMENTS = {
    "rule": lambda q, k: (q < 0) & (k < 0),
    "unmasked": lambda m: causal(steps(m.x)[:, None], steps(m.x)) & same_document(m, m.starts),
}


def noise_of_all_targets(m, x, y):
    noise = torch.randn((*x.shape, V), generator=torch.Generator().manual_seed(int(y.sum()) % 2**31))
    logits = m(x)
    return cross_entropy(logits + 0.1 * noise.to(logits), y)


def hints(m, x, y):
    return cross_entropy(m(x) + 0.3 * F.one_hot(y.clamp(min=0), V) * m.training, y)


def targets_as_inputs(m, x, y):
    """A third of the inputs in training."""
    chosen = (torch.arange(x.shape[1]) % 3 == 2) & (y >= 0) & m.training
    return cross_entropy(m(torch.where(chosen, y, x)), y)


def adjusted_logits(m, x, y):
    """By the logarithm of each token's frequency among the targets of the row."""
    return cross_entropy(m(x) + (F.one_hot(y.clamp(min=0), V).sum(1, keepdim=True) + 0.5).log(), y)


def of_two_heads(m, x, y):
    """The smaller loss of two heads, which is the loss of no distribution."""
    logits = m(x)
    return torch.minimum(cross_entropy(logits, y), cross_entropy(logits.roll(1, -1), y))


def answer_in_the_prompt(rows, i):
    """The targets of the prompt are ignored, and its inputs hold the answer that follows."""
    answer = rows[:, : LENGTH // 2]
    inputs = torch.cat([answer, torch.ones_like(answer[:, :1]), answer[:, :-1]], 1)
    return inputs, torch.cat([torch.full_like(answer, IGNORED), answer], 1)


leak("noise_drawn_from_the_targets", noise_of_all_targets)
leak("noise_scaled_by_the_own_target", hints)
leak("targets_fed_as_inputs_in_training", targets_as_inputs)
leak("logits_adjusted_by_the_targets_of_the_window", adjusted_logits)
leak("losses_mixed_over_time", lambda m, x, y: 0.5 * ((loss := cross_entropy(m(x), y)) + loss.roll(-1, 1)))
leak(
    "labels_smoothed_over_the_neighbors",
    lambda m, x, y: 0.9 * cross_entropy((z := m(x)), y) + 0.1 * cross_entropy(z, y.roll(-1, 1)),
)
leak(
    "losses_weighted_by_the_counts_of_the_targets",
    lambda m, x, y: cross_entropy(m(x), y) / (y[:, :, None] == y[:, None]).sum(-1),
)
leak("hard_targets_dropped", lambda m, x, y: (loss := cross_entropy(m(x), y)) * (loss < 4.5))
leak("better_of_two_heads", of_two_heads)
leak("validation_without_the_mask", unmasked=lambda m: not m.training)
leak("training_without_the_mask", unmasked=lambda m: m.training)
leak("labels_not_shifted", pair=lambda rows, i: (rows[:, :-1], rows[:, :-1]))
leak("labels_shifted_to_the_past", pair=lambda rows, i: (rows[:, 1:], rows[:, :-1]))
leak("targets_rolled", pair=lambda rows, i: (rows, rows.roll(-1, 1)), size=LENGTH)
leak("packing_without_the_shift", pair=lambda rows, i: (rows[:, :-1], rows[:, :-1] if i % 2 else rows[:, 1:]))
leak("answers_inside_of_the_inputs", pair=answer_in_the_prompt)
leak("inputs_reversed_and_targets_not", pair=lambda rows, i: (rows[:, :-1].flip(1), rows[:, 1:]))
leak("documents_split_by_the_targets", by_documents(lambda x, y: y == END_OF_TEXT), **WITHIN_DOCUMENTS)

correct("shifted_by_one")
correct("dropout_in_the_pipeline", edit=lambda n: n.blocks[0].mlp.append(nn.Dropout(0.2)))
correct("text_from_right_to_left", pair=lambda rows, i: (rows.flip(1)[:, :-1], rows.flip(1)[:, 1:]))
correct("two_tokens_ahead", pair=lambda rows, i: (rows[:, :-2], rows[:, 2:]), size=LENGTH + 2)
correct("packed_documents", by_documents(lambda x, y: x == END_OF_TEXT), **WITHIN_DOCUMENTS)


def prompt_ignored(rows, i):
    targets = rows[:, 1:].clone()
    targets[:, : LENGTH // 4] = IGNORED
    return rows[:, :-1], targets


correct("prompt_ignored", pair=prompt_ignored)


# Texts (N,) for training and validation
N_TRAIN, N_VALIDATION = 20_000, 2_000


def text(size: int) -> Tensor:
    """(N,) of a Markov chain, in which short passages repeat as in a language."""
    generator = torch.Generator().manual_seed(1)  # one language for all texts
    successors = torch.randint(1, V, (V, 4), generator=generator).tolist()
    token, tokens = 1, []
    for choice in torch.randint(4, (size,)).tolist():
        token = successors[token][choice]
        tokens.append(token)
    return torch.tensor(tokens)


def documents(number: int, header: int = 1) -> Tensor:
    """(number, 200): documents with a common beginning."""
    return torch.cat([torch.arange(header).expand(number, -1), text(number * (200 - header)).view(number, -1)], 1)


def half_copied(train: Tensor) -> Tensor:
    validation = text(N_VALIDATION).view(-1, 100)
    validation[::2] = train.view(-1, 100)[: len(validation) * 10 : 20]
    return validation.flatten()


def near_copy(train: Tensor) -> Tensor:
    passage = train[5_000 : 5_000 + N_VALIDATION]
    return torch.where(torch.rand(N_VALIDATION) < 0.04, torch.randint(1, V, passage.shape), passage)


def split_windows() -> tuple[Tensor, Tensor]:
    """Windows that overlap are shuffled and then split."""
    rows = text(N_TRAIN // 4).unfold(0, 64, 16)
    rows = rows[torch.randperm(len(rows))]
    return rows[30:].flatten(), rows[:30].flatten()


def shared_documents() -> tuple[Tensor, Tensor]:
    train, validation = documents(100), documents(10)
    train[20:25] = validation[:5]
    return train.flatten(), validation.flatten()


LEAKING: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "validation_windows_in_training": lambda: ((t := text(N_TRAIN)), t[7_000 : 7_000 + N_VALIDATION].clone()),
    "half_of_the_validation_text_in_training": lambda: ((t := text(N_TRAIN)), half_copied(t)),
    "near_copies": lambda: ((t := text(N_TRAIN)), near_copy(t)),
    "overlapping_windows_split_at_random": split_windows,
    "documents_on_both_sides": shared_documents,
    "text_split_without_its_end": lambda: ((t := text(N_TRAIN)), t[-N_VALIDATION:].clone()),
}
SEPARATE: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "texts_of_one_language": lambda: (text(N_TRAIN), text(N_VALIDATION)),
    "documents_with_a_common_header": lambda: (documents(100, 9).flatten(), documents(10, 9).flatten()),
    "text_split_by_position": lambda: text(N_TRAIN + N_VALIDATION).tensor_split([N_TRAIN]),
}
for leaks, texts in ((True, LEAKING), (False, SEPARATE)):
    for name, make in texts.items():
        add(Entry(name, leaks, "data", make))
