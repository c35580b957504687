"""scripts/bench.py: errors in one line, the files that it writes, and a complete comparison with another program."""

import json

import pytest

from tests.conftest import assert_refused, run_python
from tests.scripts.benchmarks.conftest import TINY, composed
from tril.scripts import bench
from tril.scripts.benchmarks.section import Section
from tril.scripts.cli.compose import CONFIGS
from tril.scripts.cli.errors import UserError
from tril.scripts.cli.typed import Typed

SECTION = Section("train", "First", [{"a": 1}], {"a": [1.0]})


def command_line(*overrides, cwd):
    return run_python(CONFIGS.parent / "scripts" / "bench.py", *overrides, cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


@pytest.fixture
def in_folder(tmp_path, monkeypatch, text):
    """The settings of a benchmark of a tiny model on a small text; the current folder is tmp_path."""
    monkeypatch.chdir(tmp_path)
    small = ["repeats=1", "warmup=1", "steps=2", "out=here", "data=files", f"data.path={text}"]
    return [*small, *TINY, "data.tokenizer.kind=byte", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.mark.parametrize(
    "override, message",
    [("what=nothing", "what=nothing is not a part"), ("repeat=3", "there is no setting repeat; did you mean repeats?")],
)
def test_a_mistake_is_reported_in_one_line_with_status_2(tmp_path, override, message):
    assert_refused(command_line(override, cwd=tmp_path), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["model.dim=7"], "model.n_heads"),
        (["out=text.txt"], "cannot write to text.txt; choose another folder with out=FOLDER"),
        (["what=start", "data.path=missing.txt", "repeats=1"], "missing.txt"),
    ],
)
def test_a_mistake_is_found_before_anything_is_timed(in_folder, tmp_path, overrides, message, capsys):
    with pytest.raises(UserError, match=message):
        bench.benchmark(composed(*in_folder, "what=train", *overrides), Typed())
    assert "## " not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["text.txt"]


def test_files_and_output(in_folder, tmp_path, capsys, monkeypatch):
    """In this process; with a command that is typed, since Hydra's form of it has more quotes."""
    monkeypatch.setattr(bench, "COMMAND", "python scripts/bench.py 'vs=python other.py'")
    bench.benchmark(composed(*in_folder, "what=train"), Typed())
    folder = tmp_path / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.md", "bench.png"]
    said = capsys.readouterr()
    assert said.out == (folder / "bench.md").read_text() + "\nhere: bench.md, bench.json, bench.png\n"
    assert "- command: python scripts/bench.py 'vs=python other.py'\n" in said.out
    assert said.err.splitlines() == ["train: repetition 1 of 1"]
    read = json.loads((folder / "bench.json").read_text())
    (section,) = read["sections"]
    assert (
        section["rows"][0]["tokens per step"] == 32 and len(section["samples"]["seconds per step, repetition 1"]) == 2
    )
    assert read["settings"]["model"]["dim"] == 32 and read["settings"]["steps"] == 2


def test_results_before_a_failure_are_kept(in_folder, tmp_path, capsys, monkeypatch):
    def two_parts(bench):
        yield SECTION
        raise UserError("out of memory")

    monkeypatch.setattr("tril.scripts.benchmarks.training_speed.train", two_parts)
    with pytest.raises(UserError, match="out of memory"):
        bench.benchmark(composed(*in_folder, "what=train"), Typed())
    (section,) = json.loads((tmp_path / "here/bench.json").read_text())["sections"]
    assert section["title"] == "First"
    assert capsys.readouterr().out == (tmp_path / "here/bench.md").read_text()


def test_parts_run_in_the_order_of_what(in_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tril.scripts.benchmarks.training_speed.train", lambda bench: [SECTION])
    other = Section("cost", "Second", [{"b": 2}], {})
    monkeypatch.setattr("tril.scripts.benchmarks.cost.run", lambda bench: [other])
    bench.benchmark(composed(*in_folder, "what=[cost,train]"), Typed())
    read = json.loads((tmp_path / "here/bench.json").read_text())
    assert [section["title"] for section in read["sections"]] == ["Second", "First"]
    assert not (tmp_path / "here/bench.png").exists()  # neither has a panel


@pytest.mark.slow
def test_a_complete_comparison_with_another_program(in_folder, tmp_path):
    """Ours is a real train.py on a small text; the other program prints lines like nanoGPT's."""
    (tmp_path / "other.py").write_text("for i in range(9): print(f'iter {i}: loss 4.2, time 12.5ms, mfu 1%')")
    typed = ["what=train", *in_folder, "callbacks.samples.max_new_tokens=2", "vs=python other.py"]
    done = command_line(*typed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ("train: ", "vs: ", "validation is ")  # the last: the split of a text that is prepared here
    unexpected = [line for line in done.stderr.splitlines() if not line.startswith(expected)]
    assert unexpected == []  # no warnings
    folder = tmp_path / "here"
    assert done.stdout == (folder / "bench.md").read_text() + "\nhere: bench.md, bench.json, bench.png\n"
    command = next(line for line in done.stdout.splitlines() if line.startswith("- command: python "))
    assert command.endswith("callbacks.samples.max_new_tokens=2 'vs=python other.py'")  # without Hydra's quotes
    read = json.loads((folder / "bench.json").read_text())
    assert [section["name"] for section in read["sections"]] == ["train", "train"]
    ours, other = read["sections"][1]["rows"]
    assert other["ms per step (median)"] == 12.5 and ours["tokens per step"] == other["tokens per step"] == 32
    assert ours["tokens/s, tril / other, median"] == pytest.approx(ours["tokens/s"] / other["tokens/s"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "here", "other.py", "text.txt"]


@pytest.mark.slow
def test_a_failure_of_the_other_program_ends_with_status_2(in_folder, tmp_path):
    (tmp_path / "other.py").write_text("raise SystemExit('out of memory')")
    done = command_line("what=train", *in_folder, "vs=python other.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")
    assert "out of memory" in done.stderr
    sections = json.loads((tmp_path / "here/bench.json").read_text())["sections"]
    assert [section["title"] for section in sections] == ["Training: the module alone"]
    assert done.stdout == (tmp_path / "here/bench.md").read_text()
