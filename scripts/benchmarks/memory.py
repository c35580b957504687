"""Memory of the machine and of this process. Imports no torch: a process that is measured needs none."""

import contextlib
import os
from pathlib import Path

STATUS = Path("/proc/self/status")  # Linux
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux, see man 5 proc: writing 5 resets the peak of the resident size


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
