"""The short certificate before the first step of every run, and the refusal to train a model that sees the future."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from tril.model.atomic_files import write_json
from tril.model.autocast import autocast
from tril.model.causality.attention_check import check_attention
from tril.model.causality.batch_checks import Batch, check_shift
from tril.model.causality.case import Case, Result
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import check_gradient, check_perturbation, check_rows
from tril.model.causality.equivalence_checks import check_documents, check_steps
from tril.model.causality.loss_checks import check_canary
from tril.model.causality.loss_probe import LossProbe, restored
from tril.model.causality.redraw_checks import check_redrawn
from tril.model.causality.subject import GPTSubject, Subject, randomize
from tril.model.causality.target_checks import check_other_targets, check_own_targets
from tril.model.gpt import GPT
from tril.model.initialization import SkipInit
from tril.model.masks import document_options
from tril.model.training.errors import RunRefused
from tril.model.training.module import Loss, TrainingModule

BUDGET = 5e10  # FLOPs of each of the two dependency matrices: a dozen positions of `nano`
EVERY_POSITION_BUDGET = 2e10  # FLOPs of a pass; a larger model would take a minute, and copies that may not fit
MAX_BATCHES = 4  # of each part of the text, whose targets are looked for among their inputs
CANARY_BUDGET = 3e11  # FLOPs of its training: about 3 s on a CPU
CANARY_STEPS, CANARY_FRESH = 60, 1024  # steps, and tokens that it is tested with
CANARY_ROWS, CANARY_LENGTH = 4, 32  # of each batch

Windows = Callable[[Tensor], dict[str, Iterable[Batch]]]  # tokens (N,) -> batches of one epoch, by part of the text


class CausalityError(RunRefused):
    """The model depends on the future, or does not depend on all of its past."""


class CausalityCheck(Callback):
    """Certifies the loss before the first step: in its precision, compiled if training compiles it, at its length.

    Changed tokens go through the loss of a whole training batch in training mode; gradients and attention weights
    through the uncompiled model. A sample of positions is tested (`positions_to_test`), with random weights, since the
    zeros of an initial model hide every leak; all positions of a model of at most `EVERY_POSITION_BUDGET` are compared
    with decoding token by token. The weights are restored exactly, and the run's random numbers are not
    consumed. At every validation the trained weights are tested with one batch of replaced tokens, and with more at the
    last one: a mask may come off later. A sharded model is tested before training only, as a whole copy on rank 0.

    Every checkpoint holds the summary and what it belongs to (`tril.model.checkpoint.verdict`); `folder`/causality.json
    holds all figures.

    Args:
        folder: of the run.
        allow_leak: train a model that fails.
    """

    def __init__(self, folder: str | Path, allow_leak: bool = False) -> None:
        self.path, self.allow_leak = Path(folder) / "causality.json", allow_leak
        self.certificate: Certificate | None = None
        self.before: list[Result] = []  # training

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Certifies a whole copy of a model that is about to be sharded, on rank 0."""
        losses, certificate = pl_module.losses, None
        if stage != "fit" or not losses.model.embed.weight.is_meta:
            return
        if trainer.is_global_zero:
            with pl_module.device, SkipInit():
                whole = GPT(losses.model.config)
            certificate = certify(Loss(whole, losses.compile, losses.document_eot), trainer)
        certificate = trainer.strategy.broadcast(certificate)
        assert certificate is not None
        self._report(trainer, pl_module, certificate)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if pl_module.certificate is None:
            self._report(trainer, pl_module, certify(pl_module.losses, trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Tests the trained weights."""
        if trainer.sanity_checking or self.certificate is None or trainer.state.fn != "fit" or pl_module.is_sharded:
            return
        is_last = trainer.should_stop or trainer.global_step >= trainer.max_steps > 0
        batch_size = trainer.datamodule.batch_size  # pyright: ignore[reportAttributeAccessIssue] set by fit
        rows = None if is_last else batch_size
        with self.certificate.timed(), restored_modes(pl_module):
            later = [*check_weights(pl_module.losses, str(trainer.precision), batch_size, rows, trainer.global_step)]
        self.certificate.results = self.before + later
        quiet = all(result.passed for result in later)
        self._report(trainer, pl_module, self.certificate, step=trainer.global_step, quiet=quiet)

    def _report(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        certificate: Certificate,
        *,
        step: int | None = None,
        quiet: bool = False,
    ) -> None:
        """Keeps the result; raises CausalityError if the model leaks and may not.

        Args:
            step: of the weights that were tested; None: random ones.
        """
        if self.certificate is None:
            self.certificate, self.before = certificate, certificate.results
        tested: dict[str, Any] = {"certified_at_step": step}
        summary = certificate.summary() | tested
        pl_module.set_certificate(summary)
        if trainer.is_global_zero:
            write_json(self.path, certificate.to_dict() | tested)
            if not quiet:
                print(certificate.line(), flush=True)
        if not certificate.passed and not self.allow_leak:
            fails = f"fails ({summary['failed'][0]}), so the losses of this model would be false"
            remedy = f"see {self.path}, or set causality.allow_leak=true to train it anyway"
            raise CausalityError(f"the causality certificate {fails}; {remedy}")


def certify(losses: Loss, trainer: Trainer) -> Certificate:
    """All checks with random weights, of the model, of the loss and of the windows; the weights are the same after."""
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] set by fit
    model, precision = losses.model, str(trainer.precision)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    randomize(model, torch.Generator(model.embed.weight.device).manual_seed(0))
    certificate = Certificate("the loss of a training step, and its model")
    try:
        with restored_modes(model), certificate.timed():
            for result in short_checks(losses, precision, data.batch_size):
                certificate.results.append(result)
            certificate.results += check_pipeline(losses, precision, data.windows_of, data.batch_size)
        return certificate
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])


def short_checks(losses: Loss, precision: str, batch_size: int) -> Iterator[Result]:
    """The checks with the current weights; leaves the model in training mode."""
    config = losses.model.config
    labels: dict[str, object] = {"backend": config.backend, "precision": precision}
    lengths = [config.context_length]
    subject = GPTSubject(losses.model.eval(), precision=precision)
    model = Case(subject, labels | {"of": "model"}, lengths, BUDGET)
    ids = model.random_tokens(batch_size, config.context_length)
    results = [*check_gradient(model, ids[0]), *check_attention(model, ids[0], lambda subject, ids: subject(ids))]
    yield from results
    if all(result.passed for result in results):  # decoding assumes a causal model
        yield from check_every_position(losses, ids[:1])
    if losses.document_eot is not None:
        yield from check_documents(model, ids[:1])
    losses.model.train()
    # The batch size of a training step, for which the loss may be compiled.
    loss = Case(
        loss_subject(losses, precision, batch_size), labels | {"of": "loss"}, lengths, BUDGET, batch_size=batch_size
    )
    yield from check_perturbation(loss, ids[0])
    yield from check_redrawn(loss, lengths, batch_size)
    yield from check_rows(loss, ids)


def check_every_position(losses: Loss, ids: Tensor) -> Iterator[Result]:
    """Decodes ids (1, T) token by token, in float32, where the smallest leak of any position shows.

    The bound needs a copy of the model in float32 and one in float64, so models above a budget are left out.
    """
    config = losses.model.config
    if 2 * losses.model.n_parameters() * config.context_length > EVERY_POSITION_BUDGET:
        return
    labels: dict[str, object] = {"backend": config.backend, "precision": "32-true", "of": "model"}
    yield from check_steps(Case(GPTSubject(losses.model), labels, [config.context_length], BUDGET), ids)


def check_weights(losses: Loss, precision: str, batch_size: int, rows: int | None, seed: int) -> Iterator[Result]:
    """Replaced texts through the model and through the loss of a training step, with the current weights.

    Args:
        rows: number of texts; None: as many as the budget of a case allows, and every position is tested once.
        seed: of the texts and of the positions from which they are replaced.
    """
    config = losses.model.config
    labels: dict[str, object] = {"weights": "own", "backend": config.backend, "precision": precision}
    lengths = [config.context_length]
    subject = GPTSubject(losses.model.eval(), precision=precision)
    generators = (torch.Generator().manual_seed(seed) for _ in range(2))
    model = Case(subject, labels | {"of": "model"}, lengths, BUDGET, generator=next(generators))
    redrawn = list(check_redrawn(model, lengths, rows))
    yield from redrawn
    if rows is None and all(result.passed for result in redrawn):
        yield from check_every_position(losses, model.random_tokens(1, config.context_length))
    losses.model.train()
    options: dict[str, Any] = {"batch_size": batch_size, "generator": next(generators)}
    loss = Case(loss_subject(losses, precision, batch_size), labels | {"of": "loss"}, lengths, BUDGET, **options)
    yield from check_redrawn(loss, lengths, rows)


def loss_subject(losses: Loss, precision: str, batch_size: int) -> Subject:
    """The loss of a training step, (B, T, 1): one number per position, for fixed targets."""
    config = losses.model.config
    shape = (batch_size, config.context_length)
    targets = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    targets = targets.to(losses.model.embed.weight.device)

    def run(ids: Tensor) -> Tensor:
        with torch.enable_grad():  # as in a training step: without gradients the compiler makes another graph
            nll = losses((ids, targets[: len(ids)])).detach()
        return nll.clone()[..., None]  # the next run of a CUDA graph overwrites its output

    subject = GPTSubject(losses.model, precision=precision)
    subject.run = run
    return subject


def check_pipeline(losses: Loss, precision: str, windows: Windows, batch_size: int) -> Iterator[Result]:
    """Checks the windows of both parts of the text, the losses of training and of validation, and both together.

    `certify_loss` is the full form. The weights should be random; they are the same afterwards.
    """
    config = losses.model.config
    for part in windows(torch.arange(config.context_length + 2)):

        def batches(tokens: Tensor, _: torch.Generator, part: str = part) -> Iterable[Batch]:
            found = windows(tokens)[part] if len(tokens) > config.context_length + 1 else ()
            return itertools.islice(found, MAX_BATCHES)

        result, _ = check_shift(batches, config.vocab_size)
        yield replace(result, case=f"windows={part}")
    yield from check_losses(losses, precision, batch_size)
    flops = losses.model.flops_per_token(CANARY_LENGTH) * CANARY_STEPS * CANARY_ROWS * CANARY_LENGTH
    if flops <= CANARY_BUDGET:
        yield from short_canary(Loss(losses.model, None, losses.document_eot), windows)


def check_losses(losses: Loss, precision: str, batch_size: int) -> Iterator[Result]:
    """The loss of a training step as it is trained, and that of validation, which is not compiled for this.

    One pass has other targets, and one of the first text has none: with dropout, in evaluation mode only.
    """
    model, config = losses.model, losses.model.config
    device = model.embed.weight.device
    shape = (2, batch_size, config.context_length)
    ids, answers = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    dropout = max(config.embd_dropout, config.attn_dropout, config.resid_dropout) > 0
    for training, each in ((True, losses), (False, Loss(model, None, losses.document_eot))):
        model.train(training)

        def run(inputs: Tensor, targets: Tensor, each: Loss = each) -> Tensor:
            with autocast(device, precision):
                return each((inputs, targets)).clone()  # the next run of a CUDA graph overwrites its output

        rows = batch_size if each.compile else 1  # a compiled loss is for one shape
        probe = LossProbe(run, ids[:rows], answers[:rows], config.vocab_size, model)
        probe.case = f"precision={precision} of=loss training={training}"
        yield probe.measure()
        yield check_other_targets(probe, itertools.islice(probe.replacements(probe.targets), 1))
        if not (training and dropout):
            with torch.no_grad(), autocast(device, precision):
                text = probe.inputs[:1]
                logits = model(text, **document_options(text, losses.document_eot))
            yield check_own_targets(probe, logits)


def short_canary(losses: Loss, windows: Windows) -> Iterator[Result]:
    """Trains a small number of steps on the beginnings of training windows of random tokens, in float32."""
    model = losses.model

    def batches(tokens: Tensor, _: torch.Generator) -> Iterator[Batch]:
        for inputs, targets in windows(tokens)["train"] if len(tokens) > model.config.context_length + 1 else ():
            yield inputs[:CANARY_ROWS, :CANARY_LENGTH], targets[:CANARY_ROWS, :CANARY_LENGTH]

    one = torch.zeros(CANARY_ROWS, min(CANARY_LENGTH, model.config.context_length), dtype=torch.int64)
    probe = LossProbe(lambda *batch: losses(batch), one, one, model.config.vocab_size, model)
    with restored(model):
        yield from check_canary(probe, batches, CANARY_STEPS, CANARY_FRESH)


@contextlib.contextmanager
def restored_modes(module: torch.nn.Module) -> Iterator[None]:
    """Restores the mode of every submodule after the block."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
