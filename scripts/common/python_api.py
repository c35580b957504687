"""`tril.train(*overrides)`: the run of `python train.py OVERRIDES` in this process."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tril.model.runs import remove_if_empty
from tril.scripts.common.arguments import MULTIRUN, RUN_TEXT_KEYS, rewritten
from tril.scripts.common.cli import CONFIGS, UserError, explain
from tril.scripts.common.process_state import unchanged_process
from tril.scripts.common.resume import chosen_folder
from tril.scripts.common.signals import StoppedError, StopRequest, stop_on_signals
from tril.scripts.common.trained_run import TrainedRun

PROGRAM = "tril train"  # in messages


def python_api(task: Callable[[DictConfig, StopRequest], Any]) -> Callable[..., TrainedRun]:
    """The function that a call of the module `tril.train` calls.

    Args:
        task: trains a composed configuration.
    """

    def train(*overrides: str) -> TrainedRun:
        """Trains a model in this process, as `python train.py OVERRIDES` does: train("model=nano", "seed=1").

        Signal handlers, random generators, Hydra, warnings and torch's global options are restored afterwards.

        Args:
            overrides: settings as on the command line, group=choice or key=value.

        Returns:
            The finished run: its `folder`, `summary`, `config` and `metrics`, and `load()` for its model.

        Raises:
            UserError: a ValueError whose message is one line: a wrong setting, or a run that diverged.
            KeyboardInterrupt: Ctrl-C stopped the run, after it wrote a checkpoint; the message says how to continue.
        """
        _check_overrides(overrides)
        job = _Job(task)
        with unchanged_process([PROGRAM, *overrides]):
            try:
                _run(job, rewritten(list(overrides), "train", RUN_TEXT_KEYS, CONFIGS / "experiment"))
                if job.error is not None:
                    raise job.error
            except Exception as error:
                if job.folder is not None:
                    remove_if_empty(job.folder)  # Hydra created it before the settings were checked
                if (mistake := _user_error(error, started=job.folder is not None)) is None:
                    raise
                raise mistake from None
        assert job.folder is not None
        if job.stopped is not None:
            _interrupt(job.stopped, job.folder)
        return TrainedRun(job.folder)

    return train


class _Job:
    """What Hydra calls with the composed configuration. It keeps exceptions, of which Hydra would print a line.

    Attributes:
        folder: of the run; None until Hydra has started the job.
    """

    def __init__(self, task: Callable[[DictConfig, StopRequest], Any]) -> None:
        self._task = task
        self.folder: Path | None = None
        self.error: Exception | None = None
        self.stopped: StoppedError | None = None

    def __call__(self, cfg: DictConfig) -> None:
        try:
            self.folder = chosen_folder(cfg)
            with stop_on_signals(ends_process=False) as stop:
                self._task(cfg, stop)
        except StoppedError as stopped:
            self.stopped = stopped
        except Exception as error:
            self.error = error


def _run(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    """Hydra's run of one job, without its configuration of logging, which belongs to the process."""
    with hydra.initialize_config_dir(str(CONFIGS), job_name="train", version_base="1.3"):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        composer.run("train", job, arguments, with_log_configuration=False)


def _check_overrides(overrides: tuple[object, ...]) -> None:
    for override in overrides:
        if not isinstance(override, str):
            remedy = 'settings are strings, such as "trainer.max_steps=100"'
            raise UserError(f"{override!r} is {type(override).__name__}; {remedy}")
        if override in MULTIRUN:
            remedy = f"start it in a terminal: {PROGRAM} -m ..."
            raise UserError(f"{override} starts a grid, which has a process for each run; {remedy}")
        if override.startswith("-"):
            raise UserError(f"{override} is an option of the command line; settings are written key=value")


def _user_error(error: Exception, started: bool) -> UserError | None:
    """A user's mistake with the line that the command prints; None for another error.

    Args:
        started: whether Hydra had started the job.
    """
    if isinstance(error, UserError):
        return error.with_traceback(None)  # a notebook shows the line, not the frames that found the mistake
    composing = isinstance(error, HydraException | OmegaConfBaseException)
    if composing or not started and isinstance(error, OSError | ValueError):
        return UserError(explain(error, "train"))
    return None


def _interrupt(stopped: StoppedError, folder: Path) -> None:
    """Raises KeyboardInterrupt; a signal other than Ctrl-C first goes to the handler that it has without the run."""
    remove_if_empty(folder)
    signum = stopped.status - 128
    if signum != signal.SIGINT:
        signal.raise_signal(signum)
    raise KeyboardInterrupt(stopped.describe(folder, f'train("resume={folder}")'))
