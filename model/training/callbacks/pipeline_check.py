"""The short check of the loss and of the windows that it reads, before the first step: whether targets are hidden."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tril.model.autocast import autocast
from tril.model.causality.batch_checks import Batch, check_shift
from tril.model.causality.case import Result
from tril.model.causality.loss_checks import check_canary
from tril.model.causality.loss_probe import LossProbe, restored
from tril.model.causality.target_checks import check_other_targets, check_own_targets
from tril.model.masks import document_options
from tril.model.training.module import TrainingModule

Windows = Callable[[Tensor], dict[str, Iterable[Batch]]]  # tokens (N,) -> batches of one epoch, by part of the text

MAX_BATCHES = 4  # of each part, whose targets are looked for among their inputs
CANARY_BUDGET = 3e11  # FLOPs of its training: about 3 s on a CPU
CANARY_STEPS, CANARY_FRESH = 60, 1024  # steps, and tokens that it is tested with
CANARY_ROWS, CANARY_LENGTH = 4, 32  # of each batch


def check_pipeline(module: TrainingModule, precision: str, windows: Windows, batch_size: int) -> Iterator[Result]:
    """Checks the windows of both parts, the losses of a training step and of validation, and both together.

    `certify_loss` is the full form. The weights should be random; they are the same afterwards.
    """
    config = module.model.config
    for part in windows(torch.arange(config.context_length + 2)):

        def batches(tokens: Tensor, _: torch.Generator, part: str = part) -> Iterable[Batch]:
            found = windows(tokens)[part] if len(tokens) > config.context_length + 1 else ()
            return itertools.islice(found, MAX_BATCHES)

        result, _ = check_shift(batches, config.vocab_size)
        yield replace(result, case=f"windows={part}")
    yield from check_losses(module, precision, batch_size)
    flops = module.model.flops_per_token(CANARY_LENGTH) * CANARY_STEPS * CANARY_ROWS * CANARY_LENGTH
    if flops <= CANARY_BUDGET:
        yield from short_canary(module, windows)


def check_losses(module: TrainingModule, precision: str, batch_size: int) -> Iterator[Result]:
    """The loss of a training step as it is trained, and that of validation, which is not compiled for this.

    One pass has other targets, and one of the first text has none: with dropout, in evaluation mode only.
    """
    config = module.model.config
    generator = torch.Generator().manual_seed(0)
    shape = (2, batch_size, config.context_length)
    ids, answers = torch.randint(config.vocab_size, shape, generator=generator)
    dropout = max(config.embd_dropout, config.attn_dropout, config.resid_dropout) > 0

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(module.device, precision):
            return module.losses((inputs, targets)).clone()  # the next run of a CUDA graph overwrites its output

    for training in (True, False):
        module.train(training)
        rows = batch_size if training and module.compile_mode else 1  # a compiled loss is for one shape
        probe = LossProbe(losses, ids[:rows], answers[:rows], config.vocab_size, module.model)
        probe.case = f"precision={precision} of=loss training={training}"
        with contextlib.nullcontext() if training else uncompiled(module):
            yield probe.measure()
            yield check_other_targets(probe, itertools.islice(probe.replacements(probe.targets), 1))
        if not (training and dropout):
            with torch.no_grad(), autocast(module.device, precision):
                text = probe.inputs[:1]
                logits = module.model(text, **document_options(text, module.document_eot))
            yield check_own_targets(probe, logits)


def short_canary(module: TrainingModule, windows: Windows) -> Iterator[Result]:
    """Trains a small number of steps on the beginnings of training windows of random tokens, in float32."""
    model = module.model

    def batches(tokens: Tensor, _: torch.Generator) -> Iterator[Batch]:
        for inputs, targets in windows(tokens)["train"] if len(tokens) > model.config.context_length + 1 else ():
            yield inputs[:CANARY_ROWS, :CANARY_LENGTH], targets[:CANARY_ROWS, :CANARY_LENGTH]

    one = torch.zeros(CANARY_ROWS, min(CANARY_LENGTH, model.config.context_length), dtype=torch.int64)
    probe = LossProbe(lambda *batch: module.losses(batch), one, one, model.config.vocab_size, model)
    with restored(model), uncompiled(module):
        yield from check_canary(probe, batches, CANARY_STEPS, CANARY_FRESH)


@contextlib.contextmanager
def uncompiled(module: TrainingModule) -> Iterator[None]:
    """In the block, the loss of the module is not compiled."""
    compiled, module.nll = module.nll, module.model.nll
    try:
        yield
    finally:
        module.nll = compiled
