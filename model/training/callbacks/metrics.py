"""Losses, throughput and MFU of a run."""

import statistics
import time

from lightning import Callback, LightningModule, Trainer

from tril.model.training.hardware import mfu


class Metrics(Callback):
    """Logs loss, learning rate and throughput every `trainer.log_every_n_steps`, and keeps the curves for the summary.

    Throughput counts training alone: validation, sampling and checkpoints stop its clock.
    MFU is logged where the device's dense peak is known. `started` is when the process began, by time.perf_counter().
    """

    def __init__(self, tokens_per_step: int, peak_flops: float | None, started: float = 0.0):
        self.tokens_per_step, self.peak_flops = tokens_per_step, peak_flops
        self.flops_per_token = 0  # the model's, when there is one
        self.train: list[dict] = []  # step, loss, tokens_per_second
        self.val: list[dict] = []  # step, loss, bpb
        self._clock = Stopwatch()
        self._step = 0
        self._seconds = 0.0  # until the clock's last lap
        self._started = started

    def count_devices(self, n_devices: int) -> None:
        """Each of them processes what one was said to, and has the peak that one was said to have."""
        self.tokens_per_step *= n_devices
        self.peak_flops = self.peak_flops and self.peak_flops * n_devices

    @staticmethod
    def of(trainer: Trainer) -> "Metrics":
        """The trainer's one Metrics callback, for the callbacks that show what it measured."""
        return next(callback for callback in trainer.callbacks if isinstance(callback, Metrics))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flops_per_token = pl_module.model.flops_per_token()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._clock.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step or step % trainer.log_every_n_steps and step != trainer.max_steps:
            return
        loss = pl_module.take_train_loss().item()  # waits for the device, so that the clock below is true
        lap = self._clock.lap()
        self._seconds += lap
        speed = (step - self._step) * self.tokens_per_step / lap
        metrics = {"train/loss": loss, "train/tokens_per_second": speed} | self.spent(step)
        if self.peak_flops is not None:
            metrics["train/mfu"] = self.mfu(speed)
        for group in trainer.optimizers[0].param_groups:
            metrics[f"lr/{group['name']}"] = group["lr"]
        self.write(trainer, metrics)
        self.train.append({"step": step, "loss": loss, "tokens_per_second": speed})
        self._step = step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, seen = (
            trainer.global_step,
            {name: trainer.callback_metrics[name].item() for name in ("val/loss", "val/bpb")},
        )
        self.val.append({"step": step, "loss": seen["val/loss"], "bpb": seen["val/bpb"]})
        self.write(trainer, seen | self.spent(step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch, batch_idx: int) -> None:
        self._clock.start()  # only after everything else that hangs on the end of validation is done

    def spent(self, step: int) -> dict[str, float]:
        """On training alone, so that curves of runs which validate at other steps can be laid over one another."""
        return {
            "train/tokens": float(step * self.tokens_per_step),
            "train/seconds": self._seconds + self._clock.elapsed(),
        }

    def wall_seconds(self) -> float:
        """Since the run began, in all processes that worked on it; what came after the checkpoint of a killed one is not counted."""
        return time.perf_counter() - self._started

    @staticmethod
    def write(trainer: Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def best(self) -> dict:
        """The row of the lowest validation loss so far."""
        return min(self.val, key=lambda row: row["loss"])

    def tokens_per_second(self) -> float:
        """Median over the logged intervals, which leaves the warm-up out; nan before the first."""
        return statistics.median([row["tokens_per_second"] for row in self.train] or [float("nan")])

    def mfu(self, tokens_per_second: float | None = None) -> float | None:
        """At the given or the median speed; None where the device's peak is not known."""
        speed = self.tokens_per_second() if tokens_per_second is None else tokens_per_second
        return None if self.peak_flops is None else mfu(speed, self.flops_per_token, self.peak_flops)

    def state_dict(self) -> dict:
        spent = {"seconds": self._seconds + self._clock.elapsed(), "wall_seconds": self.wall_seconds()}
        return {"train": self.train, "val": self.val, **spent}

    def load_state_dict(self, state: dict) -> None:
        self.train, self.val = state["train"], state["val"]
        self._seconds = state.get("seconds", 0.0)  # which checkpoints of an older version lack
        self._started -= state.get("wall_seconds", 0.0)


class Stopwatch:
    """Seconds while it runs; starting and stopping twice does nothing."""

    def __init__(self):
        self._elapsed, self._since = 0.0, None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._elapsed += time.perf_counter() - self._since
            self._since = None

    def elapsed(self) -> float:
        """Seconds since the last lap."""
        return self._elapsed + (0.0 if self._since is None else time.perf_counter() - self._since)

    def lap(self) -> float:
        """Seconds since the last lap; goes on running."""
        self.stop()
        elapsed, self._elapsed = self._elapsed, 0.0
        self.start()
        return elapsed
