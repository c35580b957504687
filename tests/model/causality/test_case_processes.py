"""Certificates that several processes compute."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import tiny_gpt
from tril.model.causality import case_processes
from tril.model.causality.case import Case, ModelError
from tril.model.causality.case_processes import certify_grid, certify_in_processes
from tril.model.causality.certificate import certify
from tril.model.causality.grids.gpt_grid import gpt_case_builders
from tril.model.causality.subject import GPTSubject
from tril.model.gpt import GPTConfig

TINY = GPTConfig(vocab_size=31, context_length=9, n_layers=1, dim=16, n_heads=2)
SMALL = {"precisions": ("32-true",), "backends": ("fused",)}


def in_another_process():
    return multiprocessing.parent_process() is not None


def failing_grid(how, folder):
    """Two cases. Another process takes the second one, which then kills it, or raises the error of a model."""
    taken = Path(folder, "taken")

    def case():
        return Case(GPTSubject(tiny_gpt(context_length=5)), {"weights": "random"}, [5], budget=1e9, equivalence=False)

    def second():
        if in_another_process():
            taken.touch()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ModelError("the model fails")
        return replace(case(), labels={"weights": "second"})

    def first():
        while not in_another_process() and not taken.exists():
            time.sleep(0.05)
        return case()

    return [first, second]


def waiting_grid(folder):
    """Each process writes its number and waits."""
    Path(folder, str(os.getpid())).touch()
    if in_another_process():
        time.sleep(60)
    return failing_grid("killed", folder)


def test_the_certificate_is_that_of_one_process():
    grid, names = functools.partial(gpt_case_builders, TINY, **SMALL), []
    expected = certify("tiny", (build() for build in grid()))
    found = certify_in_processes("tiny", grid, 2, progress=names.append)
    assert found.passed and str(found.canary) == str(expected.canary)
    assert found.results == expected.results
    assert sorted(names) == sorted(case.name for case in (build() for build in grid()))
    assert found.dependencies.keys() == expected.dependencies.keys()
    assert found.allowed is not None and expected.allowed is not None and found.allowed.equal(expected.allowed)


def test_cases_of_a_killed_process_run_in_this_one(tmp_path):
    found = certify_in_processes("tiny", functools.partial(failing_grid, "killed", tmp_path), 2)
    assert {result.case for result in found.results} == {"weights=random", "weights=second"} and found.passed
    assert found.checks()["canary"] == 1


def test_the_error_of_a_model_ends_the_certificate(tmp_path):
    with pytest.raises(ModelError, match="the model fails"):
        certify_in_processes("tiny", functools.partial(failing_grid, "raises", tmp_path), 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_other_processes_end_with_the_first(tmp_path):
    code = "import functools; from tests.model.causality.test_case_processes import waiting_grid\n"
    code += "from tril.model.causality.case_processes import certify_in_processes\n"
    code += f"certify_in_processes('tiny', functools.partial(waiting_grid, {str(tmp_path)!r}), 3)\n"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as first:
        numbers = []
        while len(numbers) < 3:
            assert first.poll() is None
            time.sleep(0.1)
            numbers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
        first.kill()
    deadline = time.monotonic() + 10
    while any(Path("/proc", str(number)).exists() for number in numbers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [number for number in numbers if Path("/proc", str(number)).exists()] == []


def test_only_small_models_get_processes(monkeypatch):
    calls = []
    monkeypatch.setattr(case_processes, "certify_in_processes", lambda *_, **__: calls.append("several"))
    monkeypatch.setattr(case_processes, "certify", lambda *_, **__: calls.append("one"))
    for size, threads in ((1e7, 2), (1e9, 2), (1e9, 1), (1e11, 2)):
        monkeypatch.setattr(GPTSubject, "cost", lambda self, length, size=size: size)
        monkeypatch.setattr(case_processes.torch, "get_num_threads", lambda threads=threads: threads)
        certify_grid("tiny", functools.partial(gpt_case_builders, TINY, **SMALL))
    assert calls == ["one", "several", "one", "one"]
