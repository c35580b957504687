"""Experiment trackers, which log in addition to metrics.csv: Weights & Biases and TensorBoard.

metrics.csv, the checkpoints and summary.json are the record of a run, so an error of a tracker does not end it.
"""

import functools
import json
import logging
import netrc
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from tril.model.runs import BEST, CHECKPOINTS, SUMMARY
from tril.model.training.errors import RunRefused
from tril.model.training.loggers import RunLog

CALLS = ("log_hyperparams", "log_metrics", "log_sample", "log_graph", "after_save_checkpoint", "save", "finalize")
CALLS += ("start_after", "finish")
SHOWN_TOKENS = 64  # of the attention maps
SHOWN_SAMPLES = 100  # rows of wandb's table, which is written again after each validation


class WandbLog(WandbLogger):
    """Lightning's WandbLogger; without an account the run stays on disk, and `wandb sync` uploads it later.

    Args:
        id: of the run at wandb; None: a new one.
        log_model: `finish` adds the best checkpoint and the tokenizer as artifacts.
        arguments: those of Lightning's WandbLogger and of wandb.init.
    """

    def __init__(self, *, id: str | None = None, log_model: bool = False, **arguments: Any) -> None:
        if not isinstance(log_model, bool):
            raise ValueError(f"logger.wandb.log_model={log_model} must be true or false")
        if "WANDB_MODE" not in os.environ and not has_wandb_account():
            arguments["mode"] = "offline"
        super().__init__(**arguments, id=id or secrets.token_hex(4))
        if self._wandb_init["anonymous"] is None:
            del self._wandb_init["anonymous"]  # wandb warns of it, also of Lightning's None
        self.log_best, self._samples = log_model, []

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        self._samples = [*self._samples[1 - SHOWN_SAMPLES :], [step, prompt, text]]
        self.log_table("samples", ["step", "prompt", "text"], self._samples, step=step)

    def finish(self, folder: Path, tokenizer: str, *, failed: bool) -> None:
        """Adds the results in the run's folder and ends the run at wandb, which otherwise lasts as long as the process.

        Args:
            folder: of the run; it has a summary if the run was completed.
            tokenizer: its JSON.
            failed: the run ended with an exception.
        """
        if self._experiment is None:
            return
        run, self._experiment = self._experiment, None
        try:
            if (folder / SUMMARY).is_file():
                self._add_results(run, folder, tokenizer)
        finally:
            run.finish(exit_code=int(failed))

    def _add_results(self, run: Any, folder: Path, tokenizer: str) -> None:
        import wandb

        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        run.log({"loss": wandb.Image(str(folder / "loss.png")), "trainer/global_step": summary["steps"]})
        run.summary.update(summary)
        best = folder / CHECKPOINTS / BEST
        if self.log_best and best.is_file():
            model = wandb.Artifact(f"model-{run.id}", "model", metadata={"val_loss": summary["best_val_loss"]})
            model.add_file(str(best))
            run.log_artifact(model)
            with (vocabulary := wandb.Artifact(f"tokenizer-{run.id}", "tokenizer")).new_file("tokenizer.json") as file:
                file.write(tokenizer)
            run.log_artifact(vocabulary)
        if self._samples and best.is_file():
            self._add_heads(run, best)

    def _add_heads(self, run: Any, checkpoint: Path) -> None:
        """Adds attention maps and scores of the best checkpoint's heads on the beginning of the last sample."""
        import torch
        import wandb

        from tril.model.checkpoint import load
        from tril.model.heads.attention_maps import TokenWindows, attention_maps
        from tril.model.heads.head_plots import plot_maps, plot_scores
        from tril.model.heads.scores import text_scores

        lm = load(checkpoint)
        if lm.config.n_heads == 0:
            return
        step, prompt, text = self._samples[-1]
        ids = torch.tensor([lm.encode(f"{prompt}{text}")[: min(SHOWN_TOKENS, lm.config.context_length)]])
        if ids.numel() < 2:  # a single token attends to itself
            return
        with tempfile.TemporaryDirectory() as temporary:
            maps, scores = f"{temporary}/attention.png", f"{temporary}/heads.png"
            tokens = [lm.tokenizer.decode([i], skip_special_tokens=False) for i in ids[0].tolist()]
            plot_maps(maps, attention_maps(lm.model, ids)[:, 0], tokens)
            plot_scores(scores, *text_scores(lm.model, TokenWindows(ids, ids)))
            images = {"attention": wandb.Image(maps), "head_scores": wandb.Image(scores)}
            run.log(images | {"trainer/global_step": step})


