"""The installed package: what the wheel holds, its pytest plugin, the console command, and other operating systems."""

import os
import re
import shlex
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import run_python
from tests.contract.harness import ROOT, copy_project
from tril.scripts.cli import console

PAGES = (".html", ".css", ".js", ".jinja")
# A causal model adds the sum of the tokens up to each, a leaking one of those from it on.
MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self, leaks=False):
        super().__init__()
        self.embed, self.head, self.leaks = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9), leaks
    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x.flip(1).cumsum(1).flip(1) if self.leaks else x.cumsum(1))
"""
TESTS = """
import model
SIZES = {"vocab_size": 9, "context_length": 16, "budget_seconds": 1.0}
def test_causal(assert_causal):
    assert_causal(model.Model(), **SIZES)
def test_leak(assert_causal):
    assert_causal(model.Model(leaks=True), **SIZES)
def test_error(assert_causal):
    def broken(ids):
        raise RuntimeError("no kernel")
    assert_causal(broken, **SIZES)
def test_pytest_rewrites_assertions_here_and_not_in_the_model():  # which has the name of a folder of Tril
    assert "@pytest_ar" in globals() and "@pytest_ar" not in vars(model)
"""
# Libraries that a test with assert_causal does not wait for; pytest alone does not even wait for torch.
HEAVY = ("lightning", "hydra", "omegaconf", "wandb", "datasets", "transformers", "matplotlib", "scipy")
COLLECTS = """
import pytest
pytest.main(["-p", "tril.model.causality.pytest_plugin", "-p", "no:cacheprovider", "--collect-only"])
"""
CERTIFIES = """
from model import Model
from tril.model.causality import certify
assert certify(Model(), vocab_size=9, context_length=4, budget_seconds=0.1).passed
"""
# Modules and functions that Windows or macOS lack, hidden from our own modules only: libraries adapt to the system
# themselves.
WITHOUT_POSIX = """
import builtins, importlib, os, pkgutil, sys
import datasets, hydra, lightning, matplotlib.pyplot, scipy.stats, torch, transformers
import tril.model, tril.data, tril.scripts
real = builtins.__import__
missing = {"resource", "fcntl", "pwd", "grp", "termios"}
def hide(name, globals=None, *rest):
    if name.split(".")[0] in missing and (globals or {}).get("__name__", "").startswith("tril"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, globals, *rest)
builtins.__import__ = hide
del os.getloadavg, os.fork, os.sched_getaffinity, os.sysconf
names = ["tril.train"]
for package in (tril.model, tril.data, tril.scripts):
    names += [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "test_model.py").write_text(TESTS)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_everything_and_gives_pytest_the_fixture_in_a_project_of_others(project, tmp_path):
    source, site = copy_project(tmp_path / "source"), tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", ".", "-w", "dist")
    subprocess.run(pip, cwd=source, check=True)
    [wheel] = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(site)
    files = [path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".py", *PAGES) and "maintenance" not in path.parts]
    files += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / name for name in ("train.py", "load.py", "py.typed"))]
    assert {f"tril/{path.relative_to(ROOT).as_posix()}" for path in files} <= names
    assert all(name.startswith(("tril/", "tril-")) for name in names)

    variables = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 1 and "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    failure = done.stdout[done.stdout.index("_ test_leak ") : done.stdout.index("_ test_error ")]
    assert "assert_causal(model.Model(leaks=True), **SIZES)" in failure and "pytest_plugin.py" not in failure
    assert re.search(r"output 0 depends on input 1\b", failure) and "no kernel" in done.stdout
    assert {path.name for path in project.iterdir()} == {"model.py", "test_model.py"}  # nothing is written


@pytest.mark.slow
def test_collecting_tests_imports_no_torch_and_certifying_no_library_of_training(project):
    (project / "test_model.py").write_text("def test(assert_causal): ...")
    for code, names in ((COLLECTS, ("torch", "jinja2", *HEAVY)), (CERTIFIES, HEAVY)):
        code += f"\nimport sys; print('loaded', [name for name in {names!r} if name in sys.modules])"
        done = run_python("-c", code, cwd=project, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
        assert done.stdout.endswith("loaded []\n"), done.stdout + done.stderr
        assert code.startswith(CERTIFIES) or "1 test collected" in done.stdout


@pytest.mark.slow
def test_every_module_imports_where_posix_modules_are_missing(tmp_path):
    done = run_python("-W", "ignore", "-c", WITHOUT_POSIX, cwd=tmp_path)
    assert done.returncode == 0 and int(done.stdout) > 80, done.stderr


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_dockerfiles_name_files_requirements_and_commands_that_exist(name):
    """They were never built, since no Docker daemon was at hand."""
    lines = (ROOT / "docs" / "docker" / f"Dockerfile.{name}").read_text("utf-8").splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in shlex.split(line)[1:-1]}
    assert {"model", "data", "scripts", "configs", "pyproject.toml"} <= copied
    assert all((ROOT / source).exists() for source in copied)
    torch = re.search(r'"(torch>=.*?)"', (ROOT / "pyproject.toml").read_text("utf-8"))[1]
    assert any(line.startswith("RUN pip install") and torch in line for line in lines)
    assert {*re.findall(r"tril (\w+)", lines[-1])} <= {*console.COMMANDS}


def test_the_console_command_lists_every_script_and_names_the_nearest(monkeypatch, capsys):
    assert set(console.COMMANDS) == {path.stem for path in (ROOT / "scripts").glob("[a-z]*.py")} | {"train"}
    for arguments in ([], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["tril", *arguments])
        console.main()
        lines = capsys.readouterr().out.splitlines()
        for name, description in console.COMMANDS.items():
            assert [line.split(maxsplit=2)[2] for line in lines if line.startswith(f"  tril {name} ")] == [description]
    for name, remedy in (("trian", "did you mean train?"), ("xyz", "choose one of certify, evaluate")):
        monkeypatch.setattr(sys, "argv", ["tril", name])
        with pytest.raises(SystemExit) as error:
            console.main()
        output = capsys.readouterr()
        assert (error.value.code, output.out) == (2, "") and output.err.count("\n") == 1
        assert output.err.startswith(f"error: there is no command tril {name}; {remedy}")


def test_no_source_edits_the_import_path():
    for folder in ("model", "data", "scripts", "."):
        for path in (ROOT / folder).rglob("*.py") if folder != "." else ROOT.glob("*.py"):
            if path != ROOT / "scripts/certify.py":  # call= imports from the user's working directory
                text = path.read_text(encoding="utf-8")
                assert "sys.path." not in text and "PYTHONPATH" not in text, path
