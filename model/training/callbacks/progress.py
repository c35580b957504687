"""The progress bar of a run, or plain lines without a terminal."""

import os
import sys

from lightning import Callback, Trainer
from tqdm import tqdm

from tril.model.runs import partial_validation
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import compile_seconds
from tril.model.training.module import TrainingModule


class Progress(Callback):
    """Shows progress bars of training and validation on a terminal, plain lines elsewhere (a log file, CI), and the
    time that compilation took.

    Args:
        lines: plain lines per run, approximately.
    """

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self._bar: tqdm | None = None
        self._val_bar: tqdm | None = None
        self._last_line_step = 0
        self._compiling = False

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.is_global_zero:
            self._compiling = pl_module.losses.compile is not None
            self._last_line_step = trainer.global_step
            steps = {"total": trainer.max_steps, "initial": trainer.global_step, "unit": "step"}
            self._bar = tqdm(**steps, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        if self._compiling:  # forward and backward are compiled by now
            self._compiling = False
            cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]  # the compiler sets it if it is not set
            tqdm.write(f"compiled in {compile_seconds():.0f} s (cached in {cache}: the next start is faster)")
        metrics = Metrics.of(trainer)
        step = trainer.global_step
        if self._bar is None or not metrics.train or metrics.train[-1]["step"] != step:
            return
        row = metrics.train[-1]
        text = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.disable and step >= self._last_line_step + trainer.max_steps / self.lines:
            self._last_line_step = step
            tokens_per_step = metrics.tokens / step
            seconds_left = (trainer.max_steps - step) * tokens_per_step / metrics.tokens_per_second()
            left = tqdm.format_interval(seconds_left)
            print(f"step {step:>6,}/{trainer.max_steps:,}  {text}, {left} left", flush=True)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.is_global_zero:
            options = {"desc": "validation", "unit": "batch", "leave": False, "dynamic_ncols": True}
            n_batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self._val_bar = tqdm(total=int(sum(n_batches)), delay=0.1, disable=not sys.stderr.isatty(), **options)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._val_bar is not None:
            self._val_bar.update()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._val_bar is not None:
            self._val_bar.close()
        if trainer.is_global_zero:
            row = Metrics.of(trainer).val[-1]
            losses = f"{row['loss']:.4f} nats per token, {row['bpb']:.4f} bits per byte"
            part = partial_validation(row.get("windows"))
            tqdm.write(f"step {row['step']:>6,}  validation: {losses}" + (f" ({part})" if part else ""))
            for name, source in row.get("sources", {}).items():
                tqdm.write(f"{'':13}{source['loss']:.4f} nats per token, {source['bpb']:.4f} bits per byte: {name}")

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._bar is not None:
            self._bar.close()
