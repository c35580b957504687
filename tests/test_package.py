"""The installed package: what the wheel holds, its pytest plugin, and the console command."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest

from tests.contract.harness import BARE, ROOT, Process, install_wheel, merged
from tril.scripts.cli import console

PAGES = (".html", ".css", ".js", ".jinja")
MODEL = """
import torch
def leaking(ids):
    return torch.nn.functional.one_hot(ids, 9).double().flip(1).cumsum(1).flip(1)
"""
TESTS = """
import pathlib, runpy, sys
import tril.model as installed
import model
def tril(*words):
    sys.argv = [sys.argv[0], *words]
    runpy.run_path(f"{pathlib.Path(installed.__file__).parents[2]}/bin/tril", run_name="__main__")
def test_leak(assert_causal):
    assert_causal(model.leaking, vocab_size=9, context_length=16, budget_seconds=1.0)
def test_pytest_rewrites_assertions_here_and_not_in_the_model():  # which has the name of a folder of Tril
    assert "@pytest_ar" in globals() and "@pytest_ar" not in vars(model)
def test_the_command_trains_and_samples(capsys):
    for words in (TRAINING, SAMPLING):
        try:
            tril(*words)
        except SystemExit as ended:
            assert not ended.code
    text = capsys.readouterr().out.splitlines()[-1]
    assert text.startswith("A red") and len(text) > len("A red")
"""
# pytest without other plugins, because of which it would take no file of Tril for a module of the top level
ONLY_TRIL = """
import importlib.metadata as metadata, os, sys, pytest
metadata.distributions = lambda: metadata.Distribution.discover(path=[os.environ["PYTHONPATH"]])
sys.exit(pytest.main())
"""


@pytest.mark.slow
def test_the_wheel_holds_everything_and_serves_a_project_of_others(once, texts, tmp_path):
    site, project = once("site", install_wheel), tmp_path / "project"
    names = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    files = [path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".py", *PAGES) and "maintenance" not in path.parts]
    files += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / name for name in ("train.py", "py.typed"))]
    assert {f"tril/{path.relative_to(ROOT).as_posix()}" for path in files} <= names
    assert all(name.startswith(("tril/", "tril-", "bin/tril")) for name in names)

    project.mkdir()
    training = ["train", *merged(BARE, f"data.path={texts}", "trainer.max_steps=4", f"hydra.run.dir={tmp_path}/run")]
    sampling = ["sample", f"ckpt={tmp_path}/run", "prompt=A red", "max_new_tokens=4", "device=cpu"]
    (project / "model.py").write_text(MODEL)
    (project / "test_model.py").write_text(f"TRAINING, SAMPLING = {training}, {sampling}\n{TESTS}")
    variables = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    variables |= {"TRIL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ONLY_TRIL, "--rootdir=.", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"output 0 depends on input 1\b", done.stdout) and "pytest_plugin.py" not in done.stdout
    assert {path.name for path in project.iterdir()} == {"model.py", "test_model.py"}  # nothing is written


@pytest.mark.parametrize(
    ("arguments", "error"), [([], ""), (["--help"], ""), (["trian"], "train?"), (["xyz"], "certify, evaluate")]
)
def test_the_console_command_lists_every_script_and_names_the_nearest(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tril", *arguments])
    with pytest.raises(SystemExit, match="2") if error else nullcontext():
        console.main()
    printed = capsys.readouterr()
    assert error in printed.err and printed.err.count("\n") == bool(error)
    listed = dict(re.findall(r"^  tril (\w+) +(.+)$", printed.out, re.MULTILINE))
    assert listed == ({} if error else console.COMMANDS)
    assert console.COMMANDS.keys() == {path.stem for path in (ROOT / "scripts").glob("[a-z]*.py")} | {"train"}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_console_command_ends_quietly_when_its_reader_has_gone(argument, tmp_path):
    def close_reader():
        read, written = os.pipe()
        os.close(read)
        os.dup2(written, 1)

    done = Process("cli.console", argument, cwd=tmp_path, before=close_reader).done()
    assert (done.returncode, done.stderr) == (141, "")
