"""The installed package: a wheel next to a foreign model.py, the console command, and other operating systems."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.conftest import run_python
from tril.scripts.cli.config import CONFIGS
from tril.scripts.cli.console import COMMANDS

ROOT = CONFIGS.parent
PAGES = (".html", ".css", ".js", ".jinja")
FOREIGN = "raise RuntimeError('this is not the model that was meant')\n"
PROJECT = """
import torch
class Model(torch.nn.Module):
    def __init__(self, leaks):
        super().__init__()
        self.embed, self.head, self.leaks = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9), leaks
    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x.flip(1).cumsum(1).flip(1) if self.leaks else x.cumsum(1))
"""
TESTS = """
import model
def test_causal(assert_causal):
    assert_causal(model.Model(False), vocab_size=9, context_length=16)
def test_leak(assert_causal):
    assert_causal(model.Model(True), vocab_size=9, context_length=16)
def test_pytest_rewrites_assertions_here_and_not_in_the_model():  # which has the name of a folder of Tril
    assert "@pytest_ar" in globals() and "@pytest_ar" not in vars(model)
"""
TINY = ["model.n_layers=1", "model.dim=16", "model.context_length=9"]  # short texts are certified sooner
RUN = [
    "data.path=notes",
    "data.tokenizer.kind=byte",
    "data.batch_size=16",
    "data.val_token_budget=4000",
    "trainer.max_steps=10",
    "trainer.val_check_interval=10",
    "trainer.accelerator=cpu",
    "optim.schedule.warmup_steps=2",
    "callbacks.samples.max_new_tokens=4",
]

FILES = ("train.py", "load.py", "py.typed", "pyproject.toml", "README.md", "LICENSE")
SOURCES = ("model", "data", "scripts", "configs", *FILES)

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources so that nothing left in build/ gets into it."""
    source = tmp_path_factory.mktemp("source")
    for path in (ROOT / name for name in SOURCES):
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", ".", "-w", "dist"]
    subprocess.run(command, cwd=source, check=True)
    [path] = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def tril(wheel, tmp_path_factory):
    """Runs the `tril` command of a fresh environment in a folder that holds a foreign model.py, data.py and
    scripts.py.
    """
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    # The dependencies come from this environment. Its .pth files, such as that of an editable install, are not read.
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    binaries = Path(sysconfig.get_path("scripts", scheme="venv", vars=paths))
    python = binaries / Path(sys.executable).name
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run([sys.executable, *install], check=True)
    for name in ("model.py", "data.py", "scripts.py"):
        (folder / name).write_text(FOREIGN)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # of a checkout
    environment["TRIL_CACHE"] = str(folder / "cache")

    def run(*arguments):
        command = [binaries / "tril", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder, run.python, run.environment = folder, python, environment
    return run


def test_the_package_comes_from_the_wheel_next_to_a_foreign_model(tril):
    code = "import tril.model.gpt; print(tril.model.gpt.__file__)"
    place = subprocess.run(
        [tril.python, "-c", code], cwd=tril.folder, env=tril.environment, capture_output=True, text=True, check=True
    ).stdout
    assert "site-packages" in place and str(ROOT) not in place


@pytest.mark.slow
def test_the_first_hour_with_notes_in_markdown_next_to_a_foreign_model(tril):
    """Train, sample, heads, a sweep of four runs, its report and a certificate: every figure is that of its file."""
    from pydoc_data.topics import topics  # reference pages of the standard library, English prose with code

    folder = tril.folder
    (notes := folder / "notes").mkdir()
    for name in sorted(topics)[:40]:
        (notes / f"{name}.md").write_text(topics[name], encoding="utf-8")
    settings = [*TINY, *RUN]

    printed = tril("train", *settings, "model.n_heads=2")
    [run] = folder.glob("outputs/*/*")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    figures = f"{summary['final_val_bpb']:.4f} bits per byte, {summary['final_val_loss']:.4f} nats per token"
    assert f"validation  {figures}" in printed and summary["steps"] == 10 and summary["causality"] == "certified"
    assert (run / "loss.png").is_file() and (run / "config.yaml").is_file()

    text = tril("sample", "ckpt=latest", "prompt=The statement", "max_new_tokens=8")
    assert text.startswith("The statement") and len(text.rstrip()) > len("The statement")

    printed = tril("heads", "ckpt=latest", "windows=8")
    heads = json.loads((run / "heads" / "heads.json").read_text(encoding="utf-8"))
    assert f"Loss of the whole model: {heads['loss']:.4f} nats per token over 8 windows" in printed
    assert [row["head"] for row in heads["heads"]] == ["L0H0", "L0H1"] and "| L0H1 " in printed
    assert "<html" in (run / "heads" / "attention.html").read_text(encoding="utf-8")

    printed = tril("train", "-m", *settings, "model.n_heads=1,2", "seed=0,1")
    assert "4 of 4 runs are finished" in printed
    [sweep] = folder.glob("multirun/*/*")
    losses = {heads: [loss_of(sweep / f"model.n_heads={heads},seed={seed}") for seed in (0, 1)] for heads in (1, 2)}
    printed = tril("report", "dir=latest")
    verdict = printed.splitlines()[0]
    assert re.match(r"Against n_heads=1, over 2 seeds: n_heads=2 is (better|worse|not distinguishable)", verdict)
    assert verdict in (sweep / "report.md").read_text(encoding="utf-8")
    means = dict(re.findall(r"^\| n_heads=(\d).*? \| +2 \| +(\S+) ±", printed, re.MULTILINE))
    assert means == {str(heads): f"{sum(pair) / 2:.4f}" for heads, pair in losses.items()}

    printed = tril("certify", "ckpt=latest", "device=cpu", "out=proof")
    assert "stored certificate: passed at step 10" in printed and ": causal: " in printed
    proof = json.loads((folder / "proof" / "causality.json").read_text(encoding="utf-8"))
    assert proof["passed"] is True, proof


def loss_of(run: Path) -> float:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))["final_val_loss"]


