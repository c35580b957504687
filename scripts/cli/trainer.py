"""The lightning.Trainer of a run, from its settings and from what the command line adds."""

from dataclasses import replace
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
    started: float = 0.0,
    step: int | None = None,
    added: tuple[list, list] = ([], []),
) -> "tuple[Trainer, RunConfig]":
    """The Trainer with our callbacks and loggers, and the settings with the identity of the run at its trackers.

    Args:
        stop: asks the run to stop at the end of a step.
        started: time.perf_counter() at the start of the process.
        step: after which a resumed run goes on; None: a new run.
        added: callbacks and loggers that the command line adds.

    Raises:
        ValueError: an argument that Lightning, a callback or a logger refuses.
    """
    from tril.model.training.loggers import make_loggers, with_identity
    from tril.model.training.trainer import build_trainer, make_callbacks

    hardware = config.hardware
    assert hardware is not None
    sweep, seed, allow_leak = sweep_of(folder), config.top.seed, config.causality.allow_leak
    config = replace(config, logger=with_identity(config.logger, folder, sweep))
    callbacks = make_callbacks(config.callbacks, folder, seed=seed, allow_leak=allow_leak, in_sweep=sweep is not None)
    loggers = make_loggers(config.logger, folder.absolute(), step)
    trainer = build_trainer(
        config.trainer,
        config.checkpoint,
        [*callbacks, *added[0]],
        [*loggers, *added[1]],
        hardware=hardware,
        folder=folder,
        stop=stop,
        started=started,
        resume=f"{command('train')} resume={folder}",
    )
    return trainer, config
