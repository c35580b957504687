"""The LightningModule: a training step, validation, and the content of a checkpoint.

B batch, T context length, N windows, M targets, W ranks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tril.data.batches import IGNORE
from tril.data.datamodule import TextDataModule
from tril.data.settings import flatten
from tril.model.checkpoint import Checkpoint, code_sha256
from tril.model.gpt import GPT, call_block, raise_recompile_limit
from tril.model.masks import document_options
from tril.model.training.hardware import GRAPHS, REGIONAL
from tril.model.training.optim import build_optimizer, param_groups
from tril.model.training.schedule import lr_factor
from tril.model.training.settings import TrainingConfig

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T); targets that are IGNORE do not count
NO_TARGET = -math.inf  # in place of the loss of an ignored target, which no target has


class TrainingModule(LightningModule):
    """Trains a GPT on batches of (inputs, targets).

    Args:
        config: optimizer, schedule, steps and hardware.
        model: the GPT.
        data: the text.
        settings: all of the run, as nested plain values, for its checkpoints.
        lineage: where the initial weights come from; None: they are random.

    Attributes:
        total_steps: optimizer steps of the run (Lightning's estimate of them would reset a resumed loader).
        payload: the "tril" entry of a checkpoint, see `Checkpoint.entry`; `CausalityCheck` adds the certificate.
        nll: `GPT.nll`, compiled if training compiles it.
        train_sums: nats and number of targets since the last `take_train_loss`, float32 (2,), on the device.
        val_windows: nats and number of targets of each window of the last validation that has targets, float64 (2, N),
            on the CPU.
        val_nll: nats of each target of the last validation, float32 (M,), on the CPU.
    """

    def __init__(
        self, config: TrainingConfig, model: GPT, data: TextDataModule, settings: dict[str, Any], lineage: Any = None
    ) -> None:
        super().__init__()
        assert config.hardware is not None
        self.model, self.data, self.optim, self.total_steps = model, data, config.optim, config.trainer.max_steps
        self.document_eot = data.meta["eot_id"] if data.source.document_mask else None
        self.payload = Checkpoint(
            model.config,
            weights={},  # Lightning adds them
            tokenizer=data.tokenizer.to_str(),
            eot=data.source.tokenizer.eot,
            data=data.meta | {"prompt": data.source.prompt},
            lineage=lineage,
            settings=flatten(settings),
            code=code_sha256(),
        ).entry()
        self.nll: Callable[..., Tensor] = model.nll
        self.compiles = config.hardware.compile
        if self.compiles:
            raise_recompile_limit()
        if self.compiles == REGIONAL:
            self.nll = functools.partial(model.nll, run_block=torch.compile(call_block, dynamic=False))
        elif self.compiles:
            mode = None if self.compiles is True else self.compiles
            self.nll = torch.compile(model.nll, dynamic=False, mode=mode)
        self.train_sums = torch.zeros(2)
        self.val_windows, self.val_nll = torch.empty(2, 0), torch.empty(0)
        self._val = torch.empty(0)  # losses of the validation so far, (n_batches * B, T); on the device
        self._random_states: dict[str, Tensor] = {}  # of a checkpoint, until training starts

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each target in nats, (B, T), as in `GPT.nll`."""
        inputs, targets = batch
        if self.compiles == GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        losses = self.nll(inputs, targets, **document_options(inputs, self.document_eot))
        return losses.clone() if self.compiles == GRAPHS else losses  # the next call overwrites what a graph returns

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a micro-batch, summed and divided by all its positions, ignored ones included.

        Thus every target of an epoch has the same weight, and micro-batches and ranks add up to one large batch. The
        mean over targets is logged.
        """
        _, targets = batch
        nll = self.losses(batch).sum()
        self.train_sums = self.train_sums.to(nll.device) + torch.stack(
            [nll.detach(), (targets != IGNORE).sum().float()]
        )
        return nll / targets.numel()

    def take_train_loss(self) -> Tensor:
        """Mean loss of all processes in nats per token since the last call; 0 without targets.

        Reading it at every step would make a GPU wait.
        """
        nats, targets = self._of_all_ranks(self.train_sums).sum(0)
        self.train_sums = torch.zeros_like(self.train_sums)
        return nats / targets.clamp(min=1)

    def _of_all_ranks(self, tensor: Tensor) -> Tensor:
        """The tensors of each rank, (W, ...)."""
        return torch.as_tensor(self.all_gather(tensor)).view(-1, *tensor.shape)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keeps the loss of every target, in one tensor: small ones between the large ones of each batch would fragment
        gigabytes of a CPU's memory, and numbers would wait for a GPU."""
        nll = self.losses(batch).float().masked_fill(batch[1] == IGNORE, NO_TARGET)  # (B, T)
        if batch_idx == 0:
            n_batches = int(self.trainer.num_val_batches[0])
            self._val = nll.new_full((n_batches * len(nll), nll.shape[1]), NO_TARGET)
        self._val[batch_idx * len(nll) :][: len(nll)] = nll

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss and val/bpb over all windows of all processes, which alternate in the order of the text."""
        nll = self._of_all_ranks(self._val).transpose(0, 1).flatten(0, 1).cpu()  # (W, N, T) -> (N * W, T)
        is_target = nll != NO_TARGET
        windows = torch.stack([nll.double().masked_fill(~is_target, 0).sum(1), is_target.sum(1).double()])  # (2, N * W)
        self.val_windows, self.val_nll = windows[:, windows[1] > 0], nll[is_target]
        self._val = torch.empty(0)
        nats, targets = self.val_windows.sum(1).tolist()
        values = {"val/loss": nats / targets, "val/bpb": nats / math.log(2) / self.data.text.val_bytes(int(targets))}
        self.log_dict(values, logger=False)  # `Metrics` does, in one row with what was spent
        self._log_step()

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self._log_step()

    def on_train_epoch_end(self) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Gives the step to rows of `self.log`; without it, Lightning counts the steps before this one."""
        if self.trainer.logged_metrics:
            self.log("step", float(self.trainer.global_step))

    def configure_optimizers(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride] a subset
        """The optimizer with its schedule, per optimizer step."""
        optimizer = build_optimizer(self.model, self.optim, str(self.trainer.precision))
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.total_steps, self.optim.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what sampling and an exact continuation need."""
        sums = self._of_all_ranks(self.train_sums).sum(0)
        checkpoint["tril"] = dict(self.payload)
        checkpoint["train_loss"] = {"nats": sums[:1], "targets": sums[1:].long()}
        checkpoint["random_states"] = {}  # (W, bytes of a state); sent from device to device
        for kind in dict.fromkeys(("cpu", self.device.type)):  # in this order on all ranks
            state = random_numbers(kind).get_rng_state().to(self.device)
            checkpoint["random_states"][kind] = self._of_all_ranks(state).cpu()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads what `on_save_checkpoint` added."""
        sums = [x.sum().float() for x in checkpoint["train_loss"].values()]
        self.train_sums = torch.stack(sums) * (self.global_rank == 0)
        self._random_states = checkpoint["random_states"]

    def on_train_start(self) -> None:
        """Restores random states last, since what runs before may draw random numbers.

        The optimizer's groups get the options of this run's config; those of a checkpoint came with its state.
        """
        states, self._random_states = self._random_states, {}
        for kind, by_rank in states.items():
            if len(by_rank) == self.trainer.world_size:  # of another number of processes, each keeps its own seed's
                random_numbers(kind).set_rng_state(by_rank[self.global_rank].clone())  # torch reads a row wrongly
        schedule: Any = self.trainer.lr_scheduler_configs[0].scheduler
        factor = lr_factor(schedule.last_epoch, self.total_steps, self.optim.schedule)
        for i, group in enumerate(param_groups(self.model, self.optim)):
            schedule.base_lrs[i] = peak = group["lr"]
            options = {key: value for key, value in group.items() if key != "params"}
            schedule.optimizer.param_groups[i].update(options | {"initial_lr": peak, "lr": peak * factor})


def random_numbers(device_type: str) -> Any:
    """The module of torch that has the random numbers of a device."""
    return torch if device_type == "cpu" else torch.get_device_module(device_type)
