"""`tril.train(*settings)`: the run of `python train.py SETTINGS` in this process."""

import contextlib
import logging
import random
import signal
import warnings
from collections.abc import Callable, Iterator

from tril.model.callable_module import make_callable
from tril.model.runs import Run
from tril.scripts.cli.command_line import Typed
from tril.scripts.cli.errors import UserError
from tril.scripts.cli.process import StoppedError, stop_on_signals

LOGGERS = ("lightning.pytorch", "lightning.fabric")  # whose level a run sets


def make_api(name: str, task: Callable[..., Run]) -> None:
    """Makes the module `name`, tril.train, a function of settings; `task` trains."""

    def train(*settings: str) -> Run:
        """Trains a model in this process, as `python train.py SETTINGS` does: train("model=nano", "seed=1").

        Signal handlers, random generators, warnings and torch's global options are restored afterwards.

        Args:
            settings: as on the command line, group=choice or key=value.

        Returns:
            The finished run: its `folder`, `summary`, `config` and `metrics`, and `load()` for its model.

        Raises:
            UserError: a ValueError whose message is one line: a wrong setting, or a run that diverged.
            KeyboardInterrupt: Ctrl-C stopped the run, after it wrote a checkpoint; the message says how to continue.
        """
        from tril.scripts.cli.compose import compose

        for setting in settings:
            if not isinstance(setting, str) or setting.startswith("-"):
                remedy = 'settings are strings, such as "trainer.max_steps=100"; use grids and options in a terminal'
                raise UserError(f"{setting!r} is no setting of a run; {remedy}")
        try:
            line = compose("train", Typed.of(settings))
            with unchanged_process(), stop_on_signals() as stop:
                return task(line, stop, one_process=True)
        except UserError as error:
            raise error.with_traceback(None) from None  # a notebook shows the line, not the frames that found it
        except StoppedError as stopped:
            signum = stopped.status - 128
            if signum != signal.SIGINT:
                signal.raise_signal(signum)  # to the handler that it has without the run
            raise KeyboardInterrupt(stopped.describe(f'train("resume={stopped.folder}")')) from None

    make_callable(name, train)


@contextlib.contextmanager
def unchanged_process() -> Iterator[None]:
    """Restores the state of torch, the random generators and Python after the block."""
    import numpy as np
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for logger in map(logging.getLogger, LOGGERS):
            stack.callback(logger.setLevel, logger.level)
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        stack.enter_context(warnings.catch_warnings())
        yield
