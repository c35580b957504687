"""The short certificate that every run begins with, and the refusal to train a model that sees the future."""

import json
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from tril.model.causality.case import Cell
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import attention, documents, reach_by_gradient, reach_by_perturbation, rows
from tril.model.causality.subject import GPTSubject, Subject, randomise, windows_of
from tril.model.training.errors import RunRefused

BUDGET = 5e10  # FLOPs for each of the two reaches: a dozen positions of `nano`


class CausalityError(RunRefused):
    """The model sees what it may not see, or does not see what it should."""


class Causality(Callback):
    """Certifies, before the first step, what is about to be trained: the loss itself, in its precision, compiled if it is, at its length.

    Changed tokens go through the loss of a whole training batch in training mode; gradients and attention weights through the model that
    it compiles. Positions are the ends, some edges of blocks, and random ones (`positions_to_test`). All with weights drawn at random, since
    a fresh model's zeros hide every leak; its own are put back to the bit, and no random number of the run is used up.

    The summary becomes a part of every checkpoint; the whole lies in `folder`/causality.json.

    allow_leak  go on all the same
    """

    def __init__(self, folder: str | Path, allow_leak: bool = False):
        self.path, self.allow_leak = Path(folder) / "causality.json", allow_leak

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = {name: p.detach().clone() for name, p in pl_module.model.named_parameters()}
        modes = {part: part.training for part in pl_module.modules()}
        randomise(pl_module.model, torch.Generator(pl_module.device).manual_seed(0))
        try:
            certificate = short_certificate(pl_module, trainer.precision, trainer.datamodule.batch_size)
        finally:
            with torch.no_grad():
                for name, p in pl_module.model.named_parameters():
                    p.copy_(own[name])
            for part, training in modes.items():
                part.training = training
        summary = pl_module.payload["causality"] = certificate.summary()
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(certificate.to_dict(), indent=2) + "\n", encoding="utf-8")
            print(certificate.line(), flush=True)
        if not certificate.passed and not self.allow_leak:
            raise CausalityError(
                f"the causality certificate fails ({summary['failed'][0]}), so the losses of this model would be false; "
                f"see {self.path}, or say causality.allow_leak=true where that is meant"
            )


def short_certificate(module: LightningModule, precision: str, batch_size: int) -> Certificate:
    """What `Causality` checks, with the weights as they are; the module is left in evaluation mode."""
    config = module.model.config
    labels = {"backend": config.backend, "precision": precision}
    certificate = Certificate("the loss of a training step, and its model")
    with certificate.timed():
        model = Cell(
            GPTSubject(module.model.eval(), precision=precision),
            labels | {"of": "model"},
            [config.context_length],
            BUDGET,
        )
        ids = model.tokens(batch_size, config.context_length)
        certificate.results += reach_by_gradient(model, ids[0])
        certificate.results += attention(model, ids[0], lambda subject, ids: subject(ids))
        if module.document_eot is not None:
            certificate.results += documents(model, ids[:1])
        module.train()
        loss = Cell(
            loss_subject(module, precision, batch_size), labels | {"of": "loss"}, [config.context_length], BUDGET
        )
        loss.batch_size = batch_size  # the shape of a training step, for which it may be compiled
        certificate.results += reach_by_perturbation(loss, ids[0])
        certificate.results += rows(loss, ids)
    return certificate


def loss_subject(module: LightningModule, precision: str, batch_size: int) -> Subject:
    """The loss that is trained, (B, T, 1): one number for each position, of targets that stay the same."""
    config = module.model.config
    shape = (batch_size, config.context_length)
    targets = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(module.device)

    def run(ids: Tensor) -> Tensor:
        with torch.enable_grad():  # as in a training step: a compiler makes another graph without
            return (
                module.losses((ids, targets[: len(ids)])).detach().clone()[..., None]
            )  # a CUDA graph writes to the same place again

    return Subject(
        run,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        module=module.model,
        windows=windows_of(config),
        precision=precision,
        device=module.device,
        exact=True,
    )
