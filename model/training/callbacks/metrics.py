"""The numbers of a run: what is measured, and the rows of metrics.csv, from which everything else is reported."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_norm is the function of torch.nn.utils.get_total_norm for many tensors at once.

import csv
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from tril.model.atomic_files import atomic_path, writing
from tril.model.runs import METRICS, WINDOWS, Run
from tril.model.training.hardware import Hardware
from tril.model.training.module import TrainingModule
from tril.model.training.settings import UserError

Row = dict[str, float]


class NonFiniteError(UserError):
    """The loss or a gradient of a step, or a validation loss, is not a finite number. The weights are those before."""


class RunLog(Logger):
    """Writes each row to metrics.csv when it is logged, and keeps it. A new column rewrites the file, atomically.

    Args:
        folder: of the run.

    Attributes:
        rows: "step" and the logged values by their names in metrics.csv, in every process.
    """

    name, version = "csv", 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder, self.path, self.rows = Path(folder), Path(folder) / METRICS, list[Row]()
        self._columns: list[str] = []

    def log_hyperparams(self, params: Any = None) -> None:
        """config.yaml has them."""

    def log_metrics(self, metrics: Row, step: int | None = None) -> None:
        if not metrics:  # Lightning had nothing but the step
            return
        row: Any = {"step": step, **metrics}
        self.rows.append(row)
        if rank_zero_only.rank > 0:
            return
        if row.keys() <= {*self._columns}:
            with writing(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        self._columns = sorted({name for row in self.rows for name in row})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as part, part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self.rows)


class Metrics(Callback):
    """Measures a run, and logs it every `trainer.log_every_n_steps` and after each validation.

    No update is made with a loss or gradient that is not finite: the run ends before it. With precision 16-mixed,
    gradients that are not finite are left to the gradient scaler, which skips their steps.

    Throughput counts training only: validation, what follows it, and its checkpoints stop the clock.

    Args:
        hardware: that the run uses.
        folder: of the run.
        started: time.perf_counter() at the start of the process.

    Attributes:
        run_log: all rows so far.
        tokens: of all processes, in all steps so far; counted, since the size of a step may change in a resumed run.
        val_windows: how many windows the last validation has scored, and "of" how many.
    """

    def __init__(self, hardware: Hardware, folder: str | Path, started: float = 0.0) -> None:
        self.hardware, self.folder, self._started = hardware, Path(folder), started
        self.run_log, self.tokens, self.val_windows = RunLog(folder), 0, dict[str, int]()
        self._seconds, self._since = 0.0, None  # of training, and when the clock was started; None: it stands still
        self._norms, self._rates = Row(), Row()  # of the step that was just made

    @staticmethod
    def of(trainer: Trainer) -> "Metrics":
        """The trainer's Metrics, which Lightning calls before all other callbacks, so that these can read them."""
        metrics = trainer.callbacks[0]  # pyright: ignore[reportAttributeAccessIssue] dynamic
        assert isinstance(metrics, Metrics)
        return metrics

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the rows up to the step of the checkpoint."""
        rows = Run(self.folder).metrics if self.run_log.path.is_file() else []
        self.run_log.rows = [row for row in rows if row["step"] <= checkpoint["global_step"]]

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Measures the gradient; raises NonFiniteError instead of an update with numbers that are not finite."""
        gradients = {
            group["name"]: [p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        }
        # not finite if the loss of one micro-batch is not; reduced in place
        nats = trainer.strategy.reduce(pl_module.train_sums[0].clone(), reduce_op="sum")
        norms = torch._foreach_norm([*itertools.chain(*gradients.values())], 2, torch.float32)
        nats, *norms = torch.stack([nats, *norms]).tolist()  # the one transfer from the device in a step
        rest = iter(norms)
        groups = {name: math.hypot(*itertools.islice(rest, len(each))) for name, each in gradients.items()}
        self._norms = {"total": math.hypot(*norms)} | groups
        self._rates = {f"lr/{group['name']}": group["lr"] for group in optimizer.param_groups}  # the schedule is next
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not math.isfinite(nats) or not (math.isfinite(self._norms["total"]) or scaler):
            step, norm = trainer.global_step, f"gradient norm {self._norms['total']:.4g}"
            value = norm if math.isfinite(nats) else f"loss {nats}, {norm}"
            remedy = f"the weights stay those of step {step:,}; lower optim.lr_scale"
            raise NonFiniteError(f"step {step + 1:,} is not finite: {value}; {remedy}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        self.tokens += batch[0].numel() * trainer.world_size
        step, interval = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] dynamic
        before = self.last("train/loss") or {"step": 0, "train/tokens": 0.0, "train/seconds": 0.0}
        if step == before["step"] or step % interval and step != trainer.max_steps:
            return
        loss = pl_module.take_train_loss().item()  # waits for the device, so the seconds below include its work
        spent = self.spent()
        tokens, seconds = (spent[name] - before[name] for name in ("train/tokens", "train/seconds"))
        row = {"train/loss": loss, "train/tokens_per_second": tokens / seconds} | spent
        if (share := self.mfu(trainer, tokens / seconds)) is not None:
            row["train/mfu"] = share
        row |= self._rates
        # without norms of a step that the scaler skips
        row |= {f"grad_norm/{name}": norm for name, norm in self._norms.items() if math.isfinite(norm)}
        self._write(trainer, row)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._seconds, self._since = self.seconds(), None

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        values = {key: trainer.callback_metrics[key].item() for key in ("val/loss", "val/bpb")}
        if not math.isfinite(loss := values["val/loss"]):
            step = f"{trainer.global_step:,}"
            raise NonFiniteError(f"the validation loss at step {step} is {loss}; lower optim.lr_scale")
        loader: Any = trainer.val_dataloaders
        scored = int(trainer.num_val_batches[0]) * loader.batch_size * loader.world_size
        self.val_windows = {"scored": min(loader.n_windows, scored), "of": loader.n_windows}
        self._write(trainer, values | self.spent())
        if trainer.is_global_zero:
            save_windows(self.folder / WINDOWS, pl_module, trainer.global_step)

    def _write(self, trainer: Trainer, values: Row) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def rows(self, name: str) -> list[Row]:
        """The rows that have a value of this name."""
        return [row for row in self.run_log.rows if name in row]

    def last(self, name: str) -> Row | None:
        """The last row that has a value of this name; None: there is none."""
        return next((row for row in reversed(self.run_log.rows) if name in row), None)

    def best(self) -> Row:
        """The first row with the lowest validation loss so far."""
        return min(self.rows("val/loss"), key=lambda row: row["val/loss"])

    def spent(self) -> Row:
        """Tokens and seconds of training only, so that runs with other validation intervals can be plotted together."""
        return {"train/tokens": float(self.tokens), "train/seconds": self.seconds()}

    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def wall_seconds(self) -> float:
        """Seconds since the run started, in all its processes up to their last checkpoint."""
        return time.perf_counter() - self._started

    def tokens_per_second(self) -> float:
        """Median over the logged intervals, which excludes the warm-up; nan before the first."""
        return statistics.median([row["train/tokens_per_second"] for row in self.rows("train/loss")] or [math.nan])

    def mfu(self, trainer: Trainer, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization (PaLM, https://arxiv.org/abs/2204.02311, appendix B): the share of the peak FLOP/s of
        all devices; None if it is unknown. Masked scores count, as in PaLM."""
        if self.hardware.peak_flops is None:
            return None
        module: Any = trainer.lightning_module
        flops = tokens_per_second * module.model.flops_per_token(module.data.lengths, masked=True)
        return flops / (self.hardware.peak_flops * trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        spent = {"tokens": self.tokens, "seconds": self.seconds(), "wall_seconds": self.wall_seconds()}
        return {"val_windows": self.val_windows, **spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.val_windows, self.tokens, self._seconds = state["val_windows"], state["tokens"], state["seconds"]
        self._started -= state["wall_seconds"]


def save_windows(path: Path, module: TrainingModule, step: int) -> None:
    """Writes the losses of the windows and documents of the last validation, for paired comparisons of runs."""
    nll, targets = module.val_windows.numpy()
    documents = module.data.text.documents("val")[: len(module.val_nll)]  # (M,)
    arrays: dict[str, Any] = {"nll": nll, "targets": targets.astype(int)}
    arrays["document_nll"] = np.bincount(documents, module.val_nll.numpy())
    arrays["document_targets"] = np.bincount(documents)
    with atomic_path(path) as part, part.open("wb") as file:
        np.savez(file, step=step, context_length=module.model.config.context_length, **arrays)
