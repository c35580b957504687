"""Runs train.py in every process of `tests.ranks.run_ranks`, one run after the other.

Argument: a JSON file with a list of [overrides, whether the run ends at its first validation]. Overrides that start
with resume= continue a run.
"""

import json
import sys
from pathlib import Path

from tests.runs import in_process, interrupted, train_typed, typed
from tril.scripts.cli.process import quiet_ranks


def run(overrides: list[str], ends_early: bool) -> None:
    if overrides[0].startswith("resume="):
        done = in_process(*overrides, cwd=Path.cwd())
        assert done.returncode == 0, done.stderr
    elif ends_early:
        with interrupted():
            train_typed(typed(*overrides))
    else:
        train_typed(typed(*overrides))


def main() -> None:
    quiet_ranks()
    for overrides, ends_early in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(overrides, ends_early)


if __name__ == "__main__":
    main()
