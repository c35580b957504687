"""Judges a change:  python scripts/referee.py baseline="KEY=VALUE ..." candidate="KEY=VALUE ..." budget=60m

Trains both in turn with one seed after another, and stops as soon as the difference is known: better, worse, equal
within the margin, or undecided when the budget is spent. The exit status is 0 (better), 1 (worse or equal), 3
(undecided) or 2 (wrong input). The same command continues a comparison.
"""

import contextlib
import os
import sys

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.formats import Seconds
from tril.scripts.cli.app import CommandLine, entry
from tril.scripts.cli.errors import user_errors

STATUS = {"better": 0, "worse": 1, "equal": 1, "undecided": 3}


@dataclass(frozen=True, config=strict_settings())
class RefereeCommand:
    """What is compared, and when the comparison ends."""

    candidate: str | None = setting(None, "settings of train.py that may be better, separated by spaces")
    baseline: str = setting("", 'the same of what it is compared with; "": the default run')
    common: str = setting("", "settings of both")
    margin: float = setting(0.005, "nats per token: differences below it count as equal", gt=0, allow_inf_nan=False)
    budget: Seconds = setting("60m", "time for all runs of the comparison, also of earlier starts: 90s, 60m, 2h")
    max_seeds: int = setting(100, "pairs of runs at most", ge=3, le=100)
    # half the range of torch.Generator, since later pairs add to it
    seed: int = setting(0, "of the first pair; the next pairs take seed + 1, seed + 2, ...", ge=0, lt=2**63)
    quiet: bool = setting(False, "print the result only")
    out: str | None = setting(
        None, "folder of the comparison; null: a sweep below multirun/, the same for this command"
    )


@entry("referee", RefereeCommand)
def main(line: CommandLine[RefereeCommand]) -> None:
    settings = line.own
    with user_errors():
        if settings.candidate is None:
            raise ValueError('candidate is missing; name what it changes, as in candidate="model.n_heads=8"')
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if settings.quiet else sys.stderr):
        from tril.scripts.experiments.referee import Rules, judge, plan_arms

        with user_errors():
            arms = plan_arms([settings.baseline, settings.candidate], settings.common, settings.seed)
        rules = Rules(settings.margin, settings.budget, settings.max_seeds, settings.seed)
        decision, folder = judge(arms, rules, settings.out)
    print(f"{decision} {folder / 'report.md'}", flush=True)
    sys.exit(STATUS[decision.verdict or "undecided"])


if __name__ == "__main__":
    main()
