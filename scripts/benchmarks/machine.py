"""The machine, and the memory of this process. Imports torch only to describe the machine."""

import contextlib
import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tril.model.training.hardware import Hardware

BUSY = 0.5  # load per core above which other processes disturb the measurement
STATUS = Path("/proc/self/status")  # Linux
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux, see man 5 proc: writing 5 resets the peak of the resident size


def describe(hardware: "Hardware", load: float | None) -> dict[str, object]:
    """Hardware, system and versions, by name.

    Args:
        load: runnable processes, averaged over the minute before the start; None where the system does not say.
    """
    import torch

    from tril.model.training.hardware import cpu_name
    from tril.model.training.summary import code_version

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    about: dict[str, object] = {"device": f"{hardware.device_name} ({hardware.accelerator})"}
    if hardware.accelerator == "cuda":
        about["device memory (GB)"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    about |= {"processor": cpu_name(), "cores": cores, "threads": torch.get_num_threads()}
    if (memory := total_memory()) is not None:
        about["memory (GB)"] = memory / 1e9
    about |= {"system": platform.platform(), "python": platform.python_version()}
    about |= {name: version(name) for name in ("torch", "lightning", "tokenizers")}
    about |= {"code": code_version(), "date": f"{datetime.now():%Y-%m-%d %H:%M}", "precision": hardware.precision}
    about |= {"compiled": hardware.compile or "no", "load before the start": load}
    if load is not None and load > BUSY * cores:
        about["warning"] = f"the load was above {BUSY} x cores: other processes disturb the figures"
    return about


def total_memory() -> int | None:
    """Bytes of memory of this machine; None where the system does not say (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def reset_peak_memory() -> None:
    """Lets the peak of the resident size count from here. Has no effect outside of Linux."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_memory() -> int | None:
    """The largest resident size of this process in bytes; None outside of Linux.

    `resource.getrusage` is no substitute: a child process inherits its parent's peak there.
    """
    return int(STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024 if STATUS.is_file() else None
