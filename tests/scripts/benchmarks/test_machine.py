"""The machine and the memory of a process. The tests map memory, so that what the allocator keeps does not count."""

import mmap

import pytest

from tril.model.training.hardware import Hardware
from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import machine

SIZE = 100_000_000  # bytes


@pytest.fixture(
    params=[machine.peak_memory, lambda: peak_memory_bytes("cpu")], ids=["peak_memory", "peak_memory_bytes"]
)
def peak_memory(request):
    if not machine.CLEAR_REFS.exists():
        pytest.skip("only Linux resets the peak")
    return request.param


def test_the_peak_counts_from_its_reset(peak_memory):
    machine.reset_peak_memory()
    before = peak_memory()
    with mmap.mmap(-1, SIZE) as allocated:
        for page in range(0, SIZE, mmap.PAGESIZE):
            allocated[page] = 1
        during = peak_memory()
        assert SIZE * 0.95 < during - before < SIZE * 1.3
    assert peak_memory() > during - SIZE * 0.1  # the peak stays after the memory is free; the kernel counts in batches
    machine.reset_peak_memory()
    assert peak_memory() < during - SIZE * 0.9


def test_systems_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "STATUS", tmp_path / "missing")
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path / "missing" / "file")
    machine.reset_peak_memory()
    assert machine.peak_memory() is None


def test_systems_without_sysconf(monkeypatch):
    assert machine.total_memory() > 1e8
    monkeypatch.delattr(machine.os, "sysconf", raising=False)  # Windows
    assert machine.total_memory() is None


def test_the_machine_warns_if_it_was_busy(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    hardware = Hardware("cpu", "bf16-mixed", None, "A chip", None)
    quiet, busy = machine.describe(hardware, 2.0), machine.describe(hardware, 2.01)
    assert "warning" not in quiet and "disturb" in busy["warning"]
    assert "warning" not in machine.describe(hardware, None)
    assert quiet["device"] == "A chip (cpu)" and quiet["cores"] == 4 and quiet["precision"] == "bf16-mixed"
    expected = {"torch", "lightning", "tokenizers", "python", "code", "date", "system", "processor", "threads"}
    assert expected <= quiet.keys()
