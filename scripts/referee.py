"""Judges a change:  python scripts/referee.py baseline="KEY=VALUE ..." candidate="KEY=VALUE ..." budget=60m

Trains both in turn with one seed after another, and stops as soon as the difference is known: better, worse, equal
within the margin, or undecided when the budget is spent. The exit status is 0 (better), 1 (worse or equal), 3
(undecided) or 2 (wrong input). The same command continues a comparison.
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.scripts.cli.command_line import CommandLine, Program, entry
from tril.scripts.cli.errors import UserError, user_errors, writable
from tril.scripts.cli.formats import clock, plural
from tril.scripts.cli.process import StoppedError, stop_on_signals

if TYPE_CHECKING:
    from tril.scripts.trials.arms import Arm
    from tril.scripts.trials.decision import Decision, Rules

STATUS = {"better": 0, "worse": 1, "equal": 1, "undecided": 3}
UNITS = {"s": 1, "m": 60, "h": 3600}


def to_seconds(text: object) -> float:
    """ "90s", "60m" or "1.5h" in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", str(text))
    if not match or float(match[1]) == 0:
        raise ValueError(f"budget={text} must be a time, such as 90s, 60m or 2h")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True, config=strict_settings())
class RefereeCommand:
    """What is compared, and when the comparison ends."""

    baseline: str = setting("", 'settings of train.py, separated by spaces; "": the default run')
    candidate: str = setting("", "the same of the arm that may be better")
    common: str = setting("", "settings of both arms")
    margin: float = setting(0.005, "nats per token: differences below it count as equal", gt=0, allow_inf_nan=False)
    budget: Annotated[float, BeforeValidator(to_seconds)] = setting(
        "60m", "time for all runs of the comparison, also of earlier starts: 90s, 60m, 2h"
    )
    max_seeds: Annotated[int, Field(ge=2, le=10_000)] | None = setting(None, "pairs of runs at most; null: 100")
    seed: int = setting(
        0, "of the first pair; the next pairs take seed + 1, seed + 2, ...", ge=0, lt=2**63
    )  # half the range of torch.Generator, since later pairs add to it
    quiet: bool = setting(False, "print the result only")
    out: str = setting("referee", "folder of all comparisons and their runs")


@entry(Program("referee", RefereeCommand))
def main(line: CommandLine[RefereeCommand]) -> None:
    settings = line.own
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if settings.quiet else sys.stderr):
        decision, report = judge(settings)
    from tril.scripts.trials.referee_page import sentence

    print(f"{sentence(decision)} {report}", flush=True)
    sys.exit(STATUS[decision.verdict or "undecided"])


def judge(settings: RefereeCommand) -> tuple["Decision", Path]:
    """Trains pairs until there is a verdict; the decision and the report."""
    from tril.scripts.experiments.run_process import locked_if_free

    is_new = not Path(settings.out).exists()
    with user_errors():
        root = writable(settings.out, "out")
    try:
        arms = make_arms(settings, root)
    except UserError:
        if is_new:  # it holds copies of the code
            shutil.rmtree(root)
        raise
    folder = root / comparison_key(arms, settings)
    folder.mkdir(exist_ok=True)
    with locked_if_free(folder) as lock:
        if lock is None:
            raise UserError(f"another process is running this comparison ({folder}); wait for it, or set another seed")
        print(f"folder  {folder}", flush=True)
        return train_pairs(settings, arms, root, folder), folder / "report.md"


def make_arms(settings: RefereeCommand, root: Path) -> tuple["Arm", "Arm"]:
    """Checks both arms and copies their code."""
    from tril.scripts.trials.arms import make_arm
    from tril.scripts.trials.source_tree import copy_package

    with user_errors():
        tree = copy_package(root)
        baseline = make_arm("baseline", settings.baseline, settings.common, tree)
        candidate = make_arm("candidate", settings.candidate, settings.common, tree)
        if baseline.key == candidate.key:
            raise ValueError("baseline and candidate have the same settings; set what the candidate changes")
    return baseline, candidate


def comparison_key(arms: tuple["Arm", "Arm"], settings: RefereeCommand) -> str:
    """The name of the folder: the same for commands that compare the same arms with the same seeds."""
    parts = [arm.key for arm in arms] + [str(settings.seed)]
    return f"comparison-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def train_pairs(settings: RefereeCommand, arms: tuple["Arm", "Arm"], root: Path, folder: Path) -> "Decision":
    """Trains pairs and looks at the interval after each of them, until there is a verdict."""
    from tril.model.comparison import MAX_PAIRS
    from tril.scripts.trials.decision import Rules, decide
    from tril.scripts.trials.pair_runs import train_pair
    from tril.scripts.trials.referee_page import write_page, write_record

    rules = Rules(settings.margin, settings.budget, settings.max_seeds or MAX_PAIRS)
    runs: tuple[list, list] = ([], [])
    decision, content = decide(*runs, rules), {}
    try:
        with stop_on_signals():
            while decision.verdict is None:
                pair = len(runs[0])
                for arm_runs, run in zip(runs, train_pair(arms, root, pair, settings.seed + pair), strict=True):
                    arm_runs.append(run)
                with user_errors():
                    decision = decide(*runs, rules)
                content = write_record(folder, decision, arms, rules, root, settings.seed)
                print(progress(decision, rules), flush=True)
    except (StoppedError, SystemExit) as stopped:  # SystemExit: SIGTERM while a run trains
        status = stopped.status if isinstance(stopped, StoppedError) else stopped.code
        done = f"stopped after {plural(len(decision.seconds), 'pair')}; the same command continues ({folder})"
        print(done, file=sys.stderr, flush=True)
        sys.exit(status)
    write_page(folder, content, decision, rules)
    return decision


def progress(decision: "Decision", rules: "Rules") -> str:
    """The state after a pair, in one line."""
    from tril.scripts.trials.referee_page import span

    time = f"{clock(sum(decision.seconds))} of {clock(rules.seconds)}"
    estimate = span(decision.looks[-1]) if decision.looks else decision.reason
    return f"pair {len(decision.seconds)}  candidate - baseline = {estimate}, {time}"


if __name__ == "__main__":
    main()
