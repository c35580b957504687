"""The short certificate of a training step of a GPT: before the first one, at validations, and of a checkpoint.

The model is tested in place, with the weights that it has.

B batch, T context length, N tokens of a text, V vocabulary.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.checks import Checker, Result, Text
from tril.model.causality.gpt import with_ways
from tril.model.causality.loss import Batch, Losses, check_logits, check_shift, model_of_inputs, model_of_targets
from tril.model.causality.model import Model, call_directly, causal, randomize
from tril.model.causality.texts import Texts
from tril.model.checkpoint import Checkpoint
from tril.model.gpt import GPT
from tril.model.masks import document_options

# Texts whose hidden tokens are replaced, and outputs with gradients; about a second for a model of 10 M parameters.
ROWS, QUERIES = 8, 2
MAX_FLOPS = 2e10  # of a pass; decoding with a larger model would take a minute
MAX_STEPS = 64  # a longer context is decoded in few chunks
MAX_BATCHES = 4  # of each part of the text, whose targets are looked for among their inputs

Windows = Callable[[Tensor], dict[str, Iterable[Batch]]]  # tokens (N,) -> batches of one epoch, by part of the text


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        losses: inputs and targets (B, T) -> the losses (B, T) as training computes them, such as compiled.
        precision: of the trainer.
        lengths: of the windows of a batch, in the course of training; each has as many tokens as `batch_size` windows
            of the context length.
        document_eot: id of the token that opens a document, which attention does not cross; None: it crosses all.
    """

    gpt: GPT
    losses: Losses
    precision: str
    batch_size: int
    lengths: Collection[int]
    document_eot: int | None

    @property
    def plain_losses(self) -> Losses:
        """Those of `GPT.nll`, not compiled: a compiled loss in bf16 rounds more than a small leak."""
        return lambda x, y: self.gpt.nll(x, y, **document_options(x, self.document_eot))

    def model(self, precision: str = "32-true") -> Model:
        config, device = self.gpt.config, self.gpt.embed.weight.device
        sizes = {"vocab_size": config.vocab_size, "context_length": config.context_length, "visible": causal}
        return with_ways(Model("model", self.gpt, call_directly, **sizes, device=device, precision=precision))

    def begin(self, model: Model, variant: str, seed: int, *, repeat: bool = True) -> tuple[Checker, Text]:
        """`Checker.begin`; the seed is that of texts and positions."""
        special = () if self.document_eot is None else (self.document_eot,)
        texts = Texts(model.vocab_size, special, generator=torch.Generator().manual_seed(seed))
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "repeat": repeat}
        return Checker.begin(model, texts, variant, exact=True, relative_bound=torch.inf, **options)


def check_step(step: Step) -> Iterator[Result | str]:
    """All checks of the short certificate but that of the windows."""
    passed = True
    for result in check_weights(step, ROWS, 0):
        passed &= isinstance(result, str) or result.passed
        yield result
    yield from check_float32(step, with_ways=passed)


def check_weights(step: Step, rows: int, seed: int) -> Iterator[Result | str]:
    """Replaced tokens through the model and through the loss of a training step, in the precision of training.

    Args:
        rows: number of texts.
        seed: of the texts and of the positions from which they are replaced.
    """
    model, length = step.model(step.precision), step.gpt.config.context_length
    step.gpt.eval()
    checker, text = step.begin(model, f"model precision={step.precision}", seed)
    yield from checker.repeatable(text)
    yield from checker.future(length, rows, text)
    if (gradient := checker.gradient(length, QUERIES)) is not None:
        yield gradient[0]
    step.gpt.train()
    visible = model.visible if step.document_eot is None else causal  # an end of text changes the positions
    for length in step.lengths:
        windows = step.batch_size * step.gpt.config.context_length // length
        shape, generator = (windows, length), torch.Generator().manual_seed(0)
        targets = torch.randint(model.vocab_size, shape, generator=generator).to(model.device)
        of_inputs = replace(model_of_inputs(model, step.losses, targets), visible=visible, context_length=length)
        checker, text = step.begin(of_inputs, f"loss precision={step.precision}", seed)
        yield from checker.repeatable(text)
        yield from checker.future(length, max(rows, windows), text)


def check_float32(step: Step, *, with_ways: bool) -> Iterator[Result | str]:
    """The losses of training and validation are those of the logits, which do not know the targets.

    Args:
        with_ways: also that decoding, other lengths and packed documents give the outputs of a full pass, which is so
            for a causal model.
    """
    gpt, length = step.gpt.eval(), step.gpt.config.context_length
    checker, text = step.begin(step.model(), "model precision=32-true", 0, repeat=False)
    targets = torch.randint(gpt.config.vocab_size, text.ids.shape, generator=checker.generator)
    ids, targets = text.ids.to(checker.model.device), targets.to(checker.model.device)
    options = document_options(ids, step.document_eot)
    of_targets = model_of_targets(checker.model, step.plain_losses, ids, targets)
    documents = replace(checker.model, call=lambda gpt, ids: gpt(ids, **options))
    for training in (False, True):
        gpt.train(training)
        logits = documents(ids) if training or options else text.outputs
        yield check_logits(of_targets, targets, logits, f"loss mode={'training' if training else 'evaluation'}")
    if with_ways and 2 * gpt.n_parameters() * length <= MAX_FLOPS:
        gpt.eval()
        names = [f"{'single tokens' if length <= MAX_STEPS else 'chunks'} with the cache"]
        if step.document_eot is not None:
            names.append("a document behind another one")
        yield from checker.ways(text, [name for name in names if name in checker.model.ways])
        yield from checker.lengths(text, [n for n in (length * share // 8 for share in (7, 4, 2, 1)) if n])


def check_windows(windows: Windows, step: Step) -> Iterator[Result | str]:
    """No target of the windows of training and validation stands among its inputs."""
    config = step.gpt.config
    for part in windows(torch.arange(config.context_length + 2)):

        def batches(tokens: Tensor, _: torch.Generator, part: str = part) -> Iterable[Batch]:
            found = windows(tokens)[part] if len(tokens) > config.context_length + 1 else ()
            return itertools.islice(found, MAX_BATCHES)

        for result in check_shift(batches, config.vocab_size):
            yield replace(result, variant=f"windows={part}") if isinstance(result, Result) else result


def check_stored_step(gpt: GPT, checkpoint: Checkpoint) -> Iterator[Result | str]:
    """The checks of a training step, with the weights of a checkpoint and with random ones, which the model has then.

    Documents are separated as in the run; the precision is float32.
    """
    document_eot = checkpoint.data.get("eot_id") if checkpoint.settings.get("data.document_mask") else None
    step = Step(gpt, lambda x, y: step.plain_losses(x, y), "32-true", 2, [gpt.config.context_length], document_eot)
    yield from check_step(step)
    randomize(gpt, torch.Generator(gpt.embed.weight.device).manual_seed(0))
    yield from check_step(step)
