"""What the figures were measured on."""

import contextlib
import os
import platform
from datetime import datetime
from importlib.metadata import version

import torch

from tril.model.training.hardware import Hardware, cpu_name
from tril.model.training.summary import code_version

DISTURBED = 0.5  # load per core
LIBRARIES = ("torch", "lightning", "tokenizers")


def machine(hardware: Hardware, load: float | None) -> dict[str, object]:
    """load: processes that were ready to run, averaged over the minute before the start; None where the system does not say."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"device": f"{hardware.device_name} ({hardware.accelerator})"}
    if hardware.accelerator == "cuda":
        about["device memory (GB)"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    about |= {"processor": cpu_name(), "cores": cores, "threads": torch.get_num_threads()}
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        about["memory (GB)"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    about |= {"system": platform.platform(), "python": platform.python_version()} | {
        name: version(name) for name in LIBRARIES
    }
    about |= {"code": code_version(), "date": f"{datetime.now():%Y-%m-%d %H:%M}", "precision": hardware.precision}
    about |= {"compiled": hardware.compile or "no", "load before the start": load}
    if load is not None and load > DISTURBED * cores:
        about["warning"] = (
            f"something else was running: the load was above {DISTURBED} x cores, so the figures are disturbed"
        )
    return about
