"""The installed package: a wheel next to a foreign model.py, the console command, and other operating systems."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import run_python
from tril.scripts.common.cli import CONFIGS
from tril.scripts.common.command import COMMANDS

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
TINY = ["model.n_layers=1", "model.dim=16", "model.n_heads=2", "model.context_length=16"]
RUN = [
    "data=files",
    "data.path=text.txt",
    "data.tokenizer.kind=byte",
    "data.batch_size=2",
    "trainer.max_steps=10",
    "trainer.val_check_interval=10",
    "trainer.accelerator=cpu",
    "optim.schedule.warmup_steps=2",
    "callbacks.samples.max_new_tokens=4",
]

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
    for name in ("model", "data", "scripts", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
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
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(200)))

    def run(*arguments):
        command = [binaries / "tril", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder, run.python = folder, python
    return run


def test_a_wheel_trains_samples_and_certifies_next_to_a_foreign_model(tril):
    code = "import tril.model.gpt; print(tril.model.gpt.__file__)"
    place = subprocess.run(
        [tril.python, "-c", code], cwd=tril.folder, capture_output=True, text=True, check=True
    ).stdout
    assert "site-packages" in place and str(ROOT) not in place

    tril("train", *TINY, *RUN, f"data.cache_dir={tril.folder / 'cache'}")
    [run] = tril.folder.glob("outputs/*/*")
    assert (run / "summary.json").is_file() and (run / "checkpoints" / "best.ckpt").is_file()
    text = tril("sample", "ckpt=latest", "prompt=line", "max_new_tokens=8", "seed=0", "stream=false")
    assert text.startswith("line") and len(text) > len("line")
    tril("certify", *TINY, "model.context_length=9", "device=cpu", "out=proof")
    assert (tril.folder / "proof" / "causality.json").is_file()


def test_a_wheel_gives_pytest_the_fixture_in_a_project_of_ten_lines(tril, tmp_path):
    (tmp_path / "model.py").write_text(PROJECT)
    (tmp_path / "test_model.py").write_text(TESTS)
    command = [tril.python, "-m", "pytest", "--rootdir=.", "--causal-report=report.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "query 0 changes with key 1" in done.stdout
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 models tested: 1 certified, 1 not certified." in page
    assert page.index("<h2>test_model.py::test_leak") < page.index("<h2>test_model.py::test_causal")


def test_the_wheel_holds_every_module_config_and_page(wheel):
    import zipfile

    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for folder in ("model", "data", "scripts") for path in (ROOT / folder).rglob("*.py")]
    sources += [ROOT / "py.typed"]  # type checkers read the annotations of the package
    sources += [path for folder in ("model", "scripts") for path in (ROOT / folder).rglob("*") if path.suffix in PAGES]
    sources += [*(ROOT / "configs").rglob("*.yaml"), ROOT / "train.py"]
    missing = {f"tril/{path.relative_to(ROOT).as_posix()}" for path in sources} - packed
    assert not missing
    assert all(name.startswith(("tril/", "tril-")) for name in packed)


def test_the_command_lists_every_script():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"__init__"}
    assert set(COMMANDS) == scripts | {"train"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_the_commands_with_one_line_each(arguments, monkeypatch, capsys):
    from tril.scripts.common import command

    monkeypatch.setattr(sys, "argv", ["tril", *arguments])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    for name, description in COMMANDS.items():
        assert [line.split(maxsplit=2)[2] for line in lines if line.startswith(f"  tril {name} ")] == [description]


def test_an_unknown_command_is_one_line_with_the_nearest(monkeypatch, capsys):
    from tril.scripts.common import command

    for name, remedy in (("trian", "did you mean tril train?"), ("xyz", "use one of train, sample")):
        monkeypatch.setattr(sys, "argv", ["tril", name])
        with pytest.raises(SystemExit) as error:
            command.main()
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
        # The function that `certify.py call=` names is imported from the user's working directory.
        if path not in (Path(__file__), ROOT / "model/causality/grids/callable_grid.py"):
            text = path.read_text(encoding="utf-8")
            assert "sys.path." not in text and "PYTHONPATH" not in text, path