def test_a_wheel_gives_pytest_the_fixture_in_a_project_of_ten_lines(tril, tmp_path):
    (tmp_path / "model.py").write_text(PROJECT)
    (tmp_path / "test_model.py").write_text(TESTS)
    command = [tril.python, "-m", "pytest", "--rootdir=."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "output 0 depends on input 1" in done.stdout


def test_the_wheel_holds_every_module_config_and_page(wheel):
    import zipfile

    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*.py")]
    sources = [path for path in sources if not path.is_relative_to(ROOT / "scripts" / "maintenance")]
    sources += [ROOT / "py.typed"]  # type checkers read the annotations of the package
    sources += [path for folder in ("model", "scripts") for path in (ROOT / folder).rglob("*") if path.suffix in PAGES]
    sources += [*(ROOT / "configs").rglob("*.yaml"), ROOT / "train.py", ROOT / "load.py"]
    missing = {f"tril/{path.relative_to(ROOT).as_posix()}" for path in sources} - packed
    assert not missing
    assert all(name.startswith(("tril/", "tril-")) for name in packed)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_dockerfiles_build_the_wheel_of_the_tests_and_run_commands_that_exist(name):
    """They were never built, since no Docker daemon was at hand."""
    lines = (ROOT / "docs" / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8").splitlines()
    copies = [shlex.split(line)[1:] for line in lines if line.startswith("COPY ")]
    assert sorted(source for *sources, _ in copies for source in sources) == sorted(SOURCES)
    assert all(target == "./" or [target] == sources for *sources, target in copies)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [torch] = [requirement for requirement in project["dependencies"] if requirement.startswith("torch>")]
    installs = [shlex.split(line) for line in lines if line.startswith("RUN pip install")]
    assert [install[-1] for install in installs] == [torch, "."]
    assert ("https://download.pytorch.org/whl/cpu" in installs[0]) == (name == "cpu")
    [base] = [line.removeprefix("FROM python:") for line in lines if line.startswith("FROM ")]
    assert SpecifierSet(project["requires-python"]).contains(base.removesuffix("-slim"))
    [shell] = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    programs = [shlex.split(command) for command in shell[-1].split(" && ")]
    assert shell[:2] == ["sh", "-c"] and all(program[0] == "tril" and program[1] in COMMANDS for program in programs)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [program[2:] for program in programs] == [[], ["ckpt=latest", "prompt=def ", "seed=0"]]
    assert "python train.py\n" in readme and 'sample.py ckpt=latest prompt="def " seed=0\n' in readme


def test_the_command_lists_every_script():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"__init__"}
    assert set(COMMANDS) == scripts | {"train"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_the_commands_with_one_line_each(arguments, monkeypatch, capsys):
    from tril.scripts.cli import console

    monkeypatch.setattr(sys, "argv", ["tril", *arguments])
    console.main()
    lines = capsys.readouterr().out.splitlines()
    for name, description in COMMANDS.items():
        assert [line.split(maxsplit=2)[2] for line in lines if line.startswith(f"  tril {name} ")] == [description]


def test_an_unknown_command_is_one_line_with_the_nearest(monkeypatch, capsys):
    from tril.scripts.cli import console

    for name, remedy in (("trian", "did you mean train?"), ("xyz", "choose one of certify, evaluate")):
        monkeypatch.setattr(sys, "argv", ["tril", name])
        with pytest.raises(SystemExit) as error:
            console.main()
        output = capsys.readouterr()
        assert error.value.code == 2 and output.out == ""
        assert output.err.startswith(f"error: there is no command tril {name}; {remedy}")
        assert output.err.count("\n") == 1


def test_every_module_imports_where_posix_modules_are_missing(tmp_path):
    done = run_python("-W", "ignore", "-c", WITHOUT_POSIX, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_no_source_edits_the_import_path():
    for path in [
        *ROOT.glob("*.py"),
        *(p for d in ("model", "data", "scripts", "tests") for p in (ROOT / d).rglob("*.py")),
    ]:
        # certify.py call= imports from the user's working directory; the contract starts copies of the project.
        exceptions = (Path(__file__), ROOT / "scripts/certify.py")
        if path not in exceptions and not path.is_relative_to(ROOT / "tests/contract"):
            text = path.read_text(encoding="utf-8")
            assert "sys.path." not in text and "PYTHONPATH" not in text, path
