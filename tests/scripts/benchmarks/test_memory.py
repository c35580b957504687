"""Peak memory of a process. The tests map their memory, so that what the allocator keeps has no influence."""

import mmap

import pytest

from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import memory

SIZE = 100_000_000  # bytes


@pytest.fixture(params=[memory.peak_memory, lambda: peak_memory_bytes("cpu")], ids=["peak_memory", "peak_memory_bytes"])
def peak_memory(request):
    if not memory.CLEAR_REFS.exists():
        pytest.skip("only Linux resets the peak")
    return request.param


def test_the_peak_counts_from_its_reset(peak_memory):
    memory.reset_peak_memory()
    before = peak_memory()
    with mmap.mmap(-1, SIZE) as allocated:
        for page in range(0, SIZE, mmap.PAGESIZE):
            allocated[page] = 1
        during = peak_memory()
        assert SIZE * 0.95 < during - before < SIZE * 1.3
    assert peak_memory() > during - SIZE * 0.1  # the peak stays after the memory is free; the kernel counts in batches
    memory.reset_peak_memory()
    assert peak_memory() < during - SIZE * 0.9


def test_systems_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "missing" / "file")
    memory.reset_peak_memory()
    assert memory.peak_memory() is None


def test_systems_without_sysconf(monkeypatch):
    assert memory.total_memory() > 1e8
    monkeypatch.delattr(memory.os, "sysconf", raising=False)  # Windows
    assert memory.total_memory() is None
