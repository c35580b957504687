"""The processes of a run: their ranks, and the folder that all of them use.

Lightning starts the processes of trainer.devices=N itself; torchrun and Slurm's srun start them before train.py runs.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and srun, in Lightning's order
RUN_FOLDER = "TRIL_RUN_FOLDER"  # the variable in which rank 0 tells the processes that Lightning starts its folder


def process_rank() -> int:
    """The rank of this process in its run; 0 in a run of one process."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def n_started() -> int:
    """The number of processes that torchrun or srun started, which know nothing of each other yet; 1: neither did."""
    return int(os.environ.get("WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS", 1))


def quiet_ranks() -> None:
    """Every rank but 0 prints errors only, for the rest of the process."""
    if process_rank() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


def warn(line: str) -> None:
    """Prints a line to stderr, once for all processes of the run."""
    if process_rank() == 0:
        print(f"warning: {line}", file=sys.stderr, flush=True)


def shared_source(source: str) -> str:
    """The run to resume: the folder that rank 0 told this process, or `source`."""
    return os.environ.get(RUN_FOLDER, source) if process_rank() > 0 else source


@contextlib.contextmanager
def shared_folder(choose: Callable[[], Path]) -> Iterator[Path]:
    """The run's folder. Rank 0 chooses it for the processes that Lightning starts in the block."""
    if process_rank() > 0 and RUN_FOLDER in os.environ:
        yield Path(os.environ[RUN_FOLDER])
        return
    folder = choose()
    os.environ[RUN_FOLDER] = str(folder.absolute())
    try:
        yield folder
    finally:
        os.environ.pop(RUN_FOLDER, None)
