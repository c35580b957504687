"""The contract catches every deliberate defect of `defects.txt`, which are edited into copies of the project.

An entry of defects.txt is a name, a file, its contract test, the lines to replace (-) and those that replace them (+).
When code moves, its entry moves with it. `pytest -m slow -n0 tests/contract/test_defects.py -k NAME` tries one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.contract.harness import LIBRARIES, ROOT, copy_project

MORE_LIBRARIES = "hypothesis gguf pydantic safetensors.torch tokenizers transformers".split()
Defect = namedtuple("Defect", "name file test old new")


def load() -> list[Defect]:
    """The defects in defects.txt."""
    found = []
    for entry in Path(__file__).with_name("defects.txt").read_text("utf-8").strip().split("\n\n"):
        *head, lines = entry.split("\n", 3)
        found.append(Defect(*head, *("\n".join(re.findall(rf"^\{sign} (.*)", lines, re.MULTILINE)) for sign in "-+")))
    return found


DEFECTS = load()


def edited(defect: Defect) -> str:
    """The content of its file with the defect."""
    text = (ROOT / defect.file).read_text("utf-8")
    assert text.count(defect.old) == 1, f"{defect.name}: {defect.file} has {text.count(defect.old)} of:\n{defect.old}"
    return text.replace(defect.old, defect.new)


@pytest.fixture(scope="module")
def fork_pytest():
    """A process that runs pytest in its forks: to import the libraries takes 10 s."""
    left_out = re.compile("PYTEST_|PYTHONPATH$")
    variables = {name: value for name, value in os.environ.items() if not left_out.match(name)}
    command = [sys.executable, "-P", Path(__file__).with_name("fork_pytest.py"), *LIBRARIES, *MORE_LIBRARIES]
    options = {"cwd": "/", "env": variables | {"OMP_NUM_THREADS": "1"}, "encoding": "utf-8"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        yield process


def test_there_are_52_defects_and_their_lines_are_still_in_the_product():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 52
    assert all(map(edited, DEFECTS))


@pytest.mark.slow
@pytest.mark.parametrize("defect", [*DEFECTS, None], ids=lambda defect: defect.name if defect else "none")
def test_a_defect_is_caught_and_a_copy_without_one_passes(defect, fork_pytest, tmp_path):
    one_of_each_file = {each.test.partition("::")[0]: each.test for each in DEFECTS}
    tests = [defect.test] if defect else one_of_each_file.values()
    root, output = copy_project(tmp_path / "tril"), tmp_path / "output"
    if defect:
        (root / defect.file).write_text(edited(defect), "utf-8")
    output.touch()
    options = ["-x", "-n0", "-rN", "-m", "", "-p", "no:cacheprovider", *(f"tests/contract/{test}" for test in tests)]
    print(json.dumps([str(root), str(output), *options]), file=fork_pytest.stdin, flush=True)
    status, printed = int(fork_pytest.stdout.readline()), output.read_text("utf-8")
    shutil.rmtree(root)
    assert status == (1 if defect else 0), printed[-6000:]
    assert not re.search(r"\d error", printed.strip().rpartition("\n")[2]), printed[-6000:]  # in a fixture
