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

import sys
import time
from typing import Any

from tril.model.runs import Run
from tril.scripts.cli.app import CommandLine, compose, entry
from tril.scripts.cli.config import FOLDER, RunConfig, TrainCommand, check_minutes, check_single
from tril.scripts.cli.errors import UserError, command, user_errors
from tril.scripts.cli.process import quiet_ranks
from tril.scripts.cli.resume import check_resumed, is_finished, resume
from tril.scripts.cli.run import build_module, fit_run, instantiate, open_run, plan_minutes, prepare_text, sweep_of


def train(*settings: str) -> Run:
    """Trains a model in this process, as `python train.py SETTINGS` does: train("model=nano", "seed=1").

    Args:
        settings: as on the command line, group=choice or key=value.

    Returns:
        The finished run: its `folder`, `summary`, `config` and `metrics`, and `load()` for its model.

    Raises:
        UserError: a ValueError whose message is one line: a wrong setting, or a run that diverged.
        KeyboardInterrupt: Ctrl-C or SIGTERM stopped the run after a checkpoint; the message says how to continue.
    """
    for setting in settings:
        if not isinstance(setting, str) or setting.startswith("-"):
            remedy = 'settings are strings, such as "trainer.max_steps=100"; use grids and options in a terminal'
            raise UserError(f"{setting!r} is no setting of a run; {remedy}")
    try:
        return run(compose("train", settings), one_process=True)
    except UserError as error:
        raise error.with_traceback(None) from None  # a notebook shows the line, not the frames that found it


def run_job(cfg: Any) -> float:
    """A run of a grid, in a process of its own."""
    from tril.scripts.experiments.launch import run_job

    return run_job(cfg)


@entry("train", grid=run_job)
def main(line: CommandLine[TrainCommand]) -> None:
    quiet_ranks()
    try:
        run(line)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        remedy = f"{command('train', 'resume=latest')} continues from the last checkpoint, if there is one"
        print(f"stopped at once by Ctrl-C; {remedy}", file=sys.stderr)
        sys.exit(130)


def run(line: CommandLine[TrainCommand], *, one_process: bool = False) -> Run:
    """One run, to its end.

    Args:
        one_process: reject settings that start further processes, and raise KeyboardInterrupt after a signal.

    Raises:
        UserError: wrong settings, before anything expensive starts; a model that sees the future, before the first
            step; a loss that is not finite.
    """
    started, given, folder = time.perf_counter(), line.given, line.given.get(FOLDER)
    is_single = folder is None or sweep_of(folder) is None
    if is_single:
        check_single(given, line.grid)
    settings, checkpoint, source, planner = line.settings, None, None, None
    with user_errors():
        if line.own.resume is not None:
            settings, checkpoint = resume(line)
        elif line.own.init_from is not None:
            from tril.scripts.cli.init_from import load_weights, take_over

            settings, source = take_over(line)
    config = RunConfig.of(settings, given if is_single else None)
    if line.own.minutes is not None:
        check_minutes(config.trainer, given)
    config = config.on_this_machine(one_process=one_process)
    import torch

    from tril.model.gpt import GPT
    from tril.model.training.stop import Stopped
    from tril.model.training.trainer import build_trainer

    with open_run(folder, checkpoint) as run:
        with user_errors():
            added = instantiate(config.targets, run.folder)
            data = prepare_text(config)
            config = config.fitted(data.meta["vocab_size"])
            if line.own.minutes is not None:
                fixed = [*given, *(["model"] if source else [])]  # settings that keep their values
                config, planner = plan_minutes(config, data, started + 60 * line.own.minutes, fixed, run)
            torch.manual_seed(config.seed_for("initialisation"))
            model = GPT(config.model)
            if source is not None:
                load_weights(source.lm, model)
            if checkpoint is not None:
                check_resumed(checkpoint, config, data.meta["fingerprint"], given)
                if is_finished(run, checkpoint.step or 0, config.trainer.max_steps, given):
                    return run
            trainer = build_trainer(
                config,
                run.folder,
                passes=config.train_tokens() / data.meta["counts"]["train"]["tokens"],
                sweep=sweep_of(run.folder),
                started=started,
                planner=planner,
                added=added,
            )
            torch.manual_seed(config.seed_for(f"dropout/{rank}" if (rank := trainer.global_rank) else "dropout"))
            lineage = checkpoint.lineage if checkpoint else source.lineage if source else None
            module = build_module(config, model, data, lineage)
        try:
            fit_run(trainer, module, data, config, run, checkpoint)
        except Stopped as stopped:
            if one_process:
                raise KeyboardInterrupt(stopped.describe(f'train("resume={run.folder}")')) from None
            if trainer.is_global_zero:
                print(stopped.describe(command("train", f"resume={run.folder}")), file=sys.stderr, flush=True)
            raise
    return run


if __name__ == "__main__":
    main()
