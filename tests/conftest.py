"""What the tests share: a fixed seed, weights that hide no path, and a tolerance counted in roundings."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # read once, when numpy comes: its threads wait for one another where cores are busy

import pytest
import torch
from torch import Tensor

from tril.model.causality.subject import randomise
from tril.model.gpt import GPT, GPTConfig

TRAINABLE = ("stacked", "explicit", "fused")  # flex has no backward on a CPU
BACKENDS = (*TRAINABLE, "flex")

# GPT-2 124M as published (Radford et al. 2019)
GPT2 = {
    "vocab_size": 50257,
    "context_length": 1024,
    "n_layers": 12,
    "dim": 768,
    "n_heads": 12,
    "pos": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": True,
    "qk_norm": False,
    "tie_embeddings": True,
    "init": "gpt2",
}

torch.set_num_threads(1)  # the tensors of the tests are so small that threads would only wait for one another


def pytest_configure(config):
    for expected in (
        "flex_attention called without torch.compile",  # on purpose: its result is what we test
        "Anomaly Detection has been enabled",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{expected}:UserWarning")


def pytest_terminal_summary(terminalreporter):
    """The count of the mutants, at the end of every run that has some."""
    names = {
        outcome: {
            report.nodeid
            for report in terminalreporter.stats.get(outcome, [])
            if "::test_mutant_is_caught[" in report.nodeid
        }
        for outcome in ("passed", "failed", "error")
    }
    if every := set.union(*names.values()):
        terminalreporter.write_line(
            f"mutants caught {len(names['passed'] - names['failed'] - names['error'])}/{len(every)}"
        )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture
def configure(tmp_path, text):
    """The settings of a tiny run on `text`, in a folder of tmp_path."""
    from tests.runs import composed

    def configure(*overrides, folder="run"):
        return composed(
            f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / folder}", *overrides
        )

    return configure


def tiny_gpt(**choices) -> GPT:
    """A GPT with all weights random, in evaluation mode."""
    shape = {"vocab_size": 31, "context_length": 12, "n_layers": 2, "dim": 32, "n_heads": 4}
    return randomise(GPT(GPTConfig(**{**shape, **choices}))).eval()


def run_python(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in a process of its own."""
    env = os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=120
    )


def assert_refused(done: subprocess.CompletedProcess, message: str) -> None:
    """As what a user typed wrongly is to end: one line on stderr, status 2, and nothing on stdout."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr


def assert_close(actual: Tensor, expected: Tensor, *, roundings: float = 64) -> None:
    """Same shape, and every element within `roundings` machine epsilons of `actual`'s dtype, relative to the largest expected value.

    64 is about what a chain of sums of some ten to a hundred products may collect.
    """
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    limit = roundings * torch.finfo(actual.dtype).eps * scale
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= limit, f"largest difference {error:.3g}, allowed {limit:.3g}"  # a NaN fails as well
