"""docs/add_your_own.md: its edits in a copy of the project, its formula, and its commands with fewer steps."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.contract.harness import copy_project
from tests.documented import EDITED, ROOT, blocks, commands

PAGE = ROOT / "docs" / EDITED
SMALL = ("model.n_layers=1", "model.dim=64", "model.context_length=16")
FEWER = {  # what shortens each command
    "certify": (*SMALL, "budget_seconds=0.1", "device=cpu"),
    "train": (*SMALL, "seed=0", "trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.accelerator=cpu"),
    "report": (),
}
FEWER["train"] += ("data.path=README.md", "data.tokenizer.kind=byte", "callbacks.causality=null")

EACH = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):  # in one process, which imports torch once
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.mark.slow
def test_the_edits_lead_from_the_formula_to_a_report(tmp_path):
    tree = copy_project(tmp_path / "tril")
    addition, field, formula = blocks(PAGE, "python")
    with (tree / "model" / "positions.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{addition}")
    config = tree / "model" / "config.py"
    edited, count = re.subn(r"\bpos: Literal\[.*?\]", field.strip(), config.read_text(encoding="utf-8"))
    assert count == 1
    config.write_text(edited, encoding="utf-8")
    (tree / "formula.py").write_text(formula, encoding="utf-8")
    lines = [["formula.py"]]
    for command in commands(PAGE):
        words = [word for word in command.words[1:] if not word.startswith("seed=")]
        lines.append([*words, *FEWER[command.script]])
    variables = {"PYTHONPATH": str(tmp_path), "TRIL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tree, "env": os.environ | variables, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", EACH, json.dumps(lines)], **options)
    assert done.returncode == 0, done.stderr
    assert len(lines) == 4 and "nano: causal" in done.stdout and "2 of 2 runs are finished" in done.stdout
    difference = re.search(r"\| pos=log \| one seed \| +[+-](\S+) \|[^|]*\|[^|]*\|\n\nmultirun/", done.stdout)
    assert difference and float(difference[1]) > 0  # the bias has an effect on the loss
