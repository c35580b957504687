"""what=start: what is waited for, and how a process that never gets there is reported."""

import sys
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from tests.scripts.benchmarks.test_bench import composed
from tril.model.checkpoint import load
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import starting
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import UserError, plain

TINY = [
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "model.context_length=16",
    "data.batch_size=2",
    "data.tokenizer.kind=char",
]
CPU = ["trainer.accelerator=cpu", "trainer.precision=32-true"]


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    typed = [*TINY, *CPU, "data=files", f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]

    def bench(*overrides, repeats=1):
        cfg = composed(*typed, *overrides, f"output_dir={tmp_path}")
        return Bench(plan_of(cfg), plain(cfg), repeats, 1, 1, typed, tmp_path)

    return bench


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_waits_for_the_line_of_a_step_and_ends_the_process(bench):
    code = "import sys, time; print('model 3\\nstep 1/5', flush=True); time.sleep(100)"
    assert 0 < starting.until(bench(), "train.py", python(code), starting.first_step) < 100


def test_waits_for_the_first_byte_and_ends_the_process(bench):
    code = "import sys, time; print('on cpu', file=sys.stderr); print('a', end='', flush=True); time.sleep(100)"
    assert 0 < starting.until(bench(), "sample.py", python(code), starting.first_byte) < 100


@pytest.mark.parametrize("reached, printed", [(starting.first_step, "model 3\n3 steps"), (starting.first_byte, "")])
def test_a_process_that_ends_before_is_reported_with_its_last_words(bench, reached, printed):
    code = f"import sys; print({printed!r}, end=''); sys.exit('first\\nerror: no such thing')"
    with pytest.raises(UserError, match="train.py ended too early: error: no such thing"):
        starting.until(bench(), "train.py", python(code), reached)


def test_the_figures_from_literal_times(bench, monkeypatch):
    seconds = {"-c pass": 0.1, "-c import torch": 1.0, "--help": 1.5}
    steps, tokens = iter([6.0, 9.0, 7.0]), iter([2.0, 2.5, 1.5])
    monkeypatch.setattr(
        starting, "ended", lambda *words: next(s for end, s in seconds.items() if " ".join(words).endswith(end))
    )
    monkeypatch.setattr(starting, "until", lambda bench, name, *rest: next(steps if name == "train.py" else tokens))
    (section,) = starting.run(bench(repeats=3))
    rows = {row["what"]: tuple(row.values())[1:] for row in section.rows}
    assert rows == {
        "python: ended": (0.1, 0.1, 0.1),
        "import torch: ended": (1.0, 1.0, 1.0),
        "train.py --help: ended": (1.5, 1.5, 1.5),
        "train.py: first step done": (7.0, 6.0, 9.0),
        "scripts/sample.py: first token": (2.0, 1.5, 2.5),
    }
    assert section.samples["train.py: first step done"] == [6.0, 9.0, 7.0]
    axes = Figure().subplots()
    section.draw(axes)
    assert [bar.get_width() for bar in axes.patches] == [0.1, 1.0, 1.5, 7.0, 2.0]


def test_the_fresh_checkpoint_has_the_tokenizer_of_the_data_and_no_zeros(bench, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(starting, "ended", lambda *words: 1.0)
    monkeypatch.setattr(starting, "until", lambda bench, name, command, reached: commands.append(command) or 1.0)
    starting.run(bench())
    lm = load(tmp_path / "fresh.ckpt")
    assert (
        lm.tokenizer.get_vocab_size() == lm.config.vocab_size == 28 + 4
    )  # letters and "T"; space, full stop, line end; two of its own
    assert all(p.abs().max() > 0 for p in lm.model.parameters())
    assert commands[1][2:] == [f"ckpt={tmp_path / 'fresh.ckpt'}", "device=cpu", "prompt="]
    assert (tmp_path / "cache").is_dir()


def test_another_checkpoint_is_sampled_where_one_is_given(bench, monkeypatch, tmp_path):
    commands = []
    (tmp_path / "mine.ckpt").touch()
    monkeypatch.setattr(starting, "ended", lambda *words: 1.0)
    monkeypatch.setattr(starting, "until", lambda bench, name, command, reached: commands.append(command) or 1.0)
    starting.run(bench(f"ckpt={tmp_path / 'mine.ckpt'}"))
    assert f"ckpt={tmp_path / 'mine.ckpt'}" in commands[1] and not (tmp_path / "fresh.ckpt").exists()


def test_the_two_scripts_say_what_is_waited_for(bench, monkeypatch, tmp_path):
    """The real ones: `until` would raise if the line or the text never came."""
    monkeypatch.setattr(starting, "ended", lambda *words: 1.0)
    bench = bench()
    (section,) = starting.run(replace(bench, overrides=[*bench.overrides, "~callbacks.causality"]))  # a second less
    assert all(row["s (median)"] > 0 for row in section.rows)
    assert (tmp_path / "start" / "config.yaml").is_file() and not list(
        tmp_path.rglob("summary.json")
    )  # the run was not waited for
