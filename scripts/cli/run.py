"""The steps of a run that have errors of their own: its processes, folder, loggers, minutes and training.

Lightning starts the processes of trainer.devices=N itself; torchrun and Slurm's srun start them before train.py runs.
"""

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.cache import PROGRESS
from tril.model import runs
from tril.model.atomic_files import remove_leftovers
from tril.model.runs import CHECKPOINTS, LOCK, METRICS, SETTINGS, SUMMARY, Run
from tril.scripts.cli.config import FOLDER, RunConfig
from tril.scripts.cli.errors import message_of, user_errors, writable

if TYPE_CHECKING:
    from lightning import Callback
    from lightning.pytorch.loggers import Logger

    from tril.model.checkpoint import Checkpoint
    from tril.model.training.hardware import Hardware

OF_A_RUN = (SETTINGS, SUMMARY, CHECKPOINTS, METRICS)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and srun, in Lightning's order
# The variables in which rank 0 tells the processes that Lightning starts its folder and its process id.
RUN_FOLDER, RANK_0 = "TRIL_RUN_FOLDER", "TRIL_RANK_0"


def process_rank() -> int:
    """The rank of this process in its run; 0 in a run of one process."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def n_started() -> int:
    """The number of processes that torchrun or srun started, which know nothing of each other yet; 1: neither did."""
    return int(os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS", 1))


def shared_folder() -> str | None:
    """The run's folder, in a process that Lightning starts after rank 0 has chosen it."""
    return os.environ.get(RUN_FOLDER) if process_rank() > 0 else None


def quiet_ranks() -> None:
    """Every rank but 0 prints errors only, for the rest of the process."""
    if process_rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        PROGRESS["disable"] = True
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    if process_rank() > 0 and (parent := os.environ.get(RANK_0)) is not None:
        threading.Thread(target=end_after, args=(int(parent),), daemon=True).start()


def end_after(parent: int) -> None:
    """Ends this process when its parent has. torch waits for a rank 0 that was killed early for over half an hour."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextlib.contextmanager
def open_run(chosen: str | None, checkpoint: "Checkpoint | None") -> Iterator[Run]:
    """Creates and locks the folder of a run for the block. A run that ends before it wrote anything leaves nothing.

    Args:
        chosen: hydra.run.dir; None: the folder of the run that goes on, or a new one below outputs/.
        checkpoint: of the run that goes on; None: it is a new run.

    Raises:
        UserError: the folder has a run, cannot be written to, or another process trains the run.
    """
    with contextlib.ExitStack() as stack:
        with user_errors():
            folder = Path(shared_folder() or choose_folder(chosen, checkpoint)).absolute()
            os.environ[RUN_FOLDER] = str(folder)
            stack.callback(os.environ.pop, RUN_FOLDER, None)
            run = Run(folder)
            if process_rank() == 0:
                os.environ[RANK_0] = str(os.getpid())
                stack.callback(os.environ.pop, RANK_0, None)
                stack.enter_context(run.lock())
                remove_leftovers(folder)
        try:
            yield run
        finally:
            if process_rank() == 0 and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the folder of a date has other runs
                    for path in (folder, *folder.parents[: 0 if chosen else 2]):
                        path.rmdir()


def choose_folder(chosen: str | None, checkpoint: "Checkpoint | None") -> Path:
    """The folder of a run, which exists then; see `open_run`."""
    if checkpoint is not None:
        return runs.run_folder(Path(str(checkpoint.path)))
    if chosen is None and n_started() > 1:
        raise ValueError(f"torchrun and srun start processes that need one folder; add {FOLDER}=FOLDER")
    if chosen is None:
        return runs.new_folder(runs.ROOTS[0])
    # Rank 0 decides for all: another rank can come here when rank 0 has written its first file.
    if not chosen or process_rank() == 0 and any(Path(chosen, name).exists() for name in OF_A_RUN):
        remedy = f"continue it with resume={chosen}, or " if runs.is_resumable(Path(chosen)) else ""
        raise ValueError(f"{FOLDER}={chosen} must be a folder without a run; {remedy}choose another folder")
    return writable(chosen, FOLDER)


def choose_hardware(config: RunConfig, *, one_process: bool = False) -> "Hardware":
    """The hardware that the settings of a run choose; imports torch.

    Args:
        one_process: the run cannot start further processes.

    Raises:
        ValueError: this machine lacks what they need.
    """
    from tril.model.gpt import check_memory
    from tril.model.training.hardware import select_hardware

    check_memory(config.model)
    trainer = config.trainer
    hardware = select_hardware(trainer.accelerator, trainer.precision, config.top.compile)
    most = max(8, os.cpu_count() or 1)  # more processes than cores are for tests
    if hardware.accelerator == "cpu" and trainer.devices != "auto" and trainer.devices > most:
        raise ValueError(f"trainer.devices={trainer.devices} must be at most {most} on this machine's CPU")
    if trainer.is_distributed and one_process:
        chosen = f"trainer.strategy={trainer.strategy} with trainer.devices={trainer.devices}"
        raise ValueError(f"{chosen} starts processes; use tril train in a terminal, or trainer=default")
    started, nodes, devices = n_started(), trainer.num_nodes, replace(config, hardware=hardware).devices
    if devices != started and (started > 1 or nodes > 1):
        product = f"trainer.devices={devices // nodes} * trainer.num_nodes={nodes}"
        number = "the number of processes that torchrun or srun started"
        raise ValueError(f"{product} must be {started}, {number}; change one of them")
    return hardware


def instantiate(targets: Mapping[str, Any], folder: Path) -> "list[Callback | Logger]":
    """The callbacks and the loggers that the command line or configs/ name by a `_target_`.

    Args:
        targets: dotted key -> `_target_` and arguments.
        folder: of the run, in which loggers save.

    Raises:
        ValueError: one that cannot be imported, that is no callback or logger, or that raises an error.
    """
    import hydra
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

    made = []
    for key, node in targets.items():
        kind, given = Logger if key.startswith("logger.") else Callback, f"{key}={node}"
        try:
            made.append(hydra.utils.instantiate(({"save_dir": str(folder)} if kind is Logger else {}) | dict(node)))
        except Exception as error:  # whatever the constructor raises is about its arguments
            raise ValueError(f"{given}: {message_of(error.__cause__ or error)}") from error
        if not isinstance(made[-1], kind):
            raise ValueError(f"{given} is no {kind.__name__.lower()} of Lightning; set {key}._target_=CLASS")
    return made
