"""The short certificate before the first step of every run, and the refusal to train a model that sees the future."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from pydantic import validate_call
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tril.data.settings import strict_settings
from tril.model.atomic_files import write_json
from tril.model.causality.attention_check import check_attention
from tril.model.causality.case import Case, Result
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import check_gradient, check_perturbation, check_rows
from tril.model.causality.equivalence_checks import check_documents, check_steps
from tril.model.causality.redraw_checks import check_redrawn
from tril.model.causality.subject import GPTSubject, Subject, randomize
from tril.model.gpt import GPT
from tril.model.stored_model import SkipInit
from tril.model.training.callbacks.pipeline_check import check_pipeline
from tril.model.training.errors import RunRefused
from tril.model.training.module import TrainingModule, compiled_loss

BUDGET = 5e10  # FLOPs of each of the two dependency matrices: a dozen positions of `nano`
EVERY_POSITION_BUDGET = 2e10  # FLOPs of a pass; a larger model would take a minute, and copies that may not fit


class CausalityError(RunRefused):
    """The model depends on the future, or does not depend on all of its past."""


class CausalityCheck(Callback):
    """Certifies the loss before the first step: in its precision, compiled if training compiles it, at its length.

    Changed tokens go through the loss of a whole training batch in training mode; gradients and attention weights
    through the uncompiled model. A sample of positions is tested (`positions_to_test`), with random weights, since the
    zeros of an initial model hide every leak; all positions of a model of at most `EVERY_POSITION_BUDGET` are compared
    with decoding token by token. The weights are restored exactly, and the run's random numbers are not
    consumed. At every validation the trained weights are tested with one batch of replaced tokens, and with more at the
    last one: a mask may come off later.

    Every checkpoint holds the summary and what it belongs to (`tril.model.binding`); `folder`/causality.json holds all
    figures.

    Args:
        folder: of the run.
        allow_leak: train a model that fails.
    """

    @validate_call(config=strict_settings("callbacks.causality"))
    def __init__(self, folder: str | Path, allow_leak: bool = False):
        self.path, self.allow_leak = Path(folder) / "causality.json", allow_leak
        self.certificate: Certificate | None = None
        self.before: list[Result] = []  # training

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Certifies a whole copy of a model that is about to be divided, on rank 0."""
        if stage != "fit" or not pl_module.model.embed.weight.is_meta:
            return
        certificate = None
        if trainer.is_global_zero:
            with whole_weights(pl_module):
                certificate = self._certify(trainer, pl_module)
        certificate = trainer.strategy.broadcast(certificate)
        assert certificate is not None
        self._report(trainer, pl_module, certificate)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if pl_module.certificate is None:
            self._report(trainer, pl_module, self._certify(trainer, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Tests the trained weights; a divided model is tested before training only."""
        if trainer.sanity_checking or self.certificate is None or trainer.state.fn != "fit" or is_divided(pl_module):
            return
        batch_size = trainer.datamodule.batch_size  # pyright: ignore[reportAttributeAccessIssue] set by fit
        is_last = trainer.should_stop or trainer.global_step >= trainer.max_steps > 0
        rows = None if is_last else batch_size
        with self.certificate.timed(), restored_modes(pl_module):
            later = list(check_weights(pl_module, str(trainer.precision), batch_size, rows, trainer.global_step))
        self.certificate.results = self.before + later
        quiet = all(result.passed for result in later)
        self._report(trainer, pl_module, self.certificate, step=trainer.global_step, quiet=quiet)

    def _certify(self, trainer: Trainer, pl_module: TrainingModule) -> Certificate:
        weights = {name: p.detach().clone() for name, p in pl_module.model.named_parameters()}
        randomize(pl_module.model, torch.Generator(pl_module.device).manual_seed(0))
        try:
            batch_size = trainer.datamodule.batch_size  # pyright: ignore[reportAttributeAccessIssue] set by fit
            windows = trainer.datamodule.windows_of  # pyright: ignore[reportAttributeAccessIssue]
            precision = str(trainer.precision)
            with restored_modes(pl_module):
                certificate = short_certificate(pl_module, precision, batch_size)
                with certificate.timed():
                    certificate.results += check_pipeline(pl_module, precision, windows, batch_size)
                return certificate
        finally:
            with torch.no_grad():
                for name, p in pl_module.model.named_parameters():
                    p.copy_(weights[name])

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


def is_divided(module: torch.nn.Module) -> bool:
    """Whether processes share the weights; FSDP gathers those of some modules between two passes."""
    return any(isinstance(p, DTensor) for p in module.parameters()) or any(
        isinstance(part, FSDPModule) for part in module.modules()
    )


@contextlib.contextmanager
def whole_weights(module: TrainingModule) -> Iterator[None]:
    """In the block, the module has a model with weights of its own, of the same config."""
    divided, nll = module.model, module.nll
    with module.device, SkipInit():
        module.model = GPT(divided.config)
    module.nll = compiled_loss(module.model, module.compile_mode)
    try:
        yield
    finally:
        module.model, module.nll = divided, nll


def short_certificate(module: TrainingModule, precision: str, batch_size: int) -> Certificate:
    """The checks of `CausalityCheck` with the current weights; leaves the module in training mode."""
    config = module.model.config
    labels: dict[str, object] = {"backend": config.backend, "precision": precision}
    lengths = [config.context_length]
    certificate = Certificate("the loss of a training step, and its model")
    with certificate.timed():
        model = Case(GPTSubject(module.model.eval(), precision=precision), labels | {"of": "model"}, lengths, BUDGET)
        ids = model.random_tokens(batch_size, config.context_length)
        certificate.results += check_gradient(model, ids[0])
        certificate.results += check_attention(model, ids[0], lambda subject, ids: subject(ids))
        if certificate.passed:  # decoding assumes a causal model
            certificate.results += check_every_position(module, ids[:1])
        if module.document_eot is not None:
            certificate.results += check_documents(model, ids[:1])
        module.train()
        # The batch size of a training step, for which the loss may be compiled.
        subject = loss_subject(module, precision, batch_size)
        loss = Case(subject, labels | {"of": "loss"}, lengths, BUDGET, batch_size=batch_size)
        certificate.results += check_perturbation(loss, ids[0])
        certificate.results += check_redrawn(loss, lengths, batch_size)
        certificate.results += check_rows(loss, ids)
    return certificate


def check_every_position(module: TrainingModule, ids: Tensor) -> Iterator[Result]:
    """Decodes ids (1, T) token by token, in float32, where the smallest leak of any position shows.

    The bound needs a copy of the model in float32 and one in float64, so models above a budget are left out.
    """
    config = module.model.config
    if 2 * module.model.n_parameters() * config.context_length > EVERY_POSITION_BUDGET:
        return
    labels: dict[str, object] = {"backend": config.backend, "precision": "32-true", "of": "model"}
    yield from check_steps(Case(GPTSubject(module.model), labels, [config.context_length], BUDGET), ids)


def check_weights(
    module: TrainingModule, precision: str, batch_size: int, rows: int | None, seed: int
) -> Iterator[Result]:
    """Replaced texts through the model and through the loss of a training step, with the current weights.

    Args:
        rows: number of texts; None: as many as the budget of a case allows, and every position is tested once.
        seed: of the texts and of the positions from which they are replaced.
    """

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    config = module.model.config
    labels: dict[str, object] = {"weights": "own", "backend": config.backend, "precision": precision}
    lengths = [config.context_length]
    module.model.eval()
    subject = GPTSubject(module.model, precision=precision)
    model = Case(subject, labels | {"of": "model"}, lengths, BUDGET, generator=generator())
    redrawn = list(check_redrawn(model, lengths, rows))
    yield from redrawn
    if rows is None and all(result.passed for result in redrawn):
        yield from check_every_position(module, model.random_tokens(1, config.context_length))
    module.train()
    subject = loss_subject(module, precision, batch_size)
    loss = Case(subject, labels | {"of": "loss"}, lengths, BUDGET, batch_size=batch_size, generator=generator())
    yield from check_redrawn(loss, lengths, rows)


@contextlib.contextmanager
def restored_modes(module: torch.nn.Module) -> Iterator[None]:
    """Restores the mode of every submodule after the block."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def loss_subject(module: TrainingModule, precision: str, batch_size: int) -> Subject:
    """The loss of a training step, (B, T, 1): one number per position, for fixed targets."""
    config = module.model.config
    shape = (batch_size, config.context_length)
    targets = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(module.device)

    def run(ids: Tensor) -> Tensor:
        with torch.enable_grad():  # as in a training step: without gradients the compiler makes another graph
            losses = module.losses((ids, targets[: len(ids)])).detach()
        return losses.clone()[..., None]  # the next run of a CUDA graph overwrites its output

    subject = GPTSubject(module.model, precision=precision)
    subject.run = run
    return subject
