"""what=data: which text is prepared, what the stages are, and what the figures consist of."""

from types import SimpleNamespace

import pytest

from tril.data import prepare as prepare_module
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.benchmarks import prepare_worker, preparing
from tril.scripts.cli.errors import UserError

FIGURES = {
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


def test_the_text_repeats_the_standard_library(tmp_path, monkeypatch):
    assert preparing.write_text(tmp_path / "a", 300_000).stat().st_size == 300_000
    first = next(StandardLibrary().pieces("train")).text.encode()
    assert (tmp_path / "a").read_bytes().startswith(first[:300_000])
    pieces = [SimpleNamespace(text="äb"), SimpleNamespace(text="c\n")]
    monkeypatch.setattr(StandardLibrary, "pieces", lambda self, split: iter(pieces))
    assert preparing.write_text(tmp_path / "b", 12).read_bytes() == "äbc\näbc\näb".encode()[:12]


def test_the_worker_times_both_stages_and_a_second_start(text, tmp_path, monkeypatch):
    """The clock counts its calls: preparation starts at 0, the tokenizer takes from 1 to 2, all ends at 3."""
    clock = iter(range(100))
    monkeypatch.setattr(prepare_worker, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    original = prepare_module.build
    figures = prepare_worker.measure(text, TokenizerConfig(vocab_size=300), str(tmp_path / "cache"))
    assert figures["training the tokenizer (s)"] == 1
    assert figures["encoding (s)"] == 2 and figures["second start (s)"] == 1
    assert figures["text (bytes)"] == text.stat().st_size
    assert 0.9 * text.stat().st_size < figures["training part (bytes)"] < text.stat().st_size
    assert prepare_module.build is original
    assert len(list((tmp_path / "cache").glob("files-*/tokens.bin"))) == 1


def test_rows_from_literal_figures():
    training, encoding, second = preparing.stages(FIGURES, TokenizerConfig())
    assert tuple(training.values()) == (10, "training the tokenizer", 4, 2, 90, 50)  # of the 8 MB that it reads
    assert tuple(encoding.values()) == (10, "encoding", 2, 5, 70, 50)
    assert tuple(second.values()) == (10, "second start", 0.5, None, 60, 50)


def test_the_speed_of_training_a_tokenizer_counts_only_the_text_that_it_reads():
    training, *_ = preparing.stages(FIGURES, TokenizerConfig(train_bytes=2_000_000))
    assert training["MB/s"] == 0.5


@pytest.mark.parametrize("kind, stages", [("char", 3), ("byte", 2)])
def test_a_tokenizer_that_reads_no_text_has_no_training_stage(kind, stages):
    assert len(preparing.stages(FIGURES, TokenizerConfig(kind=kind))) == stages


def test_rows_without_memory_figures():
    figures = {name: value for name, value in FIGURES.items() if "memory" not in name}
    for row in preparing.stages(figures, TokenizerConfig()):
        assert row["peak memory (MB)"] is None and row["memory before the start (MB)"] is None


def test_every_repetition_is_a_process(make_bench, monkeypatch):
    monkeypatch.setattr(preparing, "SIZES", (40_000,))
    (section,) = preparing.run(make_bench())
    assert [(row["text (MB)"], row["stage"]) for row in section.rows] == [
        (0.04, stage) for stage in ("training the tokenizer", "encoding", "second start")
    ]
    assert all(row["seconds"] > 0 for row in section.rows)
    assert section.samples["encoding (s), 0.04 MB"] == [section.rows[1]["seconds"]]


def test_both_sizes_are_measured_in_alternating_order(make_bench, monkeypatch):
    sizes = []

    def measure(text, config):
        sizes.append(text.stat().st_size)
        return FIGURES | {"encoding (s)": float(len(sizes))}

    monkeypatch.setattr(preparing, "SIZES", (20_000, 40_000))
    monkeypatch.setattr(preparing, "measure", measure)
    (section,) = preparing.run(make_bench("repeats=2"))
    assert sizes == [20_000, 40_000, 40_000, 20_000]
    assert len(section.rows) == 6 and section.samples["encoding (s), 0.02 MB"] == [1.0, 4.0]
    encoding = section.rows[1]
    assert (encoding["seconds"], encoding["MB/s"], encoding["peak memory (MB)"]) == (2.5, 4, 70)  # of the medians


def test_a_tokenizer_that_cannot_be_read_is_reported_in_one_line(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="preparing the text ended with status 1: OSError: cannot read .* tokenizer"):
        preparing.measure(text, TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json")))
