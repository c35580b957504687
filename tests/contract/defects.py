"""Deliberate defects of the product, each with the contract test that catches it.

An entry is a file, its contract test, the lines to replace (-) and those that replace them (+). When code moves, its
entry moves with it; their number never falls. `python -m tests.contract.defects [NAME ...]` prints which are caught.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.contract.harness import copy_project

TABLE = Path(__file__).with_name("defects.txt")


@dataclass(frozen=True)
class Defect:
    """One deliberate defect: in `file`, the text `old`, which occurs once, becomes `new`."""

    name: str
    file: str
    test: str
    old: str
    new: str

    def edited(self, root: Path) -> str:
        """The content of the file with the defect."""
        text = (root / self.file).read_text("utf-8")
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} of:\n{self.old}"
        return text.replace(self.old, self.new)


def load() -> list[Defect]:
    """The defects in defects.txt."""
    found = []
    for entry in TABLE.read_text("utf-8").strip().split("\n\n"):
        name, file, test, *lines = entry.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Defect(name, file, test, old, new))
    return found


def outcome(defect: Defect | None, *tests: str) -> tuple[bool, str]:
    """Whether a test failed in a copy of the project with the defect, and what pytest printed.

    An error outside of a test, as in a fixture, is no failure of a test: it raises AssertionError.
    """
    with TemporaryDirectory() as folder:
        root = copy_project(Path(folder) / "tril")  # found before the installed package
        if defect is not None:
            (root / defect.file).write_text(defect.edited(root), "utf-8")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        variables |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        selected = [f"tests/contract/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-rN", "-m", "", "-p", "no:cacheprovider", *selected]
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, encoding="utf-8", timeout=600)
        errors = done.returncode not in (0, 1) or re.search(r"\d error", done.stdout.strip().rpartition("\n")[2])
        assert not errors, done.stdout[-3000:] + done.stderr[-3000:]
        return done.returncode == 1, done.stdout


def row(defect: Defect) -> str:
    began = time.perf_counter()
    caught = "caught" if outcome(defect, defect.test)[0] else "MISSED"
    return f"| {defect.name} | {defect.test} | {caught} | {time.perf_counter() - began:.0f} |"


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:  # a table: defect, test, outcome, seconds
        for line in pool.map(row, [defect for defect in load() if defect.name in sys.argv[1:] or not sys.argv[1:]]):
            print(line, flush=True)
