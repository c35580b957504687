"""What a run measures: losses, also of each validation window, gradient norms, learning rates and throughput."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_norm is the function of torch.nn.utils.get_total_norm for many tensors at once.

import math
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch import Tensor
from torch.optim import Optimizer

from tril.model.atomic_files import atomic_path
from tril.model.training.errors import NonFiniteError
from tril.model.training.hardware import Hardware, mfu
from tril.model.training.module import TrainingModule
from tril.model.training.optim import is_sharded, local


class Metrics(Callback):
    """Measures a run, logs it every `trainer.log_every_n_steps` and after each validation, and keeps the curves.

    No update is made with a loss or gradient that is not finite: the run ends before it. With precision 16-mixed,
    gradients that are not finite are left to the gradient scaler, which skips their steps.

    Throughput counts training only: validation, what follows it, and its checkpoints stop the clock.

    windows_last.npz and windows_best.npz hold `step`, `context_length`, and for each window of the last or the best
    validation, in the order of the text, `nll` (nats, summed over its targets) and `targets` (their number);
    `document_nll` and `document_targets` are the same for each document. A target belongs to the document of its input.
    Of several sources, the windows and documents of each follow those of the one before, in the order of their names.

    Args:
        hardware: that the run uses.
        folder: of the run.
        started: time.perf_counter() at the start of the process.

    Attributes:
        tokens: of all processes, in all steps so far; counted, since the size of a step may change in a resumed run.
        train: of each logged step "step", "loss" (nats per token), "tokens_per_second", and "lr" and "grad_norm", the
            latter before clipping: name of a group of the optimizer -> value.
        val: of each validation "step", "loss" and "bpb"; of several sources also "sources": name -> "loss" and "bpb".
        val_windows: how many windows the last validation has scored, and "of" how many.
    """

    def __init__(self, hardware: Hardware, folder: str | Path, started: float = 0.0) -> None:
        self.hardware, self.folder, self._started = hardware, Path(folder), started
        self.tokens = 0
        self.train: list[dict[str, Any]] = []
        self.val: list[dict[str, Any]] = []
        self.val_windows: dict[str, int] = {}
        self._seconds, self._since = 0.0, None  # of training, and when the clock was started; None: it stands still
        self._row = (0, 0, 0.0)  # step, tokens and seconds of the last row of `train`
        self._token_share: float | None = None  # of the peak FLOP/s of all devices, at one token per second
        self._loss: Tensor | float = 0.0  # of this step so far, on the device
        self._norms: dict[str, float] = {}  # of the step that was just made

    @staticmethod
    def of(trainer: Trainer) -> "Metrics":
        """The trainer's Metrics, which Lightning calls before all other callbacks, so that these can read them."""
        metrics = trainer.callbacks[0]  # pyright: ignore[reportAttributeAccessIssue] dynamic
        assert isinstance(metrics, Metrics)
        return metrics

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if (peak := self.hardware.peak_flops) is not None:
            self._token_share = mfu(1.0, pl_module.model.flops_per_token(masked=True), peak * trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._row = (trainer.global_step, self.tokens, self.seconds())

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Measures the gradient; raises NonFiniteError instead of an update with numbers that are not finite."""
        grads = [(group["name"], p.grad) for group in optimizer.param_groups for p in group["params"]]
        names, gradients = zip(*((name, grad) for name, grad in grads if grad is not None), strict=True)
        loss, self._loss = torch.as_tensor(self._loss), 0.0
        if trainer.world_size > 1:
            loss = trainer.strategy.reduce(loss, reduce_op="mean")
        # the one transfer from the device in a step
        *norms, loss = torch.stack([*norms_of(gradients), loss.float()]).tolist()
        groups = defaultdict(list)
        for name, norm in zip(names, norms, strict=True):
            groups[name].append(norm)
        self._norms = {"total": math.hypot(*norms)} | {name: math.hypot(*each) for name, each in groups.items()}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not math.isfinite(loss) or not (math.isfinite(self._norms["total"]) or scaler):
            step = trainer.global_step + 1
            rates = ", ".join(f"{group['name']} {group['lr']:.4g}" for group in optimizer.param_groups)
            values = (
                f"loss {loss / (scaler.get_scale() if scaler else 1):.4g}, gradient norm {self._norms['total']:.4g}"
            )
            text = f"step {step:,} is not finite: {values}, learning rates {rates}"
            remedy = f"the weights stay those of step {step - 1:,}; lower optim.lr_scale"
            raise NonFiniteError(step - 1, f"{text}; {remedy}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        self.tokens += batch[0].numel() * trainer.world_size
        step, (last_step, last_tokens, last_seconds) = trainer.global_step, self._row
        interval = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if step == last_step or step % interval and step != trainer.max_steps:
            return
        loss = pl_module.take_train_loss().item()  # waits for the device, so the seconds below include its work
        seconds = self.seconds()
        speed = (self.tokens - last_tokens) / (seconds - last_seconds)
        rates = {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups}
        norms = {name: norm for name, norm in self._norms.items() if math.isfinite(norm)}  # not if the scaler skipped
        self.train.append({"step": step, "loss": loss, "tokens_per_second": speed, "lr": rates, "grad_norm": norms})
        row = {"train/loss": loss, "train/tokens_per_second": speed} | self.spent()
        if self._token_share is not None:
            row["train/mfu"] = speed * self._token_share
        row |= {f"lr/{name}": rate for name, rate in rates.items()}
        self.write(trainer, row | {f"grad_norm/{name}": norm for name, norm in norms.items()})
        self._row = (step, self.tokens, seconds)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._seconds, self._since = self.seconds(), None

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        step = trainer.global_step
        logged = {key: value.item() for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
        row: dict[str, Any] = {"step": step, "loss": logged["val/loss"], "bpb": logged["val/bpb"]}
        if not math.isfinite(row["loss"]):
            text = f"the validation loss at step {step:,} is {row['loss']}; lower optim.lr_scale"
            raise NonFiniteError(step, text)
        if names := pl_module.sources:
            row["sources"] = {name: {key: logged[f"val/{name}/{key}"] for key in ("loss", "bpb")} for name in names}
        self.val.append(row)
        self.val_windows = validated_windows(trainer)
        self.write(trainer, logged | self.spent())
        if trainer.is_global_zero:
            for name in ("last", "best") if self.best()["step"] == step else ("last",):
                save_windows(self.folder / f"windows_{name}.npz", pl_module, step)

    @staticmethod
    def write(trainer: Trainer, values: dict[str, float]) -> None:
        """Logs values of this step."""
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def spent(self) -> dict[str, float]:
        """Tokens and seconds of training only, so that runs with other validation intervals can be plotted together."""
        return {"train/tokens": float(self.tokens), "train/seconds": self.seconds()}

    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def wall_seconds(self) -> float:
        """Seconds since the run started, in all its processes up to their last checkpoint."""
        return time.perf_counter() - self._started

    def best(self) -> dict[str, Any]:
        """The first row with the lowest validation loss so far."""
        return min(self.val, key=lambda row: row["loss"])

    def tokens_per_second(self) -> float:
        """Median over the logged intervals, which excludes the warm-up; nan before the first."""
        return statistics.median([row["tokens_per_second"] for row in self.train] or [math.nan])

    def mfu(self) -> float | None:
        """At the median throughput; None if the device's peak is unknown."""
        return None if self._token_share is None else self.tokens_per_second() * self._token_share

    def state_dict(self) -> dict[str, Any]:
        spent = {"tokens": self.tokens, "seconds": self.seconds(), "wall_seconds": self.wall_seconds()}
        return {"train": self.train, "val": self.val, "val_windows": self.val_windows, **spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train, self.val, self.val_windows = state["train"], state["val"], state["val_windows"]
        self.tokens, self._seconds = state["tokens"], state["seconds"]
        self._started -= state["wall_seconds"]


def norms_of(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """The norm of each gradient, 0-dim float32; of a sharded one that of the whole, on all ranks."""
    norms = list(torch._foreach_norm([local(each) for each in gradients], 2, torch.float32))
    sharded = [i for i, each in enumerate(gradients) if is_sharded(each)]
    if sharded:
        squares = torch.stack([norms[i] for i in sharded]).double().square()
        dist.all_reduce(squares)
        for i, norm in zip(sharded, squares.sqrt().float(), strict=True):
            norms[i] = norm
    return norms


def validated_windows(trainer: Trainer) -> dict[str, int]:
    """How many windows a validation has scored, of how many, over all sources and processes."""
    found: Any = trainer.val_dataloaders
    loaders = found if isinstance(found, list) else [found]
    scored = [
        min(loader.n_windows, int(n_batches) * loader.batch_size * loader.world_size)
        for loader, n_batches in zip(loaders, trainer.num_val_batches, strict=True)
    ]
    return {"scored": sum(scored), "of": sum(loader.n_windows for loader in loaders)}


def save_windows(path: Path, module: TrainingModule, step: int) -> None:
    """Writes the losses of the windows and documents of the last validation, for paired comparisons of runs."""
    nll, targets = module.val_windows.numpy()
    arrays: dict[str, Any] = {"nll": nll, "targets": targets.astype(int)}
    if module.val_documents is not None:
        documents = module.val_documents(*module.val_targets)  # (M,)
        arrays["document_nll"] = np.bincount(documents, module.val_nll.numpy())
        arrays["document_targets"] = np.bincount(documents)
    with atomic_path(path) as part, part.open("wb") as file:
        np.savez(file, step=step, context_length=module.model.config.context_length, **arrays)
