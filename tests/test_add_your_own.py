"""docs/add_your_own.md: its edits in a copy of the repository, its formula, and its commands with fewer steps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import EDITED, ROOT, blocks, commands

PAGE = ROOT / "docs" / EDITED
PRODUCT = ("train.py", "load.py", "model", "data", "scripts", "configs")
FEWER = {  # what shortens each command
    "certify": ("model.n_layers=1", "model.context_length=16", "budget_seconds=0.1", "device=cpu"),
    "train": ("model.n_layers=1", "model.context_length=16", "trainer.max_steps=2", "trainer.val_check_interval=2"),
}
LITTLE = ("seed=0,1", "data.path=text.txt", "data.tokenizer.kind=byte", "trainer.accelerator=cpu")
LITTLE += ("optim.schedule.warmup_steps=1", "callbacks.causality=null")
pytestmark = pytest.mark.xdist_group("add_your_own")  # one process makes the copy


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The product as the package `tril`, with the edits of the page."""
    tree = tmp_path_factory.mktemp("copy") / "tril"
    for name in PRODUCT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    (tree / "__init__.py").touch()
    addition, field, _ = blocks(PAGE, ("python",))
    with (tree / "model" / "positions.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{addition}")
    config = tree / "model" / "config.py"
    edited, count = re.subn(r"\bpos: Literal\[.*?\]", field.strip(), config.read_text(encoding="utf-8"))
    assert count == 1
    config.write_text(edited, encoding="utf-8")
    return tree


def run(tree: Path, *arguments: str) -> str:
    variables = {"PYTHONPATH": str(tree.parent), "TRIL_CACHE": str(tree / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_formula_of_the_page(tree):
    formula = blocks(PAGE, ("python",))[2]
    assert run(tree, "-c", f"{formula}\nimport tril.model.positions as m; print(m.__file__)").startswith(str(tree))


@pytest.mark.slow
def test_the_commands_lead_to_a_verdict(tree):
    (tree / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))
    certify, train, report = commands([PAGE])
    assert "nano: causal" in run(tree, *certify.words[1:], *FEWER["certify"])
    settings = [word for word in train.words[1:] if word != "seed=0,1,2,3,4"]
    run(tree, *settings, *FEWER["train"], *LITTLE)
    verdict = run(tree, *report.words[1:])
    assert re.search(r"pos=log", verdict) and re.search("better|worse|not distinguishable", verdict)
