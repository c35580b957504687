"""metrics.csv of a run, and Lightning's loggers for Weights & Biases and TensorBoard, which come in addition."""

import csv
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from tril.model.atomic_files import atomic_path
from tril.model.runs import BEST, CHECKPOINTS, METRICS, SUMMARY
from tril.model.training.errors import RunRefused
from tril.model.training.settings import LoggerConfig, WandbConfig


class RunLog(Logger):
    """Writes each row to metrics.csv when it is logged. A new column rewrites the file, atomically.

    Args:
        folder: of the run.
        step: of the checkpoint that the run continues; its later rows go. None: a new run, which has no rows.
    """

    name, version = "csv", 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        super().__init__()
        self.path, self._step = Path(folder) / METRICS, step
        self._columns: list[str] = []
        self._is_open = False

    def log_hyperparams(self, params: Any = None) -> None:
        """config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **metrics}
        if not self._is_open or not row.keys() <= {*self._columns}:
            rows = [*(self._rows() if self._is_open else self._continued_rows()), row]
            self._columns, self._is_open = sorted({name for row in rows for name in row}), True
            with atomic_path(self.path) as part, part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _continued_rows(self) -> list[dict[str, Any]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return [row for row in self._rows() if int(row["step"]) <= (self._step or 0)]

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of the file without its last line, if that is incomplete because the process was killed."""
        lines = self.path.read_text(encoding="utf-8").rpartition("\n")[0] if self.path.is_file() else ""
        return [row for row in csv.DictReader(io.StringIO(lines)) if (row.get("step") or "").isdigit()]


def make_loggers(config: LoggerConfig, folder: Path, *, step: int | None, sweep: Path | None = None) -> list[Logger]:
    """The log of the run, and Lightning's loggers. Without an account wandb's run stays on disk, for `wandb sync`.

    Args:
        step: of the checkpoint that the run continues; None: a new run.
        sweep: the folder of the run's sweep, which groups its runs at wandb; None: a single run.

    Raises:
        ValueError: a package is missing.
    """
    loggers: list[Logger] = [RunLog(folder, step)]
    tracker = "wandb"
    try:
        if config.wandb is not None:
            loggers.append(_wandb_logger(config.wandb, folder, sweep))
        tracker = "tensorboard"
        if config.tensorboard is not None:
            # what was logged after the checkpoint is hidden
            purge: dict[str, Any] = {} if step is None else {"purge_step": step + 1}
            loggers.append(TensorBoardLogger(folder, "tensorboard", "", default_hp_metric=False, **purge))
    except ModuleNotFoundError as error:
        raise ValueError(f'logger={tracker} needs a package; pip install "tril[{tracker}]"') from error
    return loggers


def _wandb_logger(config: WandbConfig, folder: Path, sweep: Path | None) -> WandbLogger:
    """A resumed run has the id that is in the names of wandb's folders, such as run-20261125_120000-a1b2c3d4."""
    ids = [path.name.rpartition("-")[2] for path in sorted((folder / "wandb").glob("*run-*-*"))]
    options: dict[str, Any] = {"id": ids[-1] if ids else secrets.token_hex(4), "name": folder.name}
    if sweep is not None:
        options |= {"name": str(folder.relative_to(sweep)), "group": "/".join(sweep.parts[-2:])}  # DATE/TIME
    if "WANDB_MODE" not in os.environ:
        import wandb

        if not wandb.login(prompt=False):
            options["mode"] = "offline"
    return WandbLogger(project=config.project, log_model=config.log_model, save_dir=folder, **options)


def start_loggers(trainer: Trainer, settings: dict[str, Any]) -> None:
    """Gives the settings of the run to the loggers.

    Raises:
        RunRefused: one does not start, such as for a refused key.
    """
    for logger in trainer.loggers if trainer.is_global_zero else ():
        try:
            logger.log_hyperparams(settings)
        except Exception as error:
            message = f"{type(logger).__name__} does not start: {' '.join(str(error).split())}"
            raise RunRefused(f"{message}; correct that, or leave it out with logger=csv") from error


def log_sample(trainer: Trainer, prompt: str, text: str) -> None:
    """Gives a sample to the trackers."""
    step = trainer.global_step
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            row: Any = [step, prompt, text]
            logger.log_text("samples", ["step", "prompt", "text"], [row], step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("sample", f"```\n{prompt}{text}\n```", step)


def finish_loggers(trainer: Trainer, *, failed: bool) -> None:
    """Gives the results of the run to wandb, and ends it there, where it otherwise lasts as long as the process.

    With `logger.wandb.log_model`, wandb gets the best checkpoint, which holds the tokenizer too.

    Args:
        failed: the run ended with an exception.
    """
    folder = Path(trainer.default_root_dir)
    best = folder / CHECKPOINTS / BEST
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if not isinstance(logger, WandbLogger) or logger._experiment is None:
            continue
        import wandb

        run = logger.experiment
        if (folder / SUMMARY).is_file():
            run.log({"loss": wandb.Image(str(folder / "loss.png"))})
            run.summary.update(json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
        if logger._log_model and best.is_file():
            run.log_artifact(str(best), f"model-{run.id}", "model")
        run.finish(exit_code=int(failed))
