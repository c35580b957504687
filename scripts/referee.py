"""Judges a change:  python scripts/referee.py baseline="KEY=VALUE ..." candidate="KEY=VALUE ..." budget=60m

Trains a sweep of both, first with three seeds and then with one more at a time, until its report has a verdict or the
budget is spent. The exit status is 0 (better), 1 (worse or equal), 3 (undecided) or 2 (wrong input). The same command
continues, in the folder below multirun/ that `train.py -m` has for the keys in which the two differ.
"""

from tril.scripts.cli import interrupt

if __name__ == "__main__":
    interrupt.begin()

import shlex
import sys
import time

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.formats import Seconds
from tril.scripts.cli.app import Composed, command, compose
from tril.scripts.cli.errors import user_errors

FIRST_SEEDS = 3  # of the first look, which has most of the level
NOT_OF_AN_ARM = ("seed", "resume", "minutes", "+ablation", "sweep", "hydra")
STATUS = {"better": 0, "worse": 1, "equal within the margin": 1}


@dataclass(frozen=True, config=strict_settings())
class RefereeCommand:
    """What is compared, and when the comparison ends."""

    candidate: str = setting("", "settings of train.py that may be better, separated by spaces")
    baseline: str = setting("", 'settings of the baseline; "": the default run')
    common: str = setting("", "settings of both")
    margin: float = setting(0.005, "nats per token: differences below it count as equal", gt=0, allow_inf_nan=False)
    budget: Seconds = setting("60m", "time of this command, beyond which no seed is added: 90s, 60m, 2h")
    max_seeds: int = setting(10, "seeds at most", ge=FIRST_SEEDS, le=100)
    seed: int = setting(0, "the first seed; the others follow it", ge=0, lt=2**63)


def key_of(word: str) -> str:
    """The key of a setting of train.py."""
    return word.partition("=")[0].lstrip("+~")


def plan(own: RefereeCommand, seed: int) -> tuple[list, list[str]]:
    """The runs of baseline and candidate with this seed, and the keys in which they differ."""
    from tril.scripts.cli.config import RunConfig
    from tril.scripts.experiments import grid

    runs = []
    for text in (own.baseline, own.candidate):
        words = list({key_of(word): word for word in shlex.split(f"{own.common} {text}")}.values())
        if wrong := [word for word in words if word.partition("=")[0].partition(".")[0] in NOT_OF_AN_ARM]:
            raise ValueError(f"{wrong[0]} cannot be set for one of two configurations; leave it out")
        composed = compose("train", [*words, f"seed={seed}"])
        config = RunConfig.of(composed.settings, composed.given)
        if config.causality.allow_leak or config.callbacks.causality is None:
            raise ValueError("the referee compares certified runs; leave out causality.allow_leak, callbacks.causality")
        runs.append(grid.PlannedRun([*words, f"seed={seed}"], composed.settings, config))
    if runs[0].identity == runs[1].identity:
        raise ValueError("candidate and baseline have the same settings; set what the candidate changes")
    return runs, grid.name_runs(runs)


@command("referee", RefereeCommand)
def main(own: RefereeCommand, composed: Composed) -> None:
    from tril.scripts.experiments import run_process
    from tril.scripts.experiments.launch import record_launch
    from tril.scripts.experiments.report import read_report
    from tril.scripts.experiments.sweep import Run, label_of

    began = time.monotonic()
    with user_errors():
        (baseline, candidate), swept = plan(own, own.seed)
        shared = [word for word in baseline.arguments if key_of(word) not in ("seed", *swept)]
        settings = compose("train", shared).settings
        for n in range(FIRST_SEEDS, own.max_seeds + 1):
            seeds = range(own.seed, own.seed + n) if n == FIRST_SEEDS else [own.seed + n - 1]
            runs = [run for seed in seeds for run in plan(own, seed)[0]]
            folder = record_launch(runs, swept, settings, baseline.values, script="referee")
            for run in runs:
                run_process.train(folder / run.folder, run.arguments, run.folder)
                if (trained := Run(folder / run.folder, run.seed)).state != "finished":
                    remedy = trained.message or "start the same command again to continue"
                    raise ValueError(f"{trained.folder} is {trained.state}: {remedy}")
            report = read_report(folder, label_of(baseline.values), own.margin)
            if not report.comparisons:
                raise ValueError(f"{report.answer()} Give both the same text and split")
            [label] = [each.label for each in report.sweep.variants if each.values == candidate.values]
            look = report.comparisons[label]
            print(f"{report.answer()} {folder / report.write(folder)[0]}", flush=True)
            if look.verdict in STATUS or look.difference.mean == float("inf"):  # the candidate alone diverged
                sys.exit(STATUS.get(look.verdict, 1))
            if (time.monotonic() - began) * (n + 1) / n > own.budget:
                break
    print("undecided: budget or max_seeds is spent", flush=True)
    sys.exit(3)


if __name__ == "__main__":
    main()
