"""What a run shows while it trains: its progress, and a sample of text."""

import sys
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import WandbLogger
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.data.tokenizer import encode_prompt
from tril.model.atomic_files import writing
from tril.model.formats import clock, figures
from tril.model.generation.language_model import LanguageModel
from tril.model.runs import partial_validation
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule
from tril.model.training.settings import ProgressConfig, SamplesConfig, UserError

PRINTED = 3  # samples at the end of a run


class Progress(Callback):
    """A progress bar on a terminal; elsewhere, as in a log file, a number of plain lines. One line per validation."""

    def __init__(self, config: ProgressConfig) -> None:
        self.config = config
        self._bar = self._validation = tqdm(disable=True)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._last_line_step = trainer.global_step
        steps = {"total": trainer.max_steps, "initial": trainer.global_step, "unit": "step"}
        self._bar = tqdm(**steps, dynamic_ncols=True, disable=trainer.global_rank > 0 or not sys.stderr.isatty())

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        metrics, step = Metrics.of(trainer), trainer.global_step
        self._bar.update(step - self._bar.n)
        row = metrics.last("train/loss")
        if row is None or row["step"] != step or not trainer.is_global_zero:
            return
        text = f"loss {row['train/loss']:.3f}, {row['train/tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(text)
        if self._bar.disable and step >= self._last_line_step + trainer.max_steps / self.config.lines:
            self._last_line_step = step
            tokens_left = (trainer.max_steps - step) * metrics.tokens / step
            left = clock(tokens_left / metrics.tokens_per_second())
            print(f"step {step:>6,}/{trainer.max_steps:,}  {text}, {left} left", flush=True)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._validation = tqdm(None, "validation", int(trainer.num_val_batches[0]), unit=" batches", **PROGRESS)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._validation.update()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._validation.close()
        if trainer.is_global_zero:
            metrics = Metrics.of(trainer)
            row, part = metrics.rows("val/loss")[-1], partial_validation(metrics.val_windows)
            tqdm.write(f"step {row['step']:>6,}  validation: {figures(row, 'val/')}" + (f" ({part})" if part else ""))

    def on_train_end(self, *_: Any) -> None:
        self._validation.close()
        self._bar.close()

    on_exception = on_train_end  # pyright: ignore[reportAssignmentType] the error begins a line


class Samples(Callback):
    """Appends a short text to `folder`/samples.txt after every validation, and prints three at the end of the run."""

    def __init__(self, config: SamplesConfig, folder: str | Path, seed: int) -> None:
        self.path, self.config, self.seed = Path(folder) / "samples.txt", config, seed
        self.prompt = ""
        self._size = 0  # bytes of the file up to the checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        data, prompt = pl_module.data, self.config.prompt
        self.prompt = data.source.prompt if prompt is None else prompt
        try:
            encode_prompt(data.tokenizer, self.prompt)
        except ValueError as error:
            if prompt is not None:
                raise UserError(f"callbacks.samples: {error}; ~callbacks.samples removes it") from error
            self.prompt = ""  # another tokenizer than that of the text does not know its characters

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Removes the samples after the checkpoint, which come again."""
        if trainer.is_global_zero and self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(self._size)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.is_global_zero:
            return
        data, config, step = pl_module.data, self.config, trainer.global_step
        lm = LanguageModel(pl_module.model, data.tokenizer, eot=data.source.tokenizer.eot)
        options = {"temperature": config.temperature, "repetition_penalty": config.repetition_penalty}
        is_last = trainer.should_stop or step >= trainer.max_steps
        seeds = [(self.seed + i) % 2**64 for i in range(PRINTED if is_last else 1)]
        texts = [lm.generate(self.prompt, config.max_new_tokens, seed=seed, **options) for seed in seeds]
        for logger in (each for each in trainer.loggers if isinstance(each, WandbLogger)):
            row: list[Any] = [step, self.prompt, texts[0]]
            logger.log_text("samples", ["step", "prompt", "text"], [row], step=step)
        with writing(self.path), self.path.open("ab") as file:
            file.write(f"--- sample at step {step} ---\n{self.prompt}{texts[0]}\n".encode())
            self._size = file.tell()
        for i, text in enumerate(texts if is_last else (), start=1):
            tqdm.write(f"--- sample {i} of {PRINTED} ---\n{self.prompt}{text}\n")

    def state_dict(self) -> dict[str, int]:
        return {"size": self._size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._size = state["size"]
