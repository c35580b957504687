"""The processes of one run: which one this is, and the folder that all of them use.

Lightning starts the processes of trainer.devices=N itself, torchrun and Slurm's srun start them before train.py runs.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and srun, in Lightning's order


def process_rank() -> int:
    """The rank of this process in its run; 0 in a run of one process."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def quiet_ranks() -> None:
    """Every rank but 0 prints errors only, for the rest of the process."""
    if process_rank() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 closed at exit
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


def shared_folder(choose: Callable[[], str], root: str) -> str:
    """The run's folder. All its processes get the same one.

    Lightning passes it to the processes that it starts. Under torchrun, rank 0 chooses and the others read its choice
    from torchrun's store. Under srun it follows from the number of the job.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _from_rank_0(choose)
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return str(Path(root, f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"))
    return choose()


def _from_rank_0(choose: Callable[[], str]) -> str:
    """The choice of rank 0, in every process that torchrun started."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] documented
    key = f"tril/run_folder/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if process_rank() == 0:
        store.set(key, choose())
    return store.get(key).decode()
