"""The LightningModule: what one step computes, what validation measures, what a checkpoint holds."""

import functools
import math
from collections.abc import Callable

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tril.model.backends import raise_recompile_limit
from tril.model.gpt import GPT, IGNORE, call_block
from tril.model.masks import document_mask, split_documents
from tril.model.training.hardware import CUDA_GRAPHS, REGIONAL
from tril.model.training.optim import OptimConfig, build_optimizer
from tril.model.training.schedule import lr_factor

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T); target IGNORE counts for nothing


class TrainingModule(LightningModule):
    """Trains a GPT on (inputs, targets).

    total_steps         optimizer steps of the run, for the schedule (the trainer's own estimate would reset a resumed loader)
    val_bytes_per_token UTF-8 bytes of the validation text per token, for bits per byte
    payload             what a checkpoint needs besides the weights to be used alone, see `model.checkpoint`
    compile             torch.compile's mode for the loss, or "regional": a block in training alone, once for all of them, which takes a
                        fraction of the time. Parameter names stay the same. None: not compiled
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
        compile: str | None = None,
        document_eot: int | None = None,
    ):
        super().__init__()
        self.model = model
        self.optim, self.total_steps, self.payload = optim, total_steps, payload
        self.val_bytes_per_token, self.document_eot = val_bytes_per_token, document_eot
        self.compile_mode = compile
        self.nll = compiled_loss(model, compile)
        self._train = Mean()
        self._val: list[Tensor | list] = []  # nats and number of targets of each window so far, (2, B) each
        self._random_states: dict[str, Tensor] = {}  # of a checkpoint, until training goes on
        self.val_windows = torch.empty(
            2, 0
        )  # of the last validation: nats and number of targets of each window, in the order of the text

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, targets = batch
        nll = self.losses(batch).sum()
        self._train.add(nll.detach(), (targets != IGNORE).sum())
        # Over all places, also those to ignore: so every token of an epoch weighs the same, and micro-batches add up to one batch.
        return nll / targets.numel()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, targets = batch
        sums = torch.stack([self.losses(batch).sum(1), (targets != IGNORE).sum(1)])  # (2, B)
        # On a CPU as plain numbers: small tensors that stay, one behind the large ones of each batch, would hold on to gigabytes.
        # Elsewhere as tensors: numbers would wait for the device, and small tensors have memory of their own there.
        self._val.append(sums.tolist() if sums.device.type == "cpu" else sums)

    def losses(self, batch: Batch) -> Tensor:
        """Loss of each target in nats (B, T), as in `GPT.nll`. With CUDA graphs they are good until the next call."""
        if self.compile_mode == CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()  # what the last call returned may be overwritten
        inputs, targets = batch
        nll = (
            self.model.nll if self.compile_mode == REGIONAL and not self.training else self.nll
        )  # validation would be another form
        if self.document_eot is None:
            return nll(inputs, targets)
        # The last token of a document predicts the one that opens the next, and that one predicts the first of its own: no target
        # needs another document.
        documents, positions = split_documents(inputs, self.document_eot)  # (B, T) each
        return nll(inputs, targets, mask=document_mask(documents), positions=positions)

    def on_validation_epoch_end(self) -> None:
        windows = torch.cat([torch.as_tensor(sums, device=self.device) for sums in self._val], 1)  # (2, N)
        windows = self.all_gather(windows).view(-1, *windows.shape)  # (ranks, 2, N)
        windows = windows.permute(1, 2, 0).flatten(1).cpu().double()  # (2, N * ranks): the ranks take turns
        self.val_windows, self._val = windows[:, windows[1] > 0], []
        nats, targets = self.val_windows.sum(1).tolist()
        loss = nats / targets
        # `Metrics` gives them to the loggers: Lightning would log them under the step before.
        self.log_dict({"val/loss": loss, "val/bpb": loss / math.log(2) / self.val_bytes_per_token}, logger=False)

    def take_train_loss(self) -> Tensor:
        """Mean loss in nats per token since the last call. Not read at every step: on a GPU that would wait for it."""
        return self._train.take(self)

    def configure_optimizers(self) -> dict:
        optimizer = build_optimizer(self.model, self.optim)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.total_steps, self.optim.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["tril"] = self.payload
        checkpoint["train_loss"] = self._train.state_dict()
        # Not self.device: after `fit` Lightning has moved the module, but not what training drew from, to the CPU.
        checkpoint["random_states"] = random_states(
            self._trainer.strategy.root_device if self._trainer else self.device
        )

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self._train.load_state_dict(checkpoint.get("train_loss", {}))  # which checkpoints of an older version lack
        self._random_states = checkpoint.get("random_states", {})

    def on_train_start(self) -> None:
        """Dropout goes on where it stopped; only here, since what comes before may draw random numbers of its own."""
        for device, state in self._random_states.items():
            torch.set_rng_state(state) if device == "cpu" else torch.get_device_module(device).set_rng_state(state)
        self._random_states = {}

    def on_train_end(self) -> None:
        """Drops the gradients: with CUDA graphs the last validation has written over them, and Lightning, which moves the module to the CPU
        with all that belongs to it, would fail."""
        self.zero_grad()


def compiled_loss(model: GPT, how: str | None) -> Callable[..., Tensor]:
    """`model.nll`, compiled as the argument of `TrainingModule` says."""
    if not how:
        return model.nll
    raise_recompile_limit()
    if how == REGIONAL:
        return functools.partial(model.nll, run_block=torch.compile(call_block, dynamic=False))
    return torch.compile(model.nll, dynamic=False, mode=how)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Of torch's generators that a run on `device` draws from."""
    states = {"cpu": torch.get_rng_state()}
    return (
        states if device.type == "cpu" else states | {device.type: torch.get_device_module(device.type).get_rng_state()}
    )


class Mean:
    """A running mean over tokens that stays on the device until it is taken."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, total: Tensor, count: Tensor) -> None:
        self.total, self.count = self.total + total, self.count + count

    def state_dict(self) -> dict[str, float]:
        return {"total": float(self.total), "count": float(self.count)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total, self.count = state.get("total", 0.0), state.get("count", 0.0)

    def take(self, module: LightningModule) -> Tensor:
        """The mean over all processes; begins anew."""
        sums = torch.stack(
            [torch.as_tensor(n, dtype=torch.float32, device=module.device) for n in (self.total, self.count)]
        )
        sums = module.all_gather(sums).view(-1, 2).sum(0)
        self.__init__()
        return sums[0] / sums[1]
