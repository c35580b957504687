"""Deliberate defects of the product, each with the contract test that catches it.

An entry of defects.txt is a name, a file, its contract test, the lines to replace (-) and those that replace them (+).
When code moves, its entry moves with it. `python -m tests.contract.defects [NAME ...]` prints which are caught.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.contract.harness import LIBRARIES, copy_project

MORE_LIBRARIES = "gguf pydantic safetensors.torch selenium.webdriver tokenizers transformers".split()
Defect = namedtuple("Defect", "name file test old new")


def load() -> list[Defect]:
    """The defects in defects.txt."""
    found = []
    for entry in Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n"):
        *head, lines = entry.split("\n", 3)
        found.append(Defect(*head, *("\n".join(re.findall(rf"^\{sign} (.*)", lines, re.MULTILINE)) for sign in "-+")))
    return found


def edited(defect: Defect, root: Path) -> str:
    """The content of its file with the defect."""
    text = (root / defect.file).read_text("utf-8")
    assert text.count(defect.old) == 1, f"{defect.name}: {defect.file} has {text.count(defect.old)} of:\n{defect.old}"
    return text.replace(defect.old, defect.new)


@cache
def server(thread: int) -> subprocess.Popen:
    """A process for this thread, which runs pytest in its forks: to import the libraries takes 10 s."""
    left_out = re.compile("PYTEST_|PYTHONPATH$")
    variables = {name: value for name, value in os.environ.items() if not left_out.match(name)}
    command = [sys.executable, "-P", Path(__file__).with_name("fork_pytest.py"), *LIBRARIES, *MORE_LIBRARIES]
    options = {"cwd": "/", "env": variables | {"OMP_NUM_THREADS": "1"}, "encoding": "utf-8"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


def fails(tests: set[str], defect: Defect | None = None) -> bool:
    """Whether a test fails in a copy of the project with the defect. An error in a fixture raises AssertionError."""
    with TemporaryDirectory() as folder:
        root, output = copy_project(Path(folder) / "tril"), Path(folder) / "output"
        if defect is not None:
            (root / defect.file).write_text(edited(defect, root), "utf-8")
        output.touch()
        selected = [f"tests/contract/{test}" for test in sorted(tests)]
        options = ["-x", "-n0", "-rN", "-m", "", "-p", "no:cacheprovider"]
        process = server(threading.get_ident())
        print(json.dumps([str(root), str(output), *options, *selected]), file=process.stdin, flush=True)
        status, printed = int(process.stdout.readline()), output.read_text("utf-8")
    is_error = status not in (0, 1) or re.search(r"\d error", printed.strip().rpartition("\n")[2])
    assert not is_error, printed[-6000:]
    return status == 1


def row(defect: Defect) -> str:
    began = time.perf_counter()
    outcome = "caught" if fails({defect.test}, defect) else "MISSED"
    return f"| {defect.name} | {defect.test} | {outcome} | {time.perf_counter() - began:.0f} |"


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:  # a table: defect, test, outcome, seconds
        for line in pool.map(row, [defect for defect in load() if defect.name in sys.argv[1:] or not sys.argv[1:]]):
            print(line, flush=True)
