"""Another program beside ours: what is read off it, what is refused, and the command that ours is started with."""

import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from tests.scripts.benchmarks.test_bench import composed
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import CONFIGS, UserError, plain

PROGRAM = """
import sys
print("compiling")
for i, ms in enumerate(sys.argv[2:]):
    print(f"iter {i}: loss 4.2, time {ms}ms, mfu 1%")
print("bye", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
NOTHING = {"vs": None, "vs_dir": None, "vs_pattern": "time ([0-9.]+)ms", "vs_tokens": None, "vs_sample": None}
CSV = """epoch,lr/adamw,step,train/loss,train/tokens_per_second,val/loss
0,0.1,1,4.0,10.0,
0,0.1,2,4.0,20.0,
0,0.1,3,4.0,100.0,
0,,3,,,3.9
0,0.1,4,4.0,400.0,
0,0.1,5,4.0,200.0,
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "other.py").write_text(PROGRAM)
    return tmp_path


def settings(folder, arguments, **changes):
    return NOTHING | {"vs": f"python other.py {arguments}", "vs_dir": str(folder)} | changes


def test_the_steps_after_the_warm_up_are_read_off_its_output(program):
    step, seconds = versus.their_run(settings(program, "0 500 90 12.5 10 12 99"), warmup=2, steps=3)
    assert step == 0.012 and seconds > 0  # the median of 12.5, 10 and 12; not of 99, which ours does not run


@pytest.mark.parametrize(
    "arguments, changes, message",
    [
        ("3 1 2 3", {}, "vs ended with status 3: bye"),
        ("0 1 2", {}, "is found 2 times in what vs printed, and warmup=2"),
        ("0 1 2 3", {"vs_pattern": "step (.*) s"}, "is found 0 times"),
    ],
)
def test_a_program_that_fails_or_says_nothing_ends_in_one_line(program, arguments, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        versus.their_run(settings(program, arguments, **changes), warmup=2, steps=3)
    assert "\n" not in str(caught.value) and "bye" in str(caught.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vs": "python x.py"}, "vs is timed in what=train, which is not among what=decode,data; add it"),
        ({"vs_sample": "python sample.py --n=100"}, "lacks {n}"),
        ({"vs_sample": "no-such-program {n}"}, "there is no program no-such-program"),
        ({"vs_sample": "python 'x {n}"}, "is no command (No closing quotation)"),
        ({"vs_sample": "  "}, "is no command"),
        ({"vs_sample": "python {n}", "vs_dir": "/no/such"}, "vs_dir=/no/such is no folder"),
        ({"vs_tokens": 0}, "vs_tokens=0 must be a whole number of at least 1"),
        ({"vs_tokens": True}, "vs_tokens=True must be"),
        ({"vs_pattern": "time (.*"}, "is no regular expression"),
        ({"vs_pattern": "time .*"}, "has 0 groups; it needs one"),
    ],
)
def test_what_cannot_be_started_or_read_is_refused_before_anything_runs(changes, message):
    with pytest.raises(ValueError) as caught:
        versus.check(NOTHING | changes, ["decode", "data"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_commands_are_words_without_a_shell():
    assert versus.arguments("python a.py 'b c' $HOME") == [sys.executable, "a.py", "b c", "$HOME"]
    assert versus.arguments("/usr/bin/python3 a.py")[0] == "/usr/bin/python3"
    assert versus.sampling_command("python s.py --n={n} '{n} x'", 7) == [sys.executable, "s.py", "--n=7", "7 x"]


def test_sampling_is_the_difference_of_two_lengths(monkeypatch):
    took = {versus.SHORT: 2.0, versus.LONG: 2.0 + 0.01 * (versus.LONG - versus.SHORT)}
    monkeypatch.setattr(versus, "run", lambda name, command, folder: (took[int(command[2])], ""))
    bench = SimpleNamespace(cfg=NOTHING | {"vs_sample": "python s.py {n}"})
    assert versus.sampling_seconds_per_token(bench) == pytest.approx(0.01)
    took[versus.LONG] = 1.0
    with pytest.raises(UserError, match="put {n} where"):
        versus.sampling_seconds_per_token(bench)


OVERRIDES = ["experiment=shakespeare_nanogpt_cpu", "logger=none", "data.path=/a b/c.txt", "trainer.max_steps=900"]


@pytest.fixture
def bench(tmp_path):
    def bench(vs, **changes):
        cfg = composed("experiment=shakespeare_nanogpt_cpu", "trainer.accelerator=cpu", f"output_dir={tmp_path}")
        cfg.data.path = str(tmp_path / "other.py")
        return Bench(plan_of(cfg), plain(cfg) | NOTHING | {"vs": vs} | changes, 2, 2, 3, OVERRIDES, tmp_path)

    return bench


def test_ours_is_train_py_with_the_typed_settings_and_the_steps_of_the_benchmark(bench, program):
    python, script, *overrides = versus.our_command(bench("python other.py"), program / "it's here")
    assert (python, script) == (sys.executable, str(CONFIGS.parent / "train.py"))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [override for override in overrides if "a b" not in override], return_hydra_config=True)
    assert (cfg.model.dim, cfg.model.context_length) == (128, 64)  # of the experiment
    assert (cfg.trainer.max_steps, cfg.trainer.log_every_n_steps, cfg.optim.schedule.warmup_steps) == (5, 2, 5)
    assert cfg.hydra.run.dir == str(program / "it's here") and cfg.logger.name == "csv"
    assert "data.path=/a b/c.txt" in overrides


def test_rows_of_whole_programs(bench, program, monkeypatch, capsys):
    """Ours is a made-up metrics.csv, theirs a program that prints."""
    monkeypatch.setattr(versus, "prepare", lambda bench: None)
    run = versus.run

    def fake(name, command, folder=None):
        if str(versus.TRAIN) not in command:
            return 3.0, run(name, command, folder)[1]
        target = program / command[-1].partition("=")[2].strip("'") / "csv" / "version_0"
        target.mkdir(parents=True)
        (target / "metrics.csv").write_text(CSV)
        return 9.0, ""

    monkeypatch.setattr(versus, "run", fake)
    section = versus.training(bench("python other.py 0 9 9 1000 2000 3000", vs_dir=str(program), vs_tokens=100))
    ours, theirs = section.rows
    assert ours["tokens/s"] == pytest.approx(200)  # steps 3 to 5; 1 and 2 are the warm-up
    assert ours["tokens per step"] == 12 * 64 and ours["ms per step (median)"] == pytest.approx(1000 * 768 / 200)
    assert theirs["tokens per step"] == 100 and theirs["tokens/s"] == pytest.approx(50)
    assert [ours[f"tokens/s, ours / theirs, {key}"] for key in ("median", "smallest", "largest")] == pytest.approx(
        [4, 4, 4]
    )
    assert (ours["whole process (s)"], theirs["whole process (s)"]) == (9, 3)
    assert {name: len(values) for name, values in section.samples.items()} == {
        f"seconds {what}, {whose}": 2 for what in ("per step", "of the process") for whose in ("ours", "theirs")
    }
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "ms per step" in line]
    assert said == ["ours", "theirs", "theirs", "ours"]
