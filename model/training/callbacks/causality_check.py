"""The short certificate before the first step of every run, and the refusal to train a model that sees the future."""

import hashlib
import json
import operator
import platform
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from tril.model.atomic_files import write_json
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import Result
from tril.model.causality.loss import Batch, restored, restored_modes
from tril.model.causality.model import randomize
from tril.model.causality.step import ROWS, Step, check_step, check_weights, check_windows
from tril.model.checkpoint import code_sha256
from tril.model.gpt import GPT
from tril.model.initialization import SkipInit
from tril.model.training.errors import RunRefused
from tril.model.training.module import Loss, TrainingModule

SHARED = "certificates"  # the folder in that of a sweep


class CausalityError(RunRefused):
    """The model depends on the future, or does not depend on all of its past."""


class CausalityCheck(Callback):
    """Certifies the loss before the first step: in its precision, compiled if training compiles it, at its length.

    Replaced tokens go through the loss of a whole training batch in training mode, and through the uncompiled model;
    so do gradients, decoding and packed documents. The weights are random, since the zeros of an initial model hide
    every leak. They are restored exactly, and the run's random numbers are not consumed. At every validation the
    trained weights are tested with one batch of replaced tokens, and with more at the last one: a mask may come off
    later. A sharded model is tested before training only, as a whole copy on rank 0.

    At every step of training and validation the model must be given the batch of the loader itself, unchanged: another
    one may contain its targets. A validation window must not be one of the training text.

    Every checkpoint holds the summary and what it belongs to (`tril.model.checkpoint.verdict`); `folder`/causality.json
    holds all figures.

    Args:
        folder: of the run.
        allow_leak: train a model that fails.
        sweep: the folder of the run's sweep, which certifies each model once, see `identity`; None: this run is
            certified by itself.
    """

    def __init__(self, folder: str | Path, allow_leak: bool = False, sweep: Path | None = None) -> None:
        self.path, self.allow_leak, self.sweep = Path(folder) / "causality.json", allow_leak, sweep
        self.certificate: Certificate | None = None
        self.before: list[Result] = []  # training
        self.batch: Batch | None = None  # of the loader, for the current step
        self.contents: list[int | torch.Tensor] = []

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
            self._report(trainer, pl_module, certify(pl_module.losses, trainer, self.sweep))

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, *_: Any) -> None:
        self.batch, self.contents, pl_module.losses.batch = batch, contents_of(batch), None

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Looks up a window of the batches 0, 1, 2, 4, 8 and so on: among those of training, none is to be found."""
        self.on_train_batch_start(trainer, pl_module, batch)
        contains = getattr(getattr(trainer, "datamodule", None), "contains", None)
        if contains is None or batch_idx & (batch_idx - 1):
            return
        window = batch[0][batch_idx % len(batch[0])].cpu()
        if not contains("val", window) and contains("train", window):
            where = f"the loader of validation yields a window of the training text in batch {batch_idx}"
            self._fail(trainer, pl_module, Result("overlap", "validation as it runs", len(window), 1, 0, 1, where))

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, *_: Any) -> None:
        self._check_step(trainer, pl_module, "training_step")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: TrainingModule, *_: Any) -> None:
        self._check_step(trainer, pl_module, "validation_step")

    def _check_step(self, trainer: Trainer, pl_module: TrainingModule, name: str) -> None:
        batch, given = self.batch, pl_module.losses.batch
        assert batch is not None
        same = given is not None and all(map(operator.is_, batch, given))
        if not same or not all(map(is_unchanged, batch, self.contents)):
            where = f"{name} passes other inputs or targets than those of its batch to the loss"
            where += ": inputs may contain targets"
            result = Result("targets", f"{name} as it runs", batch[0].shape[1], torch.inf, 0.0, 1, where)
            self._fail(trainer, pl_module, result)

    def _fail(self, trainer: Trainer, pl_module: TrainingModule, result: Result) -> None:
        if self.certificate is not None and self.certificate.passed:  # a model that may leak is reported once
            self.certificate.results = self.before = [*self.before, result]
            self._report(trainer, pl_module, self.certificate, step=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Tests the trained weights."""
        if trainer.sanity_checking or self.certificate is None or trainer.state.fn != "fit" or pl_module.is_sharded:
            return
        is_last = trainer.should_stop or trainer.global_step >= trainer.max_steps > 0
        step, later = step_of(pl_module.losses, trainer), Certificate("")
        with self.certificate.timed(), restored_modes(pl_module):
            later.add(check_weights(step, ROWS if is_last else min(ROWS, step.batch_size), trainer.global_step))
        self.certificate.results = self.before + later.results
        self._report(trainer, pl_module, self.certificate, step=trainer.global_step, quiet=later.passed)

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


def contents_of(batch: Batch) -> list[int | torch.Tensor]:
    """What shows that a tensor was changed in place: its version, which makes no GPU wait.

    A copy for those of validation: tensors that were made in inference mode have no version.
    """
    return [x.clone() if x.is_inference() else x._version for x in batch]


def is_unchanged(tensor: torch.Tensor, contents: int | torch.Tensor) -> bool:
    return torch.equal(tensor, contents) if isinstance(contents, torch.Tensor) else tensor._version == contents


def step_of(losses: Loss, trainer: Trainer) -> Step:
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] set by fit
    windows, precision = (data.batch_size, data.lengths), str(trainer.precision)
    return Step(losses.model, lambda x, y: losses((x, y)), precision, *windows, losses.document_eot)


def certify(losses: Loss, trainer: Trainer, sweep: Path | None = None) -> Certificate:
    """All checks with random weights, of the model, of the loss and of the windows; the weights are the same after.

    Args:
        sweep: its folder, where the results of the model and of its loss are kept for runs that have the same.
    """
    step, data = step_of(losses, trainer), trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] set by fit
    certificate = Certificate("the loss of a training step, and its model")
    with restored(losses.model), certificate.timed():
        randomize(losses.model, torch.Generator(losses.model.embed.weight.device).manual_seed(0))
        path = sweep / SHARED / f"{identity(step, losses.compile)}.json" if sweep is not None else None
        if path is not None and path.is_file():
            certificate.results = [Result(**row) for row in json.loads(path.read_text("utf-8"))]
            certificate.notes.append("the same model was certified in another run of this sweep")
        else:
            certificate.add(check_step(step))
            if path is not None and certificate.passed:
                path.parent.mkdir(exist_ok=True)
                write_json(path, [vars(result) for result in certificate.results])
        certificate.add(check_windows(data.windows_of, step))
    return certificate


def identity(step: Step, compile: str | None) -> str:
    """sha256 of what decides the results: the config of the model, how it is trained, source files and machine.

    Code that a user adds to a run can change a model besides these, so such a run does not share its certificate.
    """
    training = step.precision, step.batch_size, [*step.lengths], compile, step.document_eot
    device = step.gpt.embed.weight.device.type
    machine = platform.machine(), platform.python_version(), torch.__version__
    return hashlib.sha256(repr((step.gpt.config, *training, device, code_sha256(), *machine)).encode()).hexdigest()
