"""Trains a small causal language model:  tril train [key=value ...], or python train.py [key=value ...]

tril train                                    the standard library, a model of 3.3 M parameters
tril train minutes=5                          a model and steps that fit into this time
tril train experiment=NAME                    a complete recipe
tril train data.path="notes/*.md"             your own text
tril train model.n_heads=8 model.dim=256      any setting below
tril train -m model.n_heads=1,2,4 seed=0,1    a grid; the same command continues it
tril train -m +ablation=heads seed=0,1,2      a ready grid
tril train resume=latest                      continue the last run
tril train debug=true                         20 steps of everything, on little text
tril train init_from=hf:FOLDER                start from other weights, see docs/weights.md
"""

from tril.scripts.cli import console

if __name__ == "__main__":
    console.end_at_interrupt()

import time
from collections.abc import Sequence
from pathlib import Path

from tril.model.runs import Run, in_sweep, run_folder
from tril.model.training.settings import Stopped
from tril.scripts.cli import run as steps
from tril.scripts.cli.app import Composed, command, compose
from tril.scripts.cli.config import FOLDER, RunConfig, TrainCommand, check_minutes, check_single, is_given
from tril.scripts.cli.errors import UserError, user_errors


def train(*settings: str, **keywords: object) -> Run:
    """Trains a model in this process, as `tril train SETTINGS` does: train("model=nano", "seed=1").

    Args:
        settings: as on the command line, group=choice or key=value.

    Returns:
        The finished run: its `folder`, `summary`, `config` and `metrics`, and `load()` for its model.

    Raises:
        UserError: a ValueError whose message is one line: a wrong setting, or a run that diverged.
        KeyboardInterrupt: Ctrl-C or SIGTERM stopped the run after a checkpoint; the message says how to continue.
    """
    for wrong in (*keywords, *(each for each in settings if not isinstance(each, str) or each.startswith("-"))):
        remedy = 'give strings, as in train("model=nano", "trainer.max_steps=100"); a grid needs a terminal'
        raise UserError(f"{wrong!r} is no setting of train(); {remedy}")
    try:
        composed = compose("train", settings)
        return train_one(composed.own(TrainCommand), composed, one_process=True)
    except Stopped as stopped:
        raise KeyboardInterrupt(stopped.text) from None
    except UserError as error:
        raise error.with_traceback(None) from None  # a notebook shows the line, not the frames that found it


def run_grid(words: Sequence[str]) -> None:
    from tril.scripts.experiments.launch import run_grid

    run_grid(words)


@command("train", TrainCommand, grid=run_grid)
def main(own: TrainCommand, composed: Composed) -> None:
    steps.quiet_ranks()
    train_one(own, composed)


def train_one(own: TrainCommand, composed: Composed, *, one_process: bool = False) -> Run:
    """One run, to its end.

    Args:
        one_process: reject settings that start further processes.

    Raises:
        UserError: wrong settings, before anything expensive starts; and see `fit`.
        Stopped: a signal ended the run.
    """
    started, given, folder = time.perf_counter(), composed.given, composed.given.get(FOLDER)
    checked = None if folder and in_sweep(folder) else given  # in other runs of a sweep they may have an effect
    checkpoint = lm = lineage = planner = None
    with user_errors():
        check_single(given, composed.grid)
        if own.resume is not None:
            from tril.scripts.cli.resume import check_text, is_finished, resumed

            config, checkpoint = resumed(own.resume, composed)
            lineage, going_on = checkpoint.lineage, Run(run_folder(Path(str(checkpoint.path)).absolute()))
            if is_finished(going_on, checkpoint.step or 0, config.trainer.max_steps, given):
                return going_on
        elif own.init_from is not None:
            from tril.scripts.cli.init_from import load_weights, take_over

            settings, lm, lineage = take_over(own.init_from, composed)
            config = RunConfig.of(settings, checked)
        else:
            config = RunConfig.of(composed.settings, checked)
        if own.minutes is not None:
            check_minutes(config.trainer, given)
        hardware = steps.choose_hardware(config, one_process=one_process)

    import torch  # which takes seconds, so wrong settings are reported before

    from tril.data.datamodule import TextDataModule
    from tril.model.gpt import GPT
    from tril.model.training.module import TrainingModule
    from tril.model.training.summary import describe
    from tril.model.training.trainer import build_trainer, fit

    with steps.open_run(folder, checkpoint) as run:
        with user_errors():
            if checkpoint is not None:
                print(f"{run.folder} continues at step {checkpoint.step:,} of {config.trainer.max_steps:,}", flush=True)
            added = steps.instantiate(config.targets, run.folder) if config.targets else ()
            data = TextDataModule(config.data, context_length=config.model.context_length, seed=config.top.seed)
            config = config.complete(hardware, data.meta["vocab_size"])
            if checkpoint is not None:
                check_text(checkpoint, data.meta["fingerprint"])
            if own.minutes is not None:
                from tril.model.training.time_budget import PLANNED, STARTUP, plan_time

                fixed = [*given, *(["model", "optim.weight_decay"] if lm else [])]  # settings that keep their values
                keeps = lambda key: "experiment" in given or is_given(fixed, key)  # noqa: E731
                end = started + PLANNED * 60 * own.minutes - STARTUP
                config, planner = plan_time(config, data, end=end, keeps=keeps)
            config = config.decide_compilation()
            torch.manual_seed(config.seed_for("initialisation"))
            model = GPT(config.model)
            if lm is not None:
                load_weights(lm, model)
            trainer = build_trainer(config, run.folder, data, started=started, planner=planner, added=added)
            torch.manual_seed(config.seed_for(f"dropout/{rank}" if (rank := trainer.global_rank) else "dropout"))
            module = TrainingModule(config, model, data, config.to_dict(), lineage)
        print(describe(trainer, module), flush=True)
        fit(trainer, module, checkpoint)
    return run


if __name__ == "__main__":
    main()
