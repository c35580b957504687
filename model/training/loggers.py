"""metrics.csv of a run, and Lightning's loggers for Weights & Biases and TensorBoard, which come in addition."""

import csv
import io
import json
import netrc
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning import Trainer
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter

from tril.model.atomic_files import atomic_path
from tril.model.runs import BEST, CHECKPOINTS, SUMMARY
from tril.model.training.errors import RunRefused
from tril.model.training.settings import LoggerConfig


class RunLog(CSVLogger):
    """Lightning's CSVLogger, but a resumed run continues the file of the run: save_dir/csv/version_0/metrics.csv.

    Every row is on disk when it is logged.

    Args:
        step: of the checkpoint that the run continues; its later rows go. None: a new run, which has no rows.
    """

    def __init__(self, save_dir: str | Path, step: int | None = None) -> None:
        super().__init__(save_dir, name="csv", version=0, flush_logs_every_n_steps=1)
        self._step = step

    @property
    @rank_zero_experiment
    def experiment(self) -> "RowWriter":
        if not isinstance(self._experiment, RowWriter):
            path = Path(self.log_dir, "metrics.csv")
            if path.is_file():
                rows = [] if self._step is None else complete_rows(path)
                write_rows(path, [row for row in rows if int(row["step"]) <= (self._step or 0)])
            self._experiment = RowWriter(self.log_dir)
        return self._experiment

    def log_hyperparams(self, params: Any = None) -> None:
        """config.yaml has them."""


class RowWriter(ExperimentWriter):
    """Continues an existing file, and replaces it as a whole when a new column comes."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        if (path := Path(self.metrics_file_path)).is_file():
            with path.open(encoding="utf-8", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _check_log_dir_exists(self) -> None:
        """Lightning's would remove the file."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, complete_rows(path), fieldnames)


def complete_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file without its last line, if that is incomplete because the process was killed."""
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [row for row in csv.DictReader(io.StringIO(lines)) if (row.get("step") or "").isdigit()]


def write_rows(path: Path, rows: list[dict[str, str]], columns: list[str] | None = None) -> None:
    """Writes a csv file atomically; without rows and columns there is no file."""
    columns = columns or sorted({column for row in rows for column in row})
    if not columns:
        return path.unlink(missing_ok=True)
    with atomic_path(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return None


def with_identity(config: LoggerConfig, folder: Path, sweep: Path | None = None) -> LoggerConfig:
    """The settings with the run's id, name and group at wandb, which config.yaml keeps for a resumed run."""
    if (wandb := config.wandb) is None:
        return config
    folder = folder.absolute()
    name = str(folder.relative_to(sweep)) if sweep else folder.name
    group = "/".join(sweep.parts[-2:]) if sweep else None  # DATE/TIME
    identity = {"id": wandb.id or secrets.token_hex(4), "name": wandb.name or name, "group": wandb.group or group}
    return replace(config, wandb=replace(wandb, **identity))


def make_loggers(config: LoggerConfig, folder: Path, step: int | None) -> list[Logger]:
    """The log of the run, and Lightning's loggers. Without an account wandb's run stays on disk, for `wandb sync`.

    Args:
        step: of the checkpoint that the run continues; None: a new run.

    Raises:
        ValueError: a package is missing.
    """
    loggers: list[Logger] = [RunLog(folder, step)]
    try:
        if (wandb := config.wandb) is not None:
            options: dict[str, Any] = {
                key: getattr(wandb, key) for key in ("project", "entity", "name", "group", "tags", "id")
            }
            if "WANDB_MODE" not in os.environ and not has_wandb_account():
                options["mode"] = "offline"
            loggers.append(WandbLogger(save_dir=folder, **options))
        if config.tensorboard is not None:
            # what was logged after the checkpoint is hidden
            purge: dict[str, Any] = {} if step is None else {"purge_step": step + 1}
            loggers.append(TensorBoardLogger(folder, "tensorboard", "", default_hp_metric=False, **purge))
    except ModuleNotFoundError as error:
        name = "wandb" if config.wandb is not None and len(loggers) == 1 else "tensorboard"
        raise ValueError(f'logger={name} needs a package; pip install "tril[{name}]"') from error
    return loggers


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
    """Gives a sample to the loggers."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            step = trainer.global_step
            row: Any = [step, prompt, text]
            logger.log_text("samples", ["step", "prompt", "text"], [row], step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("sample", f"```\n{prompt}{text}\n```", trainer.global_step)


def finish_loggers(trainer: Trainer, folder: Path, *, failed: bool, log_model: bool = False) -> None:
    """Gives the results of the run to wandb, and ends it there, where it otherwise lasts as long as the process.

    Args:
        folder: of the run; it has a summary if the run was completed.
        failed: the run ended with an exception.
        log_model: add the best checkpoint, which holds the tokenizer too, as an artifact.
    """
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            import wandb

            run, best = logger.experiment, folder / CHECKPOINTS / BEST
            if (folder / SUMMARY).is_file():
                run.log({"loss": wandb.Image(str(folder / "loss.png"))})
                run.summary.update(json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
            if log_model and best.is_file():
                run.log_artifact(str(best), f"model-{run.id}", "model")
            run.finish(exit_code=int(failed))


def has_wandb_account() -> bool:
    """Whether a key is set or stored by `wandb login`; wandb's own check can prompt the user."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
