"""what=data: which text is prepared, what the stages are, and what their figures are made of."""

from types import SimpleNamespace

import pytest

from tests.scripts.benchmarks.test_bench import composed
from tril.data import prepare as packing
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import preparing
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import UserError, plain

FOUND = {
    "before: memory (bytes)": 50e6,
    "training the tokenizer (s)": 4.0,
    "training the tokenizer: peak memory (bytes)": 90e6,
    "encoding (s)": 2.0,
    "encoding: peak memory (bytes)": 70e6,
    "second start (s)": 0.5,
    "second start: peak memory (bytes)": 60e6,
    "text (bytes)": 10e6,
    "training part (bytes)": 8e6,
}


@pytest.fixture
def bench(tmp_path):
    def bench(*overrides, repeats=1):
        cfg = composed("trainer.accelerator=cpu", *overrides, f"output_dir={tmp_path}")
        return Bench(plan_of(cfg), plain(cfg), repeats, 1, 1, [], tmp_path)

    return bench


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    return tmp_path / "text.txt"


def test_the_text_is_that_of_the_standard_library_again_and_again(tmp_path, monkeypatch):
    assert preparing.write_text(tmp_path / "a", 300_000).stat().st_size == 300_000
    first = next(StandardLibrary().pieces("train")).text.encode()
    assert (tmp_path / "a").read_bytes().startswith(first[:300_000])
    monkeypatch.setattr(
        StandardLibrary, "pieces", lambda self, split: iter([SimpleNamespace(text="äb"), SimpleNamespace(text="c\n")])
    )
    assert preparing.write_text(tmp_path / "b", 12).read_bytes() == "äbc\näbc\näb".encode()[:12]


def test_a_worker_times_both_stages_and_a_second_start(text, tmp_path, monkeypatch):
    """By a clock that says how often it was asked: preparing begins at 0, the tokenizer takes from 1 to 2, all ends at 3."""
    clock = iter(range(100))
    monkeypatch.setattr(preparing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    original = packing.build
    found = preparing.measure(text, TokenizerConfig(vocab_size=300), str(tmp_path / "cache"))
    assert found["training the tokenizer (s)"] == 1 and found["encoding (s)"] == 2 and found["second start (s)"] == 1
    assert found["text (bytes)"] == text.stat().st_size
    assert 0.9 * text.stat().st_size < found["training part (bytes)"] < text.stat().st_size
    assert packing.build is original
    assert len(list((tmp_path / "cache").glob("files-*/tokens.bin"))) == 1


@pytest.mark.skipif(not preparing.STATUS.is_file(), reason="Linux alone says how much memory a process took")
def test_the_peak_memory_of_a_stage_is_its_own():
    preparing.reset_peak_memory()
    before = preparing.peak_memory()
    large = bytes(range(256)) * 400_000  # 102 MB, written
    with_it = preparing.peak_memory()
    assert 100e6 < with_it - before < 130e6
    del large
    assert preparing.peak_memory() > with_it - 10e6  # still, though it is free again; the kernel counts in batches
    preparing.reset_peak_memory()
    if preparing.CLEAR_REFS.is_file():
        assert preparing.peak_memory() < with_it - 90e6


def test_the_rows_from_literal_figures():
    slower = FOUND | {"encoding (s)": 6.0, "encoding: peak memory (bytes)": 90e6}
    training, encoding, again = preparing.stages([FOUND, slower], TokenizerConfig())
    assert tuple(training.values()) == (10, "training the tokenizer", 4, 2, 90, 50)  # of the 8 MB that it reads
    assert tuple(encoding.values()) == (10, "encoding", 4, 2.5, 80, 50)
    assert tuple(again.values()) == (10, "second start", 0.5, None, 60, 50)


def test_a_tokenizer_reads_no_more_than_it_may():
    training, *_ = preparing.stages([FOUND], TokenizerConfig(train_bytes=2_000_000))
    assert training["MB/s"] == 0.5


@pytest.mark.parametrize("kind, stages", [("char", 3), ("byte", 2)])
def test_a_tokenizer_that_reads_no_text_has_no_speed(kind, stages):
    assert len(preparing.stages([FOUND], TokenizerConfig(kind=kind))) == stages


def test_without_known_memory_the_rows_say_nothing_of_it():
    found = {name: value for name, value in FOUND.items() if "memory" not in name}
    for row in preparing.stages([found], TokenizerConfig()):
        assert row["peak memory (MB)"] is None and row["of it before the start (MB)"] is None


def test_a_whole_run_in_processes_of_its_own(bench, monkeypatch):
    monkeypatch.setattr(preparing, "SIZES", (20_000, 40_000))
    (section,) = preparing.run(bench("data.tokenizer.vocab_size=300"))
    assert [(row["text (MB)"], row["stage"]) for row in section.rows] == [
        (size, stage) for size in (0.02, 0.04) for stage in ("training the tokenizer", "encoding", "second start")
    ]
    assert all(row["seconds"] > 0 for row in section.rows)
    assert section.samples["encoding (s), 0.04 MB"] == [section.rows[4]["seconds"]]


def test_a_tokenizer_that_cannot_be_read_is_reported_in_one_line(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="preparing the text failed: OSError: .*cannot read a tokenizer"):
        preparing.prepared(text, TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json")))
