"""what=start: what is waited for, and how a process that ends too early is reported."""

import sys

import pytest

from tests.scripts.benchmarks.conftest import TINY
from tril.model.checkpoint import load
from tril.scripts.benchmarks import processes, starting
from tril.scripts.cli.errors import UserError


@pytest.fixture
def bench(make_bench, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    typed = ["data=files", f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    typed += ["data.tokenizer.kind=char", "data.tokenizer.vocab_size=null"]
    return lambda *overrides: make_bench(*typed, *overrides, typed=typed)


@pytest.fixture
def commands(monkeypatch):
    """Replaces the processes: the commands of those that are waited for."""
    commands = []
    monkeypatch.setattr(starting, "exit_seconds", lambda *words: 1.0)
    monkeypatch.setattr(starting, "seconds_until", lambda bench, command, *_: commands.append(command) or 1.0)
    return commands


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("prefix, printed", [(starting.STEP_LINE, "model 3\\nstep 1/5\\n"), (b"", "a")])
def test_waits_for_the_line_or_the_first_byte_and_ends_the_process(bench, prefix, printed):
    code = (
        f"import sys, time; print('on cpu', file=sys.stderr); print('{printed}', end='', flush=True); time.sleep(100)"
    )
    assert 0 < starting.seconds_until(bench(), python(code), prefix) < 100


@pytest.mark.parametrize("prefix, printed", [(starting.STEP_LINE, "model 3\n3 steps"), (b"", "")])
def test_a_process_that_ends_too_early_is_reported_with_its_last_line(bench, prefix, printed, tmp_path):
    code = f"import sys; print({printed!r}, end=''); sys.exit('first\\nerror: no such thing')"
    (tmp_path / "program.py").write_text(code)
    with pytest.raises(UserError, match="program.py ended too early: error: no such thing"):
        starting.seconds_until(bench(), [sys.executable, "-u", str(tmp_path / "program.py")], prefix)


def test_rows_from_literal_times(bench, monkeypatch):
    seconds = {"-c pass": 0.1, "-c import torch": 1.0, "--help": 1.5}
    steps, tokens = iter([6.0, 9.0, 7.0]), iter([2.0, 2.5, 1.5])
    monkeypatch.setattr(
        starting, "exit_seconds", lambda *words: next(s for end, s in seconds.items() if " ".join(words).endswith(end))
    )
    monkeypatch.setattr(
        starting, "seconds_until", lambda bench, command, *_: next(steps if "tril.train" in command else tokens)
    )
    (section,) = starting.run(bench("repeats=3"))
    rows = {row["what"]: tuple(row.values())[1:] for row in section.rows}
    assert rows == {
        "python: exit": (0.1, 0.1, 0.1),
        "import torch: exit": (1.0, 1.0, 1.0),
        "train.py --help: exit": (1.5, 1.5, 1.5),
        "train.py: first step": (7.0, 6.0, 9.0),
        "scripts/sample.py: first token": (2.0, 1.5, 2.5),
    }
    assert section.samples["train.py: first step"] == [6.0, 9.0, 7.0]
    assert section.plot.lines["train.py: first step"] == {1: 6, 2: 9, 3: 7}


def test_the_random_checkpoint_has_the_tokenizer_of_the_data_and_no_zeros(bench, commands, tmp_path):
    starting.run(bench())
    lm = load(tmp_path / "random.ckpt")
    # letters and "T"; space, full stop, line end; two special tokens
    assert lm.tokenizer.get_vocab_size() == lm.config.vocab_size == 28 + 4
    assert all(p.abs().max() > 0 for p in lm.model.parameters())
    assert commands[1][1:] == ["-m", "tril.scripts.sample", f"ckpt={tmp_path / 'random.ckpt'}", "device=cpu", "prompt="]
    assert (tmp_path / "cache").is_dir()


def test_a_given_checkpoint_is_sampled(bench, commands, tmp_path):
    (tmp_path / "mine.ckpt").touch()
    starting.run(bench(f"ckpt={tmp_path / 'mine.ckpt'}"))
    assert f"ckpt={tmp_path / 'mine.ckpt'}" in commands[1] and not (tmp_path / "random.ckpt").exists()


def test_the_real_sample_script_prints_text(bench):
    """`seconds_until` would raise if there were none."""
    bench = bench()
    checkpoint = starting.random_checkpoint(bench, bench.run_config.data.prepare())
    assert starting.seconds_until(bench, [*processes.SAMPLE, f"ckpt={checkpoint}", "device=cpu", "prompt="]) > 0


@pytest.mark.slow
def test_the_real_train_script_prints_its_first_step(bench, tmp_path):
    bench = bench()
    bench.overrides.extend([*TINY[:5], "trainer.accelerator=cpu", "~callbacks.causality"])  # a second less
    bench.run_config.data.prepare()
    assert starting.seconds_until(bench, starting.train_command(bench), starting.STEP_LINE) > 0
    assert (tmp_path / "start" / "config.yaml").is_file()
    assert not list(tmp_path.rglob("summary.json"))  # nothing waited for the end of the run
