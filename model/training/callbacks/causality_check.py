"""The short certificate before the first step of every run, and the refusal to train a model that sees the future."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from tril.model.atomic_files import write_json
from tril.model.causality.certificate import Certificate
from tril.model.causality.claims import Result
from tril.model.causality.loss import restored
from tril.model.causality.model import randomize
from tril.model.causality.step import Step, check_plain, check_weights, check_windows
from tril.model.training.module import TrainingModule
from tril.model.training.settings import UserError


class CausalityCheck(Callback):
    """Certifies the loss before the first step: in its precision, compiled if training compiles it, at its length.

    Replaced tokens go through the loss of a whole training batch in training mode, and through the uncompiled model;
    so do gradients, decoding and packed documents. The weights are random, since the zeros of an initial model hide
    every leak. They are restored exactly, and the run's random numbers are not consumed. At every validation the
    trained weights are tested with replaced tokens: a mask may come off later.

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

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if pl_module.payload.get("certificate") is None:
            self.certificate = certify(pl_module, trainer)
            self.before = self.certificate.results
            self._report(self.certificate, trainer, pl_module, None)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Tests the trained weights."""
        if self.certificate is None or trainer.state.fn != "fit":
            return
        later = Certificate("")
        with later.running():
            check_weights(later, step_of(pl_module, trainer), trainer.global_step)
        pl_module.eval()  # as Lightning has it at a validation, after which it restores all modes
        self.certificate.results = self.before + later.results
        self.certificate.seconds += later.seconds
        self._report(self.certificate, trainer, pl_module, trainer.global_step)

    def _report(self, certificate: Certificate, trainer: Trainer, pl_module: TrainingModule, step: int | None) -> None:
        """Keeps the result; raises UserError if the model leaks and may not.

        Args:
            step: of the weights that were tested; None: random ones.
        """
        tested: dict[str, Any] = {"certified_at_step": step}
        summary = pl_module.payload["certificate"] = certificate.summary() | tested
        failed = summary["failed"]
        if trainer.is_global_zero:
            write_json(self.path, certificate.to_dict() | tested)
            if failed or step is None:
                spent = f"{certificate.seconds:.1f} s" + (" with compilation" if pl_module.compiles else "")
                says = f"certified in {spent} ({len(certificate.results)} checks)"
                print(f"causal  FAILS: {failed[0]}" if failed else f"causal  {says}", flush=True)
        if failed and not self.allow_leak:
            fails = f"fails ({failed[0]}), so the losses of this model would be false"
            remedy = f"see {self.path}, or set causality.allow_leak=true to train it anyway"
            raise UserError(f"the causality certificate {fails}; {remedy}")


def step_of(module: TrainingModule, trainer: Trainer) -> Step:
    windows, precision = (module.data.batch_size, module.data.lengths), str(trainer.precision)
    return Step(module.model, lambda x, y: module.losses((x, y)), precision, *windows, module.document_eot)


def certify(module: TrainingModule, trainer: Trainer) -> Certificate:
    """All checks with random weights, of the model, of the loss and of the windows; the weights are the same after."""
    step, device = step_of(module, trainer), module.model.embed.weight.device
    certificate = Certificate("the loss of a training step, and its model")
    with certificate.running(), restored(module.model):
        randomize(module.model, torch.Generator(device).manual_seed(0))
        check_weights(certificate, step, 0)
        check_plain(certificate, step)
        check_windows(certificate, module.data.windows_of, step)
    return certificate
