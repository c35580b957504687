"""Deliberate defects of the product, each with the contract test that catches it.

An entry is a file, its contract test, the lines to replace (-) and those that replace them (+). When code moves, its
entry moves with it; their number never falls. `python -m tests.contract.defects [NAME ...]` prints which are caught.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("train.py", "configs", "data", "docs", "model", "scripts", "tests", "pyproject.toml", "README.md", "load.py")
TABLE = Path(__file__).with_name("defects.txt")


@dataclass(frozen=True)
class Defect:
    """One deliberate defect: in `file`, the text `old`, which occurs once, becomes `new`."""

    name: str
    file: str
    test: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Edits the file of the copy `root` of the project."""
        path = root / self.file
        text = path.read_text("utf-8")
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has {text.count(self.old)} of:\n{self.old}"
        path.write_text(text.replace(self.old, self.new), "utf-8")


def load() -> list[Defect]:
    """The defects in defects.txt."""
    found = []
    for entry in TABLE.read_text("utf-8").strip().split("\n\n"):
        name, file, test, *lines = entry.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Defect(name, file, test, old, new))
    return found


def outcome(defect: Defect | None, tests: list[str]) -> tuple[int, float, str]:
    """How many tests failed in a copy of the project with the defect, the seconds, and what pytest printed.

    An error outside of a test, as in a fixture, is no failure of a test: it raises AssertionError.
    """
    with TemporaryDirectory() as folder:
        root = Path(folder) / "tril"  # found before the installed package
        for part in filter(Path.is_dir, (ROOT / name for name in PARTS)):
            shutil.copytree(part, root / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        for part in filter(Path.is_file, (ROOT / name for name in PARTS)):
            shutil.copy(part, root / part.name)
        if defect is not None:
            defect.apply(root)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        variables |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        selected = [f"tests/contract/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-rN", "-m", "", "-p", "no:cacheprovider", *selected]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=root, env=variables, capture_output=True, encoding="utf-8", timeout=600)
        summary = done.stdout.strip().rpartition("\n")[2]
        errors = done.returncode not in (0, 1) or re.search(r"\d error", summary)
        assert not errors, done.stdout[-3000:] + done.stderr[-3000:]
        n_failed = int(match[1]) if (match := re.search(r"(\d+) failed", summary)) else 0
        return n_failed, time.perf_counter() - began, done.stdout


def main() -> None:
    """Prints a table of the defects, the tests that catch them, and the seconds."""
    defects = [defect for defect in load() if defect.name in sys.argv[1:] or not sys.argv[1:]]
    with ThreadPoolExecutor(2) as pool:
        for defect, (n_failed, seconds, _) in zip(
            defects, pool.map(lambda d: outcome(d, [d.test]), defects), strict=True
        ):
            print(
                f"| {defect.name} | {defect.test} | {'caught' if n_failed else 'MISSED'} | {seconds:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
