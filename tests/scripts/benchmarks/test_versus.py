"""Comparison with another program: what is read from its output, and the command that starts our train.py."""

import sys

import pytest

from tril.data.config import DataConfig
from tril.scripts.benchmarks import processes, versus
from tril.scripts.cli.compose import compose
from tril.scripts.cli.errors import UserError
from tril.scripts.cli.typed import FREE_TEXT, Typed

PROGRAM = """
import sys
print("compiling")
for i, ms in enumerate(sys.argv[2:]):
    print(f"iter {i}: loss 4.2, time {ms}ms, mfu 1%")
sys.stdout.flush()
print("bye", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
CSV = """epoch,lr/adamw,step,train/loss,train/tokens_per_second,val/loss
0,0.1,1,4.0,10.0,
0,0.1,2,4.0,20.0,
0,0.1,3,4.0,100.0,
0,,3,,,3.9
0,0.1,4,4.0,400.0,
0,0.1,5,4.0,200.0,
"""


@pytest.fixture
def bench(make_bench, tmp_path):
    """`bench("0 500 90")`: compares with a program that prints these milliseconds after its exit status."""
    (tmp_path / "other.py").write_text(PROGRAM)

    def bench(arguments, *overrides):
        data = f"data.path={tmp_path / 'other.py'}"
        settings = ("what=[train,decode]", "repeats=2", "warmup=2", "steps=3", f"vs_dir={tmp_path}", data)
        experiment = "experiment=shakespeare_nanogpt_cpu"
        return make_bench(experiment, *settings, f"vs='python other.py {arguments}'", *overrides, typed=OVERRIDES)

    return bench


def test_the_steps_after_the_warm_up_are_read_from_the_output(bench):
    step, seconds = versus.run_other(bench("0 500 90 12.5 10 12 99").config)
    assert step == 0.012 and seconds > 0  # the median of 12.5, 10 and 12, without 99, which exceeds steps=3


@pytest.mark.parametrize(
    "arguments, overrides, message",
    [
        ("3 1 2 3", [], "vs ended with status 3: bye"),
        ("0 1 2", [], "matches 2 steps in the output of vs, of which the first warmup=2"),
        ("0 1 2 3", ["vs_pattern='step (.*) s'"], "matches 0 steps"),
    ],
)
def test_a_program_that_fails_or_prints_too_little(bench, arguments, overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        versus.run_other(bench(arguments, *overrides).config)
    assert "\n" not in str(caught.value) and "bye" in str(caught.value)


def test_commands_are_split_without_a_shell():
    assert processes.split_command("python a.py 'b c' $HOME") == [sys.executable, "a.py", "b c", "$HOME"]
    assert processes.split_command("/usr/bin/python3 a.py")[0] == "/usr/bin/python3"


def test_the_time_of_a_sampled_token_is_a_difference(bench, monkeypatch):
    times = {versus.SHORT: 2.0, versus.LONG: 2.0 + 0.01 * (versus.LONG - versus.SHORT)}
    commands = []

    def run(name, command, folder):
        commands.append(command)
        return times[int(command[2])], ""

    monkeypatch.setattr(versus, "run", run)
    config = bench("0", "vs_sample='python s.py {n} --n={n}'").config
    assert versus.sampling_seconds_per_token(config) == pytest.approx(0.01)
    assert commands[0] == [sys.executable, "s.py", str(versus.SHORT), f"--n={versus.SHORT}"]
    times[versus.LONG] = 1.0
    with pytest.raises(UserError, match="write {n} in place of"):
        versus.sampling_seconds_per_token(config)


OVERRIDES = ["experiment=shakespeare_nanogpt_cpu", "logger=csv", "data.path=/a b/c.txt", "trainer.max_steps=900"]


def test_our_command_is_train_py_with_the_typed_settings_and_the_steps_of_the_benchmark(bench, tmp_path):
    bench = bench("0", "model.dim=128")
    command = versus.train_command(bench, tmp_path / "it's here")
    assert command[:3] == [sys.executable, "-m", "tril.train"]
    typed = Typed.of(command[3:], FREE_TEXT)
    settings = compose("train", typed).settings
    model, trainer = settings["model"], settings["trainer"]
    assert (model["dim"], model["context_length"]) == (128, 64)  # of the experiment
    warmup = settings["optim"]["schedule"]["warmup_steps"]
    assert (trainer["max_steps"], trainer["log_every_n_steps"], warmup) == (5, 2, 5)
    assert typed.get("hydra.run.dir") == str(tmp_path / "it's here")
    assert settings["data"]["path"] == "/a b/c.txt"
    assert "logger=csv" in command and "logger=none" not in command


def test_rows_of_whole_programs(bench, tmp_path, monkeypatch):
    """Ours is a literal metrics.csv, the other one a program that prints."""
    monkeypatch.setattr(DataConfig, "prepare", lambda data: None)
    run, names = versus.run, []

    def fake(name, command, folder=None):
        names.append(name)
        if "tril.train" not in command:
            return 3.0, run(name, command, folder)[1]
        target = tmp_path / command[-1].partition("=")[2] / "csv" / "version_0"
        target.mkdir(parents=True)
        (target / "metrics.csv").write_text(CSV)
        return 9.0, ""

    monkeypatch.setattr(versus, "run", fake)
    bench = bench("0 9 9 1000 2000 3000", "vs_tokens=100")
    tokens = bench.run_config.tokens_per_step()
    section = versus.training(bench)
    ours, other = section.rows
    assert ours["tokens/s"] == pytest.approx(200)  # steps 3 to 5; 1 and 2 are the warm-up
    assert ours["tokens per step"] == tokens == 2 * 16
    assert ours["ms per step (median)"] == pytest.approx(1000 * tokens / 200)
    assert other["tokens per step"] == 100 and other["tokens/s"] == pytest.approx(50)
    ratios = [ours[f"tokens/s, tril / other, {key}"] for key in ("median", "smallest", "largest")]
    assert ratios == pytest.approx([4, 4, 4]) and other["tokens/s, tril / other, median"] is None
    assert (ours["whole process (s)"], other["whole process (s)"]) == (9, 3)
    assert {name: len(values) for name, values in section.samples.items()} == {
        f"seconds {what}, {program}": 2 for what in ("per step", "of the process") for program in ("tril", "other")
    }
    assert names == ["python train.py", "vs", "vs", "python train.py"]
