"""Judges a change:  tril referee baseline="KEY=VALUE ..." candidate="KEY=VALUE ..." budget=60m

Trains a sweep of both, first with three seeds and then with one more at a time, until its report has a verdict or the
budget is spent. The exit status is 0 (better), 1 (worse or equal), 3 (undecided) or 2 (wrong input, or a failed run).
If one of both diverges, it is the worse one. The same command continues, in the folder below multirun/ that
`train.py -m` has for the keys in which the two differ.
"""

import shlex
import sys
import time

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.formats import Seconds, wrapped
from tril.scripts.cli.app import Composed, command, compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import user_errors

FIRST_SEEDS = 3  # of the first look, which has most of the level
NOT_OF_AN_ARM = ("seed=", "resume=", "minutes=", "+ablation", "hydra")


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


def arm(words: list[str]) -> list[str]:
    """The settings of one of the two configurations. Raises ValueError for wrong ones."""
    if wrong := [word for word in words if word.startswith(NOT_OF_AN_ARM)]:
        raise ValueError(f"{wrong[0]} cannot be set for one of two configurations; leave it out")
    composed = compose("train", words)
    config = RunConfig.of(composed.settings, composed.given)
    if config.causality.allow_leak or config.callbacks.causality is None:
        raise ValueError("the referee compares certified runs; leave out causality.allow_leak, callbacks.causality")
    return words


@command("referee", RefereeCommand)
def main(own: RefereeCommand, composed: Composed) -> None:
    from tril.scripts.experiments import grid, launch, report, sweep

    began, per_seed, status, diverged = time.monotonic(), 0.0, report.UNDECIDED, False
    with user_errors():
        try:
            words = [shlex.split(f"{own.common} {text}") for text in (own.baseline, own.candidate)]
        except ValueError as error:
            raise ValueError(f"{error} in common, baseline or candidate; quotes come in pairs") from error
        arms = [arm(each) for each in words]
        if {*arms[0]} == {*arms[1]}:
            raise ValueError("candidate and baseline have the same settings; set what the candidate changes")
        for n in range(FIRST_SEEDS, own.max_seeds + 1):
            look = time.monotonic()
            seeds = range(own.seed, own.seed + n) if n == FIRST_SEEDS else [own.seed + n - 1]
            runs, swept = grid.plan([(*words, f"seed={seed}") for seed in seeds for words in arms])
            folder = launch.record_launch(runs, swept, baseline=runs[0]["values"], script="referee")
            for run in runs:
                launch.train(folder / run["folder"], run["arguments"])
                if (state := sweep.state_of(folder / run["folder"])) != "finished":
                    raise ValueError(f"{folder / run['folder']} is {state}; mend the cause, and start the same command")
            labels = [sweep.label_of(run["values"]) for run in runs[:2]]
            found = report.read_report(folder, labels[0], own.margin, candidate=labels[1])
            if not found.losses.comparable:
                raise ValueError(found.answer())
            print(wrapped(f"{found.answer()} {folder / found.write(folder)[0]}"), flush=True)
            status, now = found.status(labels[1]), time.monotonic()
            per_seed = max(per_seed, (now - look) / len(seeds))
            diverged = any(run.diverged for run in found.sweep.runs)  # which more seeds do not change
            if status != report.UNDECIDED or diverged or now - began + per_seed > own.budget:
                break
    if status == report.UNDECIDED:
        print(f"undecided: {'both diverged' if diverged else 'budget or max_seeds is spent'}", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
