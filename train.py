"""Trains a small causal language model:  python train.py [key=value ...]

python train.py                                    the standard library, a 2.6 M parameter model
python train.py experiment=NAME                    a complete recipe
python train.py data.path="notes/*.md"             your own text
python train.py model.n_heads=8 model.dim=256      any setting below
python train.py -m model.n_heads=1,2,4 seed=0,1    a grid; the same command continues it
python train.py -m +ablation=heads seed=0,1,2      a ready grid; +tune=lr: with the best learning rate of each
python train.py resume=latest                      continue the last run
python train.py debug=true                         20 steps of everything, on little text
python train.py init_from=hf:FOLDER                start from other weights, see docs/weights.md
"""

import sys
import time
from functools import partial

from tril.model.callable_module import make_callable
from tril.model.runs import Run
from tril.scripts.ablation.sweep_job import run_job
from tril.scripts.cli.api import python_api
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.entry import program_entry
from tril.scripts.cli.errors import command, user_errors
from tril.scripts.cli.folder import check_folder, open_run
from tril.scripts.cli.process import StoppedError, StopRequest, process_rank, quiet_ranks, requeued, stop_on_signals
from tril.scripts.cli.run import build_model, build_training, is_finished, prepare_text, run_training
from tril.scripts.cli.start import find_start
from tril.scripts.cli.targets import build_targets
from tril.scripts.cli.typed import FREE_TEXT, Typed


@program_entry("train", FREE_TEXT, grid=run_job)
def main(typed: Typed, config_dir: str | None) -> None:
    quiet_ranks()
    try:
        with stop_on_signals() as stop:
            train(typed, stop, config_dir)
    except StoppedError as stopped:
        if process_rank() == 0:
            line = stopped.describe(f"{command('train')} resume={stopped.folder}")
            print(line + requeued(stopped), file=sys.stderr, flush=True)
        sys.exit(stopped.status)


def train(
    typed: Typed, stop: StopRequest | None = None, config_dir: str | None = None, *, one_process: bool = False
) -> Run:
    """One run, to its end.

    Args:
        typed: the settings of the command line.
        stop: asks the run to stop at the end of a step; None: nothing does.
        config_dir: a folder with more config files.
        one_process: refuse settings that start further processes.

    Raises:
        UserError: wrong settings, before anything expensive starts; a model that sees the future, before the first
            step; a loss that is not finite.
    """
    started, stop = time.perf_counter(), stop or StopRequest()
    settings, start = find_start(typed, config_dir)  # random weights, those of another model, or a run that goes on
    stop.folder = start.run_folder
    config = RunConfig.of(settings, typed, refuse_unused=not start.in_sweep)
    if one_process:
        config.refuse_processes()
    config = config.on_this_machine()
    with user_errors():
        check_folder(start.folder, start.path)
        added = build_targets(config.targets, start.allowed_targets)
        config.check_processes()
        data = prepare_text(config)
        config, remark = config.fitted(data.prepared, step=start.step, n_read=start.n_read)
        model = build_model(config, start)
        start.check(config, data.meta, typed)
    if remark:
        print(remark, flush=True)
    with open_run(start.folder, start.path) as run:
        stop.folder = run.folder
        with user_errors():
            parts = {"added": added, "stop": stop, "started": started}
            trainer, module = build_training(config, run, model, data, start, **parts)
            if is_finished(start, config, trainer, run, typed):
                return run
        return run_training(trainer, module, data, config, run, start)


if __name__ == "__main__":
    main()
else:  # `from tril import train` gives this module
    make_callable(__name__, python_api(partial(train, one_process=True)))
