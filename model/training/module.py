"""The LightningModule: what one step computes, what validation measures, what a checkpoint holds."""

import math

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from model.gpt import GPT, IGNORE
from model.masks import document_mask, split_documents
from model.training.optim import OptimConfig, build_optimizer
from model.training.schedule import lr_factor

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T); target IGNORE counts for nothing


class LanguageModule(LightningModule):
    """Trains a GPT on (inputs, targets).

    total_steps         optimizer steps of the run, for the schedule (the trainer's own estimate would reset a resumed loader)
    val_bytes_per_token UTF-8 bytes of the validation text per token, for bits per byte
    payload             what a checkpoint needs besides the weights to be used alone, see `model.checkpoint`
    compile             compile the loss; parameter names stay the same
    document_eot        id of the token that opens a document, where neither attention nor positions may cross from one document to the
                        next; None: a window is one text
    """

    def __init__(
        self,
        model: GPT,
        optim: OptimConfig,
        *,
        total_steps: int,
        val_bytes_per_token: float,
        payload: dict,
        compile: bool = False,
        document_eot: int | None = None,
    ):
        super().__init__()
        self.model = model
        self.optim, self.total_steps, self.payload = optim, total_steps, payload
        self.val_bytes_per_token, self.document_eot = val_bytes_per_token, document_eot
        self.nll = torch.compile(model.nll, dynamic=False) if compile else model.nll
        self._train, self._val = Mean(), Mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, targets = batch
        nll = self.losses(batch).sum()
        self._train.add(nll.detach(), (targets != IGNORE).sum())
        # Over all places, also those to ignore: so every token of an epoch weighs the same, and micro-batches add up to one batch.
        return nll / targets.numel()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, targets = batch
        self._val.add(self.losses(batch).sum(), (targets != IGNORE).sum())

    def losses(self, batch: Batch) -> Tensor:
        """Loss of each target in nats (B, T), as in `GPT.nll`."""
        inputs, targets = batch
        if self.document_eot is None:
            return self.nll(inputs, targets)
        # The last token of a document predicts the one that opens the next, and that one predicts the first of its own: no target
        # needs another document.
        documents, positions = split_documents(inputs, self.document_eot)  # (B, T) each
        return self.nll(inputs, targets, mask=document_mask(documents), positions=positions)

    def on_validation_epoch_end(self) -> None:
        loss = self._val.take(self)
        self.log_dict({"val/loss": loss, "val/bpb": loss / math.log(2) / self.val_bytes_per_token})

    def take_train_loss(self) -> Tensor:
        """Mean loss in nats per token since the last call. Not read at every step: on a GPU that would wait for it."""
        return self._train.take(self)

    def configure_optimizers(self) -> dict:
        optimizer = build_optimizer(self.model, self.optim)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.total_steps, self.optim.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["tril"] = self.payload


class Mean:
    """A running mean over tokens that stays on the device until it is taken."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, total: Tensor, count: Tensor) -> None:
        self.total, self.count = self.total + total, self.count + count

    def take(self, module: LightningModule) -> Tensor:
        """The mean over all processes; begins anew."""
        sums = module.all_gather(torch.stack([self.total.float(), self.count.float()])).view(-1, 2).sum(0)
        self.__init__()
        return sums[0] / sums[1]