class TensorBoardLog(TensorBoardLogger):
    """Lightning's TensorBoardLogger in save_dir/tensorboard; a resumed run replaces what it logs again."""

    def __init__(self, save_dir: str | Path, **arguments: Any) -> None:
        try:
            import tensorboard  # noqa: F401  # pyright: ignore[reportMissingImports] optional
        except ModuleNotFoundError as error:
            raise ValueError('logger=tensorboard needs a package; pip install "tril[tensorboard]"') from error
        super().__init__(save_dir, name="tensorboard", version="", default_hp_metric=False, **arguments)

    def start_after(self, step: int | None) -> None:
        """TensorBoard then hides the values after `step` of earlier processes."""
        if step is not None:
            self._kwargs["purge_step"] = step + 1

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        self.experiment.add_text("sample", f"```\n{prompt}{text}\n```", step)

    def finish(self, folder: Path, tokenizer: str, *, failed: bool) -> None:
        """Adds the best loss to the settings, by which TensorBoard compares runs, and closes the file."""
        if self._experiment is None:
            return
        if (folder / SUMMARY).is_file():
            best = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["best_val_loss"]
            self.log_hyperparams(self.hparams, {} if best is None else {"best_val_loss": best})
        self.experiment.close()


def guarded(logger: Logger) -> Logger:
    """The logger, whose first error is a warning, after which it is not called again."""
    failed = False

    def guard(call: Callable) -> Callable:
        @functools.wraps(call)
        def guarded_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed
            if failed:
                return None
            try:
                return call(*args, **kwargs)
            except Exception as error:
                failed = True
                message = f"{type(error).__name__}: {' '.join(str(error).split())}"
                text = "%s failed (%s) and is not used from here on; metrics.csv is complete"
                logging.getLogger(__name__).warning(text, type(logger).__name__, message)
                return None

        return guarded_call

    for name in CALLS:
        if hasattr(logger, name):
            setattr(logger, name, guard(getattr(logger, name)))
    return logger


def start_loggers(trainer: Trainer, settings: dict[str, Any], step: int | None) -> None:
    """Starts the run at the trackers, which get its settings, and the log of the run.

    Args:
        step: of the checkpoint that the run continues; None: a new run.

    Raises:
        RunRefused: a tracker does not start.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if hasattr(logger, "start_after"):
            logger.start_after(step)  # pyright: ignore[reportAttributeAccessIssue] of ours
        if isinstance(logger, RunLog):
            continue
        try:
            _ = logger.experiment  # pyright: ignore[reportAttributeAccessIssue] every logger of Lightning has it
        except Exception as error:  # such as a refused key, before the first step
            message = f"{type(logger).__name__} does not start: {' '.join(str(error).split())}"
            raise RunRefused(f"{message}; correct that, or leave it out with logger=csv") from error
        logger.log_hyperparams(settings)


def log_sample(trainer: Trainer, prompt: str, text: str) -> None:
    """Gives a sample to the trackers."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLog | TensorBoardLog):
            logger.log_sample(prompt, text, trainer.global_step)


def finish_loggers(trainer: Trainer, folder: Path, *, failed: bool) -> None:
    """Gives the results of the run to the trackers and ends it there, see `WandbLog.finish`."""
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] None if fit has not started
    tokenizer = "" if data is None else data.tokenizer.to_str()
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, WandbLog | TensorBoardLog):
            logger.finish(folder, tokenizer, failed=failed)


def has_wandb_account() -> bool:
    """Whether a key is set or stored by `wandb login`; wandb's own check can prompt the user."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
