"""What a run changes in its process, for callers that go on afterwards, such as a notebook."""

import contextlib
import gc
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

LOGGERS = ("lightning.pytorch", "lightning.fabric")  # whose level a run sets


@contextlib.contextmanager
def unchanged_process(arguments: Sequence[str]) -> Iterator[None]:
    """Restores the state of Hydra, torch, the random generators and Python after the block.

    Signal handlers are restored by `stop_on_signals`.

    Args:
        arguments: sys.argv in the block. Messages name its first element as the program.
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels, before, collects = [logger.level for logger in loggers], sys.argv, gc.isenabled()
    try:
        with _unchanged_hydra(), _unchanged_torch(), _unchanged_random(), warnings.catch_warnings():
            sys.argv = list(arguments)
            yield
    finally:
        sys.argv = before
        gc.enable() if collects else gc.disable()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _unchanged_hydra() -> Iterator[None]:
    """Hydra is not initialized in the block, as in a new process. Hydra restores HydraConfig itself."""
    instances = GlobalHydra.instance(), VersionBase.instance()
    hydra, base, name = instances[0].hydra, instances[1].version_base, JobRuntime.instance().get("name")
    try:
        instances[0].clear()
        yield
    finally:
        GlobalHydra.set_instance(instances[0])
        VersionBase.set_instance(instances[1])
        instances[0].hydra, instances[1].version_base = hydra, base
        JobRuntime.instance().set("name", name)


@contextlib.contextmanager
def _unchanged_torch() -> Iterator[None]:
    """The options that a run and Lightning's Trainer set for all of torch."""
    import torch

    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _unchanged_random() -> Iterator[None]:
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
