"""A description of the machine that the benchmark ran on."""

import os
import platform
from datetime import datetime
from importlib.metadata import version

import torch

from tril.model.training.hardware import Hardware, cpu_name
from tril.model.training.summary import code_version
from tril.scripts.benchmarks.memory import total_memory

BUSY = 0.5  # load per core above which other processes disturb the measurement
LIBRARIES = ("torch", "lightning", "tokenizers")


def machine(hardware: Hardware, load: float | None) -> dict[str, object]:
    """Hardware, system and versions, by name.

    Args:
        load: runnable processes, averaged over the minute before the start; None where the system does not say.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    about: dict[str, object] = {"device": f"{hardware.device_name} ({hardware.accelerator})"}
    if hardware.accelerator == "cuda":
        about["device memory (GB)"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    about |= {"processor": cpu_name(), "cores": cores, "threads": torch.get_num_threads()}
    if (memory := total_memory()) is not None:
        about["memory (GB)"] = memory / 1e9
    about |= {"system": platform.platform(), "python": platform.python_version()}
    about |= {name: version(name) for name in LIBRARIES}
    about |= {"code": code_version(), "date": f"{datetime.now():%Y-%m-%d %H:%M}", "precision": hardware.precision}
    about |= {"compiled": hardware.compile or "no", "load before the start": load}
    if load is not None and load > BUSY * cores:
        about["warning"] = f"the load was above {BUSY} x cores: other processes disturb the figures"
    return about
