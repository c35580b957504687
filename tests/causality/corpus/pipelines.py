"""Training pipelines: how tokens become inputs and targets, and these become losses. The correct ones are here.

B batch, T positions, N tokens of a text, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import MLP, Attention, Backbone
from tests.causality.corpus.entry import END_OF_TEXT, correct
from tests.causality.corpus.mask_leaks import DocumentAttention

BATCH, LENGTH, IGNORED = 8, 32, -100
RIGHT = {"family": "look-alike: pipeline", "interface": "pipeline", "context_length": LENGTH}

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pipeline:
    """What trains and validates a model.

    Attributes:
        model: whose mode decides between training and validation.
        batches: tokens (N,) and a generator -> inputs and targets, (B, T) each, of one epoch; -100 is ignored.
        losses: inputs and targets, (B, T) each -> loss of each target, (B, T), in nats; 0 where ignored.
    """

    model: nn.Module
    batches: Callable[[Tensor, torch.Generator], Batches]
    losses: Callable[[Tensor, Tensor], Tensor]


def windows(tokens: Tensor, generator: torch.Generator, size: int = LENGTH + 1) -> Iterator[Tensor]:
    """Batches (B, size) of windows that do not overlap, in random order."""
    rows = tokens[: len(tokens) // size * size].view(-1, size)
    for chosen in torch.randperm(len(rows), generator=generator).split(BATCH):
        yield rows[chosen]


def shifted(tokens: Tensor, generator: torch.Generator) -> Batches:
    """The target of a position is the token after it."""
    for rows in windows(tokens, generator):
        yield rows[:, :-1], rows[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V) and (B, T) -> (B, T), 0 where ignored."""
    return F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")


def pipeline(model: nn.Module | None = None, batches=shifted, losses=None) -> Pipeline:
    """A pipeline with one changed part; `losses` takes the model first."""
    model = Backbone() if model is None else model

    def plain(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs), targets)

    return Pipeline(model, batches, plain if losses is None else functools.partial(losses, model))


def pairs(make: Callable[[Tensor], tuple[Tensor, Tensor]], size: int = LENGTH + 1):
    """`batches` that turn each window (B, size) into inputs and targets."""

    def batches(tokens: Tensor, generator: torch.Generator) -> Batches:
        return map(make, windows(tokens, generator, size))

    return batches


def document_model() -> Backbone:
    """A backbone that attends within documents; the caller sets `documents`, (B, T), before each call."""
    model = Backbone()
    for layer in range(2):
        model.block(layer).attn = DocumentAttention(torch.logical_and)
    return model


def with_documents(model: nn.Module, inputs: Tensor, ends: Tensor) -> Tensor:
    """Logits where the documents are numbered by `ends` (B, T), True where a new one begins."""
    for module in model.modules():
        if isinstance(module, DocumentAttention):
            module.documents = ends.cumsum(1)
    return model(inputs)


@correct(**RIGHT)
def shifted_by_one():
    """The target of a position is the next token."""
    return pipeline()


@correct(**RIGHT)
def packed_documents():
    """Packed documents do not see each other; they are numbered by their first token, an end of text."""

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(with_documents(model, inputs, inputs == END_OF_TEXT), targets)

    return pipeline(document_model(), losses=losses)


@correct(**RIGHT)
def prompt_ignored():
    """The targets of the first quarter of a window, the prompt, are ignored."""

    def make(rows: Tensor) -> tuple[Tensor, Tensor]:
        targets = rows[:, 1:].clone()
        targets[:, : LENGTH // 4] = IGNORED
        return rows[:, :-1], targets

    return pipeline(batches=pairs(make))


@correct(**RIGHT)
def dropout_in_the_pipeline():
    """Dropout in training."""
    return pipeline(Backbone(mlp=nn.Sequential(MLP(), nn.Dropout(0.2))))


@correct(**RIGHT)
def text_from_right_to_left():
    """Inputs and targets both run from right to left, shifted by one."""
    return pipeline(batches=pairs(lambda rows: (rows.flip(1)[:, :-1], rows.flip(1)[:, 1:])))


@correct(**RIGHT)
def two_tokens_ahead():
    """The target is the token after the next one, which is harder and leaks nothing."""
    return pipeline(batches=pairs(lambda rows: (rows[:, :-2], rows[:, 2:])))


@correct(**RIGHT)
def padded_documents():
    """The end of each window is padding, whose targets are ignored."""

    def make(rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        inputs[:, -4:], targets[:, -5:] = 2, IGNORED
        return inputs, targets

    return pipeline(Backbone(attn=Attention(n_kv_heads=2)), batches=pairs(make))
