"""Losses, throughput and MFU of a run."""

import math
import statistics
import time
from typing import Any

from lightning import Callback, Trainer

from tril.model.training.hardware import mfu
from tril.model.training.module import TrainingModule, val_names


class Metrics(Callback):
    """Logs loss, learning rate and throughput every `trainer.log_every_n_steps`, and keeps the curves for the summary.

    Throughput counts training only: validation, sampling and checkpoints stop its clock. Tokens are counted, since the
    size of a step may change in a resumed run.

    Args:
        peak_flops: dense FLOP/s of one device, for the MFU; None: unknown, no MFU is logged.
        started: time.perf_counter() at the start of the process.
    """

    def __init__(self, peak_flops: float | None, started: float = 0.0) -> None:
        self.peak_flops, self._started = peak_flops, started  # FLOP/s of all devices once training starts
        self.flops_per_token = 0.0  # as the MFU counts them; set by on_fit_start
        self.tokens = 0  # of all processes, in all steps so far
        self.train: list[dict] = []  # step, loss, tokens_per_second; lr: group of the optimizer -> rate
        # step, loss, bpb; of several sources also sources: name -> loss, bpb; windows: scored, of, if these differ
        self.val: list[dict] = []
        self.val_windows: dict[str, int] | None = None  # of the last validation
        self._clock = Stopwatch()  # runs during training
        self._row = (0, 0, 0.0)  # step, tokens and seconds of the last row of `train`

    @staticmethod
    def of(trainer: Trainer) -> "Metrics":
        """The trainer's Metrics callback, for callbacks that show its measurements."""
        return next(callback for callback in trainer.callbacks if isinstance(callback, Metrics))  # pyright: ignore[reportAttributeAccessIssue] dynamic

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self.flops_per_token = pl_module.model.flops_per_token(masked=True)
        self.peak_flops = self.peak_flops and self.peak_flops * trainer.world_size

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._row = (trainer.global_step, self.tokens, self._clock.seconds())
        self._clock.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        self._clock.start()  # after the other callbacks of a validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        self.tokens += batch[0].numel() * trainer.world_size
        step, (last_step, last_tokens, last_seconds) = trainer.global_step, self._row
        interval = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if step == last_step or step % interval and step != trainer.max_steps:
            return
        loss = pl_module.take_train_loss().item()  # waits for the device, so the seconds below include its work
        seconds = self._clock.seconds()
        speed = (self.tokens - last_tokens) / (seconds - last_seconds)
        metrics = {"train/loss": loss, "train/tokens_per_second": speed} | self.spent()
        if self.peak_flops is not None:
            metrics["train/mfu"] = self.mfu(speed)
        rates = {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups}
        self.write(trainer, metrics | {f"lr/{name}": rate for name, rate in rates.items()})
        self.train.append({"step": step, "loss": loss, "tokens_per_second": speed, "lr": rates})
        self._row = (step, self.tokens, seconds)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._clock.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        rows, metrics = {}, {}
        for source in ("", *pl_module.sources):
            names = val_names(source)
            values = [trainer.callback_metrics[name].item() for name in names]
            rows[source] = dict(zip(("loss", "bpb"), values, strict=True))
            metrics |= zip(names, values, strict=True)
        row = {"step": trainer.global_step, **rows.pop("")}
        self.val_windows = validated_windows(trainer)
        if self.val_windows is not None and self.val_windows["scored"] < self.val_windows["of"]:
            row["windows"] = self.val_windows
            metrics["val/windows"] = float(self.val_windows["scored"])
        self.val.append(row | {"sources": rows} if rows else row)
        self.write(trainer, metrics | self.spent())

    def spent(self) -> dict[str, float]:
        """Tokens and seconds of training only, so that runs with other validation intervals can be plotted together."""
        return {"train/tokens": float(self.tokens), "train/seconds": self._clock.seconds()}

    def wall_seconds(self) -> float:
        """Seconds since the run started, in all its processes up to their last checkpoint."""
        return time.perf_counter() - self._started

    @staticmethod
    def write(trainer: Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def best(self) -> dict:
        """The row of the lowest validation loss so far; NaN is above every number."""
        return min(comparable(self.val), key=lambda row: (math.isnan(row["loss"]), row["loss"]))

    def tokens_per_second(self) -> float:
        """Median over the logged intervals, which excludes the warm-up; nan before the first."""
        return statistics.median([row["tokens_per_second"] for row in self.train] or [float("nan")])

    def mfu(self, tokens_per_second: float | None = None) -> float | None:
        """At the given or the median throughput; None if the device's peak is unknown."""
        speed = self.tokens_per_second() if tokens_per_second is None else tokens_per_second
        return None if self.peak_flops is None else mfu(speed, self.flops_per_token, self.peak_flops)

    def state_dict(self) -> dict:
        spent = {"tokens": self.tokens, "seconds": self._clock.seconds(), "wall_seconds": self.wall_seconds()}
        return {"train": self.train, "val": self.val, "val_windows": self.val_windows, **spent}

    def load_state_dict(self, state: dict) -> None:
        self.train, self.val, self.val_windows = state["train"], state["val"], state["val_windows"]
        self.tokens, self._clock = state["tokens"], Stopwatch(state["seconds"])
        self._started -= state["wall_seconds"]


def comparable(val: list[dict]) -> list[dict]:
    """The validations on as many windows as the last one; a check before training, for one, has fewer."""
    return [row for row in val if row.get("windows") == val[-1].get("windows")]


def validated_windows(trainer: Trainer) -> dict[str, int] | None:
    """How many windows a validation has scored, of how many, over all sources and processes; None: unknown loaders."""
    found: Any = trainer.val_dataloaders
    loaders = found if isinstance(found, list) else [found]
    batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
    if not all(hasattr(loader, "n_windows") for loader in loaders):
        return None
    scored = [
        min(loader.n_windows, int(n) * loader.batch_size * loader.world_size)
        for loader, n in zip(loaders, batches, strict=True)
    ]
    return {"scored": sum(scored), "of": sum(loader.n_windows for loader in loaders)}


class Stopwatch:
    """Measures seconds while it runs; a second start or stop has no effect."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._stopped_at, self._since = seconds, None

    def start(self) -> None:
        self._since = time.perf_counter() if self._since is None else self._since

    def stop(self) -> None:
        self._stopped_at, self._since = self.seconds(), None

    def seconds(self) -> float:
        """All seconds in which it ran."""
        return self._stopped_at + (0.0 if self._since is None else time.perf_counter() - self._since)
