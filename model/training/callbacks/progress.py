"""The progress bar of a run, or plain lines where there is no terminal."""

import os
import sys

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import compile_seconds


class Progress(Callback):
    """A bar on a terminal; elsewhere (a log file, CI) about `lines` plain lines a run. Before both, how long compiling took."""

    def __init__(self, lines: int = 20):
        if not isinstance(lines, int) or lines < 1:
            raise ValueError(
                f"callbacks.progress.lines={lines} must be a whole number, at least 1; ~callbacks.progress shows none"
            )
        self.lines = lines
        self._bar: tqdm | None = None
        self._shown = 0
        self._compiling = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._compiling = pl_module.compile_mode is not None
            self._shown = trainer.global_step
            self._bar = tqdm(
                total=trainer.max_steps,
                initial=trainer.global_step,
                unit="step",
                dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
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
            print(
                f"step {trainer.global_step:>6,}/{trainer.max_steps:,}  {text}, {tqdm.format_interval(left)} left",
                flush=True,
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            row = Metrics.of(trainer).val[-1]
            tqdm.write(
                f"step {row['step']:>6,}  validation: {row['loss']:.4f} nats per token, {row['bpb']:.4f} bits per byte"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()
