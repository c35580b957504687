"""Trains a small causal language model:  python train.py [key=value ...]

python train.py                                    the standard library, a model of 3.3 M parameters
python train.py minutes=5                          a model and steps that fit into this time
python train.py experiment=NAME                    a complete recipe
python train.py data.path="notes/*.md"             your own text
python train.py model.n_heads=8 model.dim=256      any setting below
python train.py -m model.n_heads=1,2,4 seed=0,1    a grid; the same command continues it
python train.py -m +ablation=heads seed=0,1,2      a ready grid
python train.py resume=latest                      continue the last run
python train.py debug=true                         20 steps of everything, on little text
python train.py init_from=hf:FOLDER                start from other weights, see docs/weights.md
"""

import signal
import sys
import time
from typing import Any

from tril.model.runs import Run
from tril.scripts.cli.app import CommandLine, compose, entry
from tril.scripts.cli.config import FOLDER, RunConfig, TrainCommand
from tril.scripts.cli.errors import UserError, command, user_errors
from tril.scripts.cli.process import StoppedError, StopRequest, process_rank, quiet_ranks, stop_on_signals
from tril.scripts.cli.run import (
    build_model,
    build_module,
    check_minutes,
    fit_run,
    instantiate,
    is_finished,
    open_run,
    passes_over,
    plan_minutes,
    prepare_text,
    sweep_of,
)
from tril.scripts.cli.start import check_resumed, find_start


def train(*settings: str) -> Run:
    """Trains a model in this process, as `python train.py SETTINGS` does: train("model=nano", "seed=1").

    Args:
        settings: as on the command line, group=choice or key=value.

    Returns:
        The finished run: its `folder`, `summary`, `config` and `metrics`, and `load()` for its model.

    Raises:
        UserError: a ValueError whose message is one line: a wrong setting, or a run that diverged.
        KeyboardInterrupt: Ctrl-C stopped the run, after it wrote a checkpoint; the message says how to continue.
    """
    for setting in settings:
        if not isinstance(setting, str) or setting.startswith("-"):
            remedy = 'settings are strings, such as "trainer.max_steps=100"; use grids and options in a terminal'
            raise UserError(f"{setting!r} is no setting of a run; {remedy}")
    try:
        with stop_on_signals() as stop:
            return run(compose("train", settings), stop, one_process=True)
    except UserError as error:
        raise error.with_traceback(None) from None  # a notebook shows the line, not the frames that found it
    except StoppedError as stopped:
        signum = stopped.status - 128
        if signum != signal.SIGINT:
            signal.raise_signal(signum)  # to the handler that it has without the run
        raise KeyboardInterrupt(stopped.describe(f'train("resume={stopped.folder}")')) from None


def run_job(cfg: Any) -> float:
    """A run of a grid, in a process of its own."""
    from tril.scripts.experiments.launch import run_job

    return run_job(cfg)


@entry("train", grid=run_job)
def main(line: CommandLine[TrainCommand]) -> None:
    quiet_ranks()
    try:
        with stop_on_signals() as stop:
            run(line, stop)
    except StoppedError as stopped:
        if process_rank() == 0:
            print(stopped.describe(command("train", f"resume={stopped.folder}")), file=sys.stderr, flush=True)
        elif stopped.agreed:
            sys.exit()  # Lightning kills rank 0 when another rank ends with another status
        sys.exit(stopped.status)


def run(line: CommandLine[TrainCommand], stop: StopRequest, *, one_process: bool = False) -> Run:
    """One run, to its end.

    Args:
        stop: asks the run to stop at the end of a step.
        one_process: reject settings that start further processes.

    Raises:
        UserError: wrong settings, before anything expensive starts; a model that sees the future, before the first
            step; a loss that is not finite.
    """
    started, given, chosen = time.perf_counter(), line.given, line.given.get(FOLDER)
    in_sweep = chosen is not None and sweep_of(chosen) is not None
    if not in_sweep:
        line.check_single()
    settings, start = find_start(line)  # random weights, those of another model, or a run that goes on
    config = RunConfig.of(settings, None if in_sweep else given).on_this_machine(one_process=one_process)
    check_minutes(config, line)
    from tril.model.training.trainer import build_trainer

    with open_run(chosen, start) as run:
        stop.folder = run.folder
        with user_errors():
            added = instantiate(config.targets, run.folder)
            data = prepare_text(config)
            config = config.fitted(data.prepared.meta["vocab_size"])
            config, planner = plan_minutes(config, data, line, started, run, start)
            model = build_model(config, start)
            if start.checkpoint is not None:
                check_resumed(start.checkpoint, config, data.meta["fingerprint"], given)
            trainer = build_trainer(
                config,
                run.folder,
                stop,
                passes=passes_over(data, config),
                sweep=sweep_of(run.folder),
                started=started,
                planner=planner,
                added=added,
            )
            module = build_module(config, model, data, start, trainer.global_rank)
            if is_finished(start, config, run, given):
                return run
        fit_run(trainer, module, data, config, run, start)
    return run


if __name__ == "__main__":
    main()
