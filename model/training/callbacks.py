"""What a run tells while it trains: metrics, progress, samples."""

import gc
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from lightning import Callback, LightningModule, Trainer
from tokenizers import Tokenizer
from tqdm import tqdm

from model.text import LanguageModel
from model.training.hardware import compile_seconds, mfu


class Refused(ValueError):
    """A setting that only the model and its tokenizer can show to be wrong, before the first step."""


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
        step, seen = trainer.global_step, {name: trainer.callback_metrics[name].item() for name in ("val/loss", "val/bpb")}
        self.val.append({"step": step, "loss": seen["val/loss"], "bpb": seen["val/bpb"]})
        self.write(trainer, seen | self.spent(step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch, batch_idx: int) -> None:
        self._clock.start()  # only after everything else that hangs on the end of validation is done

    def spent(self, step: int) -> dict[str, float]:
        """On training alone, so that curves of runs which validate at other steps can be laid over one another."""
        return {"train/tokens": float(step * self.tokens_per_step), "train/seconds": self._seconds + self._clock.elapsed()}

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


class WindowLosses(Callback):
    """Keeps the validation loss of every window, of the newest and of the best validation: what a paired comparison of two runs needs.

    windows_last.npz and windows_best.npz hold step, context_length, and of each window, in the order of the text, nll (nats, summed over
    its targets) and targets (how many).
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = Metrics.of(trainer)
        names = ("last", "best") if metrics.val[-1] == metrics.best() else ("last",)
        nll, targets = pl_module.val_windows.numpy()
        sizes = {"step": trainer.global_step, "context_length": pl_module.model.config.context_length}
        arrays = sizes | {"nll": nll, "targets": targets.astype(int)}
        for name in names:
            part = self.folder / f".windows_{name}.part.npz"
            np.savez(part, **arrays)
            part.replace(self.folder / f"windows_{name}.npz")


class Progress(Callback):
    """A bar on a terminal; elsewhere (a log file, CI) about `lines` plain lines a run. Before both, how long compiling took."""

    def __init__(self, lines: int = 20):
        if not isinstance(lines, int) or lines < 1:
            raise ValueError(f"callbacks.progress.lines={lines} must be a whole number, at least 1; ~callbacks.progress shows none")
        self.lines = lines
        self._bar: tqdm | None = None
        self._shown = 0
        self._compiling = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._compiling = pl_module.compile_mode is not None
            self._shown = trainer.global_step
            self._bar = tqdm(
                total=trainer.max_steps, initial=trainer.global_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if self._compiling:  # by now forward and backward have been
            self._compiling = False
            kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]  # which the compiler sets where nobody did
            tqdm.write(f"compiled in {compile_seconds():.0f} s (kept in {kept}: the next start is quicker)")
        metrics = Metrics.of(trainer)
        rows = metrics.train
        if self._bar is None or not rows or rows[-1]["step"] != trainer.global_step:
            return
        text = f"loss {rows[-1]['loss']:.3f}, {rows[-1]['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)
        if self._bar.disable and trainer.global_step >= self._shown + trainer.max_steps / self.lines:
            self._shown = trainer.global_step
            left = (trainer.max_steps - trainer.global_step) * metrics.tokens_per_step / metrics.tokens_per_second()
            print(f"step {trainer.global_step:>6,}/{trainer.max_steps:,}  {text}, {tqdm.format_interval(left)} left", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            row = Metrics.of(trainer).val[-1]
            tqdm.write(f"step {row['step']:>6,}  validation: {row['loss']:.4f} nats per token, {row['bpb']:.4f} bits per byte")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()


class GarbageCollection(Callback):
    """Lets Python look for unreachable objects at validations alone: at any other moment the search, through all the objects of the
    libraries, would hold up a step. Those that are there when training starts are not searched at all.
    """

    def __init__(self):
        self._running = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._running = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.unfreeze()
        if self._running:
            gc.enable()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


class Samples(Callback):
    """Prints a short text after every validation, and keeps all of them in one file."""

    def __init__(self, folder: str | Path, *, prompt: str = "", max_new_tokens: int = 100, temperature: float = 0.8, seed: int = 0):
        self.path, self.prompt = Path(folder) / "samples.txt", str(prompt)  # prompt=1 arrives as a number
        self.options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        try:
            writer(pl_module).stream(self.prompt, **self.options)  # checked, not begun
        except ValueError as error:
            raise Refused(f"callbacks.samples: {error}; ~callbacks.samples leaves it out") from error

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        text = writer(pl_module).generate(self.prompt, **self.options)
        text = f"--- sample at step {trainer.global_step} ---\n{self.prompt}{text}\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        tqdm.write(text)


def writer(pl_module: LightningModule) -> LanguageModel:
    payload = pl_module.payload
    return LanguageModel(pl_module.model, Tokenizer.from_str(payload["tokenizer"]), eot=payload["eot"])
