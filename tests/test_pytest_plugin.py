"""The pytest plugin in throw-away projects: the fixture, and what its import costs."""

import re
from pathlib import Path

import pytest

from tests.conftest import run_python

PLUGIN = "tril.model.causality.pytest_plugin"
# A causal model adds the mean of all tokens before; a leaking one adds the next token.
MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self, leaks=False):
        super().__init__()
        self.embed, self.head, self.leaks = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11), leaks
    def forward(self, ids):
        x = self.embed(ids)
        mean = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(mean + (torch.roll(x, -1, 1) if self.leaks else 0))
"""
TESTS = """
import pytest
from model import Model
SIZES = dict(vocab_size=11, context_length=16, budget_seconds=1.0)
def test_causal(assert_causal):
    assert_causal(Model(), **SIZES)
"""
FAILING = """
def test_leak(assert_causal):
    assert_causal(Model(leaks=True), **SIZES)
def test_error(assert_causal):
    def broken(ids):
        raise RuntimeError("no kernel")
    assert_causal(broken, **SIZES)
"""
# Libraries that a test with assert_causal does not wait for; pytest alone does not even wait for torch.
HEAVY = ("lightning", "hydra", "omegaconf", "wandb", "datasets", "transformers", "matplotlib", "scipy")


def run_pytest(folder: Path, *arguments: str):
    """Runs pytest with the plugin only, whether or not Tril is installed with its entry point."""
    plugins = ["-p", PLUGIN, "-p", "no:cacheprovider"]
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python("-m", "pytest", "--rootdir", ".", *plugins, *arguments, cwd=folder, **variables)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_model.py").write_text(TESTS)
    return tmp_path


def test_a_causal_model_passes_and_nothing_is_written(project):
    done = run_pytest(project)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert {path.name for path in project.iterdir()} == {"model.py", "test_model.py"}


def test_a_leak_fails_its_test_with_output_and_input_at_the_line_of_the_test(project):
    (project / "test_model.py").write_text(TESTS + FAILING)
    done = run_pytest(project)
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout
    failure = done.stdout[done.stdout.index("_ test_leak ") : done.stdout.index("_ test_error ")]
    assert "assert_causal(Model(leaks=True), **SIZES)" in failure and "pytest_plugin.py" not in failure
    query, key = map(int, re.findall(r"output (\d+) depends on input (\d+)", failure)[0])
    assert key == query + 1  # the model reads the next token


def test_collecting_tests_imports_no_torch(project):
    (project / "test_model.py").write_text("def test(assert_causal): ...")
    code = "import pytest, sys; pytest.main(sys.argv[1:]); print('loaded', [n for n in {names} if n in sys.modules])"
    arguments = ["-p", PLUGIN, "-p", "no:cacheprovider", "--collect-only"]
    code = code.format(names=("torch", "jinja2", *HEAVY))
    done = run_python("-c", code, *arguments, cwd=project, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 test collected" in done.stdout and done.stdout.endswith("loaded []\n"), done.stdout + done.stderr


def test_certifying_imports_no_library_of_training(project):
    code = """
import sys
from model import Model
from tril.model.causality import certify
assert certify(Model(), vocab_size=11, context_length=4, budget_seconds=0.1).passed
print("loaded", [n for n in {names} if n in sys.modules])
"""
    done = run_python("-c", code.format(names=HEAVY), cwd=project)
    assert done.stdout == "loaded []\n", done.stderr
