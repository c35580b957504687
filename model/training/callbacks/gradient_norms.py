"""Gradient norms, and the stop before an update with numbers that are not finite."""

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
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.errors import NonFiniteError
from tril.model.training.module import TrainingModule
from tril.model.training.shards import is_sharded, local


class GradientNorms(Callback):
    """Measures the gradient of every step before clipping, and stops before an update that is not finite.

    The norms of the optimizer's groups and of all parameters are logged every `trainer.log_every_n_steps`, as
    grad_norm/NAME and grad_norm/total. One transfer per step brings the norms and the loss from the device.

    With precision 16-mixed, gradients that are not finite are left to the gradient scaler, which skips their steps.

    Args:
        on_nonfinite: what to do if the loss or a gradient of a step is not finite. "stop" ends the run; "skip" leaves
            out the update: weights and optimizer state stay as they are, the schedule goes on. A validation loss that
            is not finite always ends the run.
        max_skips: consecutive steps that may be skipped.

    Attributes:
        rows: "step", "total" and the norm of each group by its name, at the logged steps.
        skipped: the steps without an update.
    """

    @validate_call(config=strict_settings("callbacks.gradients"))
    def __init__(
        self, on_nonfinite: Literal["stop", "skip"] = "stop", max_skips: Annotated[int, Field(ge=1)] = 10
    ) -> None:
        self.on_nonfinite, self.max_skips = on_nonfinite, max_skips
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[int] = []
        self._loss: Tensor | None = None  # of this step so far, on the device
        self._norms: dict[str, float] = {}  # of the step that was just made, by group of the optimizer

    @staticmethod
    def of(trainer: Trainer) -> "GradientNorms | None":
        """The trainer's callback; None if the user removed it."""
        return next((each for each in trainer.callbacks if isinstance(each, GradientNorms)), None)  # pyright: ignore[reportAttributeAccessIssue] dynamic

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        assert self._loss is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        names = [group["name"] for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        loss = trainer.strategy.reduce(self._loss, reduce_op="mean") if trainer.world_size > 1 else self._loss
        # the one transfer from the device
        *norms, loss = torch.stack([*norms_of(gradients), loss.float()]).tolist()
        self._loss, total = None, math.hypot(*norms)
        if math.isfinite(loss) and (math.isfinite(total) or scaler):
            squares = defaultdict(list)
            for name, norm in zip(names, norms, strict=True):
                squares[name].append(norm)
            self._norms = {"total": total} | {name: math.hypot(*each) for name, each in squares.items()}
            return
        step = trainer.global_step + 1
        rates = ", ".join(f"{group['name']} {group['lr']:.4g}" for group in optimizer.param_groups)
        text = (
            f"step {step:,} is not finite: loss {loss / (scaler.get_scale() if scaler else 1):.4g}, gradient norm "
            f"{total:.4g}, learning rates {rates}; the weights stay those of step {step - 1:,}"
        )
        if self.on_nonfinite == "stop":
            remedy = "lower optim.lr_scale, or leave such steps out with callbacks.gradients.on_nonfinite=skip"
            raise NonFiniteError(step - 1, f"{text}; {remedy}")
        if self.skipped[-self.max_skips :] == list(range(step - self.max_skips, step)):
            limit = f"callbacks.gradients.max_skips={self.max_skips} steps before it were skipped"
            raise NonFiniteError(step - 1, f"{text}; {limit}; lower optim.lr_scale")
        self.skipped.append(step)
        optimizer.zero_grad()  # parameters without a gradient are not updated
        if trainer.is_global_zero:
            tqdm.write(f"skipped: {text}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        norms, self._norms = self._norms, {}
        step, interval = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if not math.isfinite(norms.get("total", math.nan)) or step % interval and step != trainer.max_steps:
            return
        self.rows.append({"step": step} | norms)
        metrics = {f"grad_norm/{name}": norm for name, norm in norms.items()}
        if self.on_nonfinite == "skip":
            metrics["train/skipped_steps"] = float(len(self.skipped))
        Metrics.write(trainer, metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        loss, step = trainer.callback_metrics["val/loss"].item(), trainer.global_step
        if not math.isfinite(loss):
            raise NonFiniteError(step, f"the validation loss at step {step:,} is {loss}; lower optim.lr_scale")

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "skipped": list(self.skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.skipped = list(state["rows"]), list(state["skipped"])


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, 0-dim float32; of a sharded one that of the whole, on all ranks."""
    norms = list(torch._foreach_norm([local(each) for each in gradients], 2, torch.float32))
    sharded = [i for i, each in enumerate(gradients) if is_sharded(each)]
    if sharded:
        squares = torch.stack([norms[i] for i in sharded]).double().square()
        dist.all_reduce(squares)
        for i, norm in zip(sharded, squares.sqrt().float(), strict=True):
            norms[i] = norm
    return norms
