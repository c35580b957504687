"""The lightning.Trainer of a run, from its settings and from what the command line adds."""

from pathlib import Path
from typing import TYPE_CHECKING

from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import command
from tril.scripts.cli.folder import sweep_of
from tril.scripts.cli.process import StopRequest

if TYPE_CHECKING:
    from lightning import Trainer


def new_trainer(
    config: RunConfig,
    folder: Path,
    stop: StopRequest,
    *,
    passes: float = 0.0,
    started: float = 0.0,
    step: int | None = None,
    added: tuple[list, list] = ([], []),
) -> "Trainer":
    """The Trainer with our callbacks and loggers.

    Args:
        stop: asks the run to stop at the end of a step.
        passes: of the run over its text.
        started: time.perf_counter() at the start of the process.
        step: after which a resumed run goes on; None: a new run.
        added: callbacks and loggers that the command line adds.

    Raises:
        ValueError: the package of a logger is missing.
    """
    from tril.model.training.trainer import build_trainer

    hardware = config.hardware
    assert hardware is not None
    return build_trainer(
        config.trainer,
        config.callbacks,
        config.logger,
        config.checkpoint,
        hardware=hardware,
        folder=folder,
        stop=stop,
        passes=passes,
        seed=config.top.seed,
        allow_leak=config.causality.allow_leak,
        sweep=sweep_of(folder),
        step=step,
        started=started,
        resume=f"{command('train')} resume={folder}",
        added=added,
    )
