"""Gradient norms, and what is found wrong with a step before its update: numbers that are not finite, loss spikes."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_norm is the function of torch.nn.utils.get_total_norm for many tensors at once.

import math
from collections import defaultdict
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from pydantic import Field, validate_call
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from tril.data.settings import strict_settings
from tril.model.gpt import IGNORE
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.errors import NonFiniteError
from tril.model.training.local_shards import local
from tril.model.training.module import TrainingModule
from tril.model.training.nonfinite import first_nonfinite_gradient, first_nonfinite_output, rates_text
from tril.model.training.spikes import SpikeDetector

SKIP_KEY = "callbacks.gradients.on_nonfinite=skip"


class GradientNorms(Callback):
    """Measures the gradient of every step before clipping, and stops before an update that is not finite.

    The norms of the optimizer's groups and of all parameters are logged every `trainer.log_every_n_steps`, as
    grad_norm/NAME and grad_norm/total. One transfer per step brings the norms and the loss from the device, so that a
    GPU waits for the CPU once per step.

    With precision 16-mixed, gradients that are not finite are left to the gradient scaler, which skips their steps.

    Args:
        on_nonfinite: what to do if the loss or a gradient of a step is not finite. "stop" ends the run; "skip" leaves
            out the update: weights and optimizer state stay as they are, the schedule goes on. A validation loss that
            is not finite always ends the run.
        max_skips: consecutive steps that may be skipped.

    Attributes:
        rows: "step", "total" and the norm of each group by its name, at the logged steps.
        skipped: the steps without an update.
        detector: the spikes of the training loss.
    """

    @validate_call(config=strict_settings("callbacks.gradients"))
    def __init__(
        self, on_nonfinite: Literal["stop", "skip"] = "stop", max_skips: Annotated[int, Field(ge=1)] = 10
    ) -> None:
        self.on_nonfinite, self.max_skips = on_nonfinite, max_skips
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[int] = []
        self.detector = SpikeDetector()
        self._parameters: list[tuple[str, str, Tensor]] = []  # group, name, parameter
        self._batches: list[tuple[int, Any]] = []  # index and content of the micro-batches of this step
        self._loss: Tensor | None = None  # of this step so far, on the device
        self._train_loss_before: tuple = ()  # the module's running mean before this step
        self._norms: dict[str, float] | None = None  # of the step that was just made, by parameter

    @staticmethod
    def of(trainer: Trainer) -> "GradientNorms | None":
        """The trainer's callback; None if the user removed it."""
        return next((each for each in trainer.callbacks if isinstance(each, GradientNorms)), None)  # pyright: ignore[reportAttributeAccessIssue] dynamic

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.model.named_parameters()}
        groups = trainer.optimizers[0].param_groups
        self._parameters = [(group["name"], names[id(p)], p) for group in groups for p in group["params"]]

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        if not self._batches:
            self._train_loss_before = (pl_module._train_loss.total, pl_module._train_loss.count)
        self._batches.append((batch_idx, batch))

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        assert self._loss is not None
        targets = [(batch[1] != IGNORE).float().mean() for _, batch in self._batches]  # shares of the positions
        (loss, share), norms = self._measure(trainer, torch.stack([self._loss, torch.stack(targets).mean()]))
        batches, self._batches, self._loss = self._batches, [], None
        finite = math.isfinite(sum(norms.values()))
        if math.isfinite(loss) and (finite or scaler_of(trainer)):
            self._norms = norms if finite else None
            if share:  # the loss of a step is divided by all positions, see `TrainingModule.training_step`
                self.detector.add(trainer.global_step + 1, loss / share)
        else:
            self._refuse(trainer, pl_module, optimizer, batches, loss, norms)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        norms, self._norms = self._norms, None
        step, interval = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if norms is None or step % interval and step != trainer.max_steps:
            return
        of_groups = defaultdict(list)
        for group, name, _ in self._parameters:
            of_groups[group].append(norms.get(name, 0.0))
        row = {"total": math.hypot(*norms.values())} | {group: math.hypot(*each) for group, each in of_groups.items()}
        self.rows.append({"step": step} | row)
        metrics = {f"grad_norm/{name}": norm for name, norm in row.items()}
        if self.on_nonfinite == "skip":
            metrics["train/skipped_steps"] = float(len(self.skipped))
        Metrics.write(trainer, metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        row = Metrics.of(trainer).val[-1]
        if math.isfinite(row["loss"]):
            return
        nll = pl_module.val_windows[0]
        window = int((~nll.isfinite()).nonzero()[0])
        bad = (name for name, parameter in pl_module.model.named_parameters() if not parameter.isfinite().all())
        where = f"first in window {window:,} of {len(nll):,}; non-finite weights: {next(bad, 'none')}"
        message = f"the validation loss at step {row['step']:,} is {row['loss']}, {where}; lower optim.lr_scale"
        raise NonFiniteError(row["step"], message)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "skipped": list(self.skipped), "detector": self.detector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.skipped = list(state["rows"]), list(state["skipped"])
        self.detector.load_state_dict(state["detector"])

    def _measure(self, trainer: Trainer, means: Tensor) -> tuple[tuple[float, float], dict[str, float]]:
        """The means (2,), loss of the step and share of targets, and the norm of each parameter's gradient, of all
        processes together."""
        named = [(name, parameter.grad) for _, name, parameter in self._parameters if parameter.grad is not None]
        gradients = [gradient for _, gradient in named]
        if trainer.world_size > 1:
            means, norms = trainer.strategy.reduce(means, reduce_op="mean"), sharded_norms(gradients)
        else:
            norms = torch._foreach_norm(gradients, 2, torch.float32)
        *values, loss, share = torch.cat([torch.stack(norms), means]).tolist()  # the one transfer from the device
        if scaler := scaler_of(trainer):
            loss /= scaler.get_scale()
        return (loss, share), dict(zip((name for name, _ in named), values, strict=True))

    def _refuse(
        self,
        trainer: Trainer,
        module: TrainingModule,
        optimizer: Optimizer,
        batches: list[tuple[int, Any]],
        loss: float,
        norms: dict[str, float],
    ) -> None:
        """Leaves out the update of this step, or stops the run."""
        step = trainer.global_step + 1
        found = [
            (index, first_nonfinite_output(module, batch, trainer.precision_plugin.train_step_context()))
            for index, batch in batches
        ]
        where = self._where(trainer, module, found, norms)
        text = (
            f"step {step:,} is not finite: loss {loss:.4g}, gradient norm {math.hypot(*norms.values()):.4g}, {where}, "
            f"{rates_text(optimizer.param_groups)}; the weights stay those of step {step - 1:,}"
        )
        if self.on_nonfinite == "stop":
            raise NonFiniteError(step - 1, f"{text}; lower optim.lr_scale, or leave such steps out with {SKIP_KEY}")
        if self.skipped[-self.max_skips :] == list(range(step - self.max_skips, step)):
            limit = f"callbacks.gradients.max_skips={self.max_skips} steps before it were skipped"
            raise NonFiniteError(step - 1, f"{text}; {limit}; lower optim.lr_scale")
        self.skipped.append(step)
        optimizer.zero_grad()  # parameters without a gradient are not updated
        module._train_loss.total, module._train_loss.count = self._train_loss_before
        if trainer.is_global_zero:
            tqdm.write(f"skipped: {text}")

    @staticmethod
    def _where(
        trainer: Trainer, module: TrainingModule, found: list[tuple[int, str | None]], norms: dict[str, float]
    ) -> str:
        """The batch and the first module of this step, of the first process with a non-finite output, in words."""
        ranks: list[list[tuple[int, str | None]]] = [found]
        if trainer.world_size > 1:
            ranks = [found] * trainer.world_size
            dist.all_gather_object(ranks, found)
        epoch = trainer.current_epoch
        for rank, each in enumerate(ranks):
            for index, name in each:
                if name is not None:
                    of_rank = f" of rank {rank}" if trainer.world_size > 1 else ""
                    return f"batch {index:,}{of_rank} in epoch {epoch}, first non-finite output {name}"
        first, last = found[0][0], found[-1][0]
        batches = f"batch {first:,}" if first == last else f"batches {first:,} to {last:,}"
        gradient = first_nonfinite_gradient(module.model, norms)
        return f"{batches} in epoch {epoch}, all outputs finite, first non-finite gradient {gradient}"


def scaler_of(trainer: Trainer) -> torch.amp.GradScaler | None:
    """The gradient scaler of precision 16-mixed."""
    return getattr(trainer.precision_plugin, "scaler", None)


def sharded_norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, 0-dim float32. A DTensor's is that of the whole tensor, on all ranks.

    One all-reduce for each dimension of a device mesh that gradients are sharded over, and not one for each gradient.
    """
    from torch.distributed.tensor import DTensor

    shards = [local(each) for each in gradients]
    squares = torch.stack(torch._foreach_norm(shards, 2, torch.float32)).double().square()  # (P,)
    layouts = defaultdict(list)
    for i, each in enumerate(gradients):
        if isinstance(each, DTensor):
            layouts[each.device_mesh, each.placements].append(i)
    for (mesh, placements), indices in layouts.items():
        of_layout = squares[indices]
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(of_layout, group=mesh.get_group(dim))
        squares[indices] = of_layout
    return list(squares.sqrt().float().unbind())
