"""scripts/bench.py as it is typed: what it refuses, what it leaves behind, and one whole run beside another program."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tests.conftest import assert_refused, run_python
from tril.scripts import bench
from tril.scripts.common.cli import CONFIGS

SMALL = [
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "model.context_length=16",
    "data.batch_size=2",
    "trainer.accelerator=cpu",
]


def composed(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("bench", list(overrides))


def command_line(*overrides, cwd):
    return run_python(CONFIGS.parent / "scripts" / "bench.py", *overrides, cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("what=trian", "what=trian is no part of the benchmark; did you mean train?"),
        (
            "what=[train,3]",
            "what=3 is no part of the benchmark; legal are attention, cost, data, decode, outside, start, train",
        ),
        ("what=3", "what=3 is no part"),
        ("what=null", "what=None is no part"),
        ("what=[]", "must name each part once, and at least one"),
        ("what=[train,train]", "must name each part once"),
        ("repeats=0", "repeats=0 must be a whole number of at least 1"),
        ("steps=0", "steps=0 must be a whole number of at least 1"),
        ("steps=2.5", "steps=2.5 must be"),
        ("warmup=-1", "warmup=-1 must be a whole number of at least 0"),
        ("repeats=true", "repeats=True must be"),
        ("vs_tokens=0", "vs_tokens=0 must be"),
        ("ckpt=none.ckpt", "none.ckpt does not exist; name a checkpoint file"),
    ],
)
def test_wrong_values_are_refused(override, message):
    with pytest.raises((ValueError, OSError)) as caught:
        bench.check(composed(override))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_parts_or_one():
    assert bench.check(composed()) == list(bench.PARTS)
    assert bench.check(composed("what=outside")) == ["outside"]
    assert bench.check(composed("what=[decode,train]")) == ["decode", "train"]


def test_the_groups_and_shared_keys_are_those_of_train_py():
    """So that what is timed is what would be trained."""
    ours, theirs = OmegaConf.load(CONFIGS / "bench.yaml"), OmegaConf.load(CONFIGS / "train.yaml")
    groups, expected = (
        [str(group) for group in cfg.defaults if "override" not in str(group)] for cfg in (ours, theirs)
    )
    assert groups == expected
    shared = {key for key in theirs if key in ours} - {"defaults", "hydra", "output_dir"}
    assert shared == {"seed", "compile", "causality"} and all(ours[key] == theirs[key] for key in shared)
    own = set(ours) - set(theirs)
    assert own <= set(bench.OWN)


@pytest.mark.parametrize(
    "overrides, size",
    [
        (["model.vocab_size=123"], 123),
        (["data.tokenizer.vocab_size=300"], 300),
        (["data.tokenizer.kind=byte"], 257),
        (["data.tokenizer.kind=char"], 67),
    ],
)
def test_the_vocabulary_is_that_of_the_tokenizer_to_come(overrides, size):
    assert bench.plan_of(composed("trainer.accelerator=cpu", *overrides)).model.vocab_size == size


def test_a_tokenizer_of_the_hub_is_not_asked_for_its_size():
    with pytest.raises(ValueError, match="say it, as in model.vocab_size="):
        bench.plan_of(
            composed("trainer.accelerator=cpu", "data.tokenizer.kind=hub", "data.tokenizer.path=somebody/model")
        )


def test_what_train_py_does_not_know_is_not_handed_on():
    typed = [
        "what=train",
        "model.dim=8",
        "+trainer.x=1",
        "~callbacks.samples",
        "vs='python x'",
        "vs_dir=a",
        "vs_pattern=b",
        "vs_tokens=2",
    ]
    typed += [
        "experiment=e",
        "vs_sample=a",
        "ckpt=a",
        "out=b",
        "repeats=1",
        "warmup=1",
        "steps=1",
        "output_dir=x",
        "seed=1",
    ]
    assert bench.for_training(typed) == ["model.dim=8", "+trainer.x=1", "~callbacks.samples", "experiment=e", "seed=1"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["what=nothing"], "what=nothing is no part"),
        (["what=train", "model.dim=7"], "model.n_heads"),
        (["out=file"], "file"),
        (["repeat=3"], "there is no setting repeat; did you mean repeats?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_anything_is_timed(tmp_path, overrides, message):
    (tmp_path / "file").touch()
    assert_refused(command_line(*overrides, cwd=tmp_path), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_run_beside_another_program(tmp_path):
    """Ours is a real train.py on a small text; theirs prints what nanoGPT would."""
    (tmp_path / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(300)))
    (tmp_path / "other.py").write_text("for i in range(9): print(f'iter {i}: loss 4.2, time 12.5ms, mfu 1%')")
    settings = [
        "what=train",
        "repeats=1",
        "warmup=1",
        "steps=2",
        "out=here",
        "data=files",
        f"data.path={tmp_path / 'text.txt'}",
        *SMALL,
    ]
    done = command_line(
        *settings, "data.tokenizer.kind=byte", "callbacks.samples.max_new_tokens=2", "vs=python other.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [
        line for line in done.stderr.splitlines() if not line.startswith(("train: ", "vs: "))
    ] == []  # and no warnings
    folder = tmp_path / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.md", "bench.png"]
    assert done.stdout == (folder / "bench.md").read_text() + "\nhere: bench.md, bench.json, bench.png\n"
    command = next(line for line in done.stdout.splitlines() if line.startswith("- command: python "))
    assert command.endswith(
        "callbacks.samples.max_new_tokens=2 'vs=python other.py'"
    )  # as typed, without Hydra's quotes
    read = json.loads((folder / "bench.json").read_text())
    assert [section["name"] for section in read["sections"]] == ["train", "train"]
    ours, theirs = read["sections"][1]["rows"]
    assert theirs["ms per step (median)"] == 12.5 and ours["tokens per step"] == theirs["tokens per step"] == 32
    assert ours["tokens/s, ours / theirs, median"] == pytest.approx(ours["tokens/s"] / theirs["tokens/s"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "here", "other.py", "text.txt"]


def test_a_part_that_fails_ends_in_one_line_and_leaves_nothing(tmp_path):
    done = command_line(
        "what=train", "repeats=1", "warmup=0", "steps=1", *SMALL, "data=files", "data.path=missing.txt", cwd=tmp_path
    )
    assert_refused(done, "missing.txt")


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(300)))
    (tmp_path / "other.py").write_text("raise SystemExit('out of memory')")
    settings = [
        "what=train",
        "repeats=1",
        "warmup=0",
        "steps=1",
        "out=here",
        "data=files",
        f"data.path={tmp_path / 'text.txt'}",
        *SMALL,
    ]
    done = command_line(*settings, "data.tokenizer.kind=byte", "vs=python other.py", cwd=tmp_path)
    assert (
        done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ") and "out of memory" in done.stderr
    )
    assert [section["title"] for section in json.loads((tmp_path / "here/bench.json").read_text())["sections"]] == [
        "Training: the module alone"
    ]
    assert done.stdout == (tmp_path / "here/bench.md").read_text()
