"""What cannot be resumed is refused in one line, and what is meant is allowed by name."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import yaml

from tests.conftest import assert_refused
from tests.runs import TINY, in_process, rows
from tril.model.checkpoint import load, read, save, write
from tril.scripts.common import resume_checks
from tril.scripts.common.locks import RUN_LOCK, lock_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with outputs/DATE/TIME, a run of 4 steps, and its text."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    done = in_process(*TINY, "data.path=text.txt", "trainer.max_steps=4", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run: its folder, in a working directory of its own."""
    subprocess.run(["cp", "-r", f"{trained}/.", tmp_path], check=True)
    [folder] = tmp_path.glob("outputs/*/*")
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace(str(trained), str(tmp_path)))
    return folder.relative_to(tmp_path)


def resume(run, tmp_path, *overrides):
    return in_process(f"resume={run}", *overrides, cwd=tmp_path)


def edit(path, change):
    """Rewrites a checkpoint with valid checksums."""
    content = read(path, mmap=False)
    change(content)
    write(path, content)


def last_of(run, tmp_path):
    return tmp_path / run / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.kind=adamw", "optim.kind=adamw must be muon, as in "),
        ("optim.scale_with_width=true", "optim.scale_with_width=True must be False, as in "),
        ("model.dim=64", "model.dim=64 must be 32, as in "),
        ("data.pth=x", "there is no setting data.pth; did you mean data.path?"),
        ("data.path=other.txt", "the data (fingerprint "),
        ("data.path=missing.txt", "missing.txt"),
        ("optim=adamw", "optim=adamw cannot be combined with resume"),
        ("allow_changes=[weather]", "allow_changes=['weather'] must be a list of code, torch"),
        ("trainer.val_check_intervall=3", "there is no setting trainer.val_check_intervall; did you mean trainer.val_"),
        ("checkpoint.every_n_steps=0", "checkpoint.every_n_steps=0 must be greater than or equal to 1"),
    ],
)
def test_a_change_that_cannot_be_resumed(run, tmp_path, override, message):
    (tmp_path / "other.txt").write_text("".join(f"{i}: half of {i} is {i / 2}.\n" for i in range(400)))
    before = (tmp_path / run / "config.yaml").read_text()
    done = resume(run, tmp_path, override, "trainer.max_steps=6")
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr  # after preparing other.txt
    assert (tmp_path / run / "config.yaml").read_text() == before


def test_an_edited_setting_is_refused_until_it_is_typed(run, tmp_path):
    settings = tmp_path / run / "config.yaml"
    settings.write_text(settings.read_text().replace("max_steps: 4", "max_steps: 6"))
    assert_refused(resume(run, tmp_path), "trainer.max_steps=6 must be 4, as in ", "type trainer.max_steps=6")
    assert resume(run, tmp_path, "trainer.max_steps=6").returncode == 0


def test_meant_changes_of_the_optimizer_take_effect(run, tmp_path):
    changes = ("optim.lr=1e-5", "optim.muon_lr=1e-6", "optim.weight_decay=0.3", "optim.momentum=0.5")
    done = resume(run, tmp_path, "trainer.max_steps=6", *changes)
    assert done.returncode == 0, done.stderr
    groups = {group["name"]: group for group in read(last_of(run, tmp_path))["optimizer_states"][0]["param_groups"]}
    assert groups["decay"]["weight_decay"] == 0.3 and groups["muon"]["momentum"] == 0.5
    assert groups["decay"]["initial_lr"] == 1e-5 and groups["muon"]["initial_lr"] == 1e-6
    logged = [row for row in rows(tmp_path / run) if row["step"] == "6" and row["train/loss"]]
    assert float(logged[0]["lr/decay"]) <= 1e-5 and float(logged[0]["lr/muon"]) <= 1e-6


def test_another_version_of_the_code_or_of_torch_is_allowed_by_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(resume_checks, "source_fingerprint", lambda: "another")
    edit(last_of(run, tmp_path), lambda content: content["tril"]["versions"].update(torch="2.1.0"))
    steps = "trainer.max_steps=6"
    assert_refused(resume(run, tmp_path, steps), "torch 2.", "is not the 2.1 of ", "add allow_changes=[torch]")
    changed = "the source code of Tril has changed since "
    assert_refused(resume(run, tmp_path, steps, "allow_changes=[torch]"), changed, "add allow_changes=[code]")
    assert resume(run, tmp_path, steps, "allow_changes=[torch,code]").returncode == 0
    assert "allow_changes: null" not in (tmp_path / run / "config.yaml").read_text()
    edit(last_of(run, tmp_path), lambda content: content["tril"].update(code="a third"))
    assert_refused(resume(run, tmp_path), changed)  # a saved permission does not count


def test_allow_changes_needs_a_run_to_resume(tmp_path):
    assert_refused(
        in_process(*TINY, "allow_changes=[code]", cwd=tmp_path), "has no effect without resume; leave it out"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("loops"), "has no loops: it holds a model without the state of its training"),
        (lambda content: content.update(gradients={}), "an earlier version wrote it within an optimizer step"),
        (lambda content: content["tril"].update(format=99), "has format 99; this version of Tril reads"),
        (lambda content: content["tril"].pop("data"), "does not say which data it was trained on"),
        (lambda content: content["tril"].update(data=3), "does not say which data it was trained on"),
        (
            lambda content: content["state_dict"].update({"model.norm.weight": torch.ones(7)}),
            "norm.weight has the shape (7,) and must have the shape (32,) of the model",
        ),
        (lambda content: content["state_dict"].pop("model.norm.weight"), "norm.weight has the shape None and must"),
    ],
)
def test_a_checkpoint_that_lacks_something(run, tmp_path, change, message):
    edit(last_of(run, tmp_path), change)
    assert_refused(resume(run, tmp_path, "trainer.max_steps=6"), message)


def test_a_checkpoint_without_training_state_says_so(run, tmp_path):
    path = last_of(run, tmp_path)
    save(path, load(path), fingerprint="f")
    assert_refused(
        resume(run, tmp_path), "has no optimizer_states, lr_schedulers, loops", "name the checkpoint of a run"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not have the settings of a run"),
        ("a: [1", "cannot be read ("),
        ("- 1", "does not have the settings of a run"),
        ("\x00\xff", "cannot be read ("),
        ("output_dir: x", "does not have the settings of a run"),
        ("output_dir: x\ndata: {}", "must be a group of settings"),
    ],
)
def test_a_damaged_config(run, tmp_path, text, message):
    (tmp_path / run / "config.yaml").write_bytes(text.encode("latin-1"))
    assert_refused(resume(run, tmp_path), message)


def test_latest_is_the_newest_run_even_without_a_checkpoint(run, tmp_path):
    killed = tmp_path / "outputs" / "2099-01-01" / "00-00-00"
    killed.mkdir(parents=True)
    (killed / "config.yaml").write_text((tmp_path / run / "config.yaml").read_text())
    before = (tmp_path / run / "summary.json").read_bytes()
    done = in_process("resume=latest", "trainer.max_steps=6", cwd=tmp_path)
    assert_refused(done, "the newest run, outputs/2099-01-01/00-00-00, has no checkpoint yet; start it again, or name")
    assert (tmp_path / run / "summary.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [run.parent.name, "2099-01-01"]


def test_a_damaged_newest_checkpoint(run, tmp_path):
    """resume=latest takes the one before with a warning; resume=FOLDER offers it."""
    assert resume(run, tmp_path, "trainer.max_steps=6").returncode == 0  # last.ckpt at step 6, previous.ckpt at step 4
    last = last_of(run, tmp_path)
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 16
    last.write_bytes(content)
    refused = resume(run, tmp_path, "trainer.max_steps=8")
    assert_refused(refused, f"{run}/checkpoints/last.ckpt is damaged", "use ", "previous.ckpt")
    done = in_process("resume=latest", "trainer.max_steps=8", cwd=tmp_path)
    assert done.returncode == 0 and f"continuing from {run}/checkpoints/previous.ckpt" in done.stdout, done.stderr
    assert read(last)["global_step"] == 8
    steps = [int(row["step"]) for row in rows(tmp_path / run) if row["train/loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == 8


def test_a_run_that_another_process_trains_is_refused(run, tmp_path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom tril.scripts.common.locks import lock_run\n"
        "with lock_run(Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, tmp_path / run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            assert_refused(resume(run, tmp_path), "another process trains the run in ", "wait for its end, or stop it")
        finally:
            other.kill()
    assert resume(run, tmp_path).returncode == 0  # the lock ends with the process, although its file stays
    assert not (tmp_path / run / RUN_LOCK).exists()


def test_a_lock_leaves_nothing_behind(tmp_path):
    with lock_run(tmp_path / "run"):
        assert (tmp_path / "run" / RUN_LOCK).exists()
    assert not (tmp_path / "run").exists()
    with contextlib.suppress(RuntimeError), lock_run(tmp_path / "run"):
        raise RuntimeError
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("samples", "/tmp"), ("windows", "outputs/../../x")])
def test_a_saved_path_outside_of_the_folder_is_refused(run, tmp_path, name, value):
    settings, key = tmp_path / run / "config.yaml", f"callbacks.{name}.folder"
    content = yaml.safe_load(settings.read_text())
    content["callbacks"][name]["folder"] = value
    settings.write_text(yaml.safe_dump(content))
    done = resume(run, tmp_path, "trainer.max_steps=6")
    assert_refused(
        done, f"the saved {key}={value} is neither Tril's own nor in the run's folder ", f"type {key}={value}"
    )
    assert resume(run, tmp_path, "trainer.max_steps=6", f"{key}=.").returncode == 0


def test_a_callback_does_not_write_outside_of_the_folder(tmp_path, text):
    target = "+callbacks.mine._target_=lightning.pytorch.callbacks.ModelCheckpoint"
    done = in_process(*TINY, f"data.path={text}", target, "+callbacks.mine.filename=../../../../x", cwd=tmp_path)
    assert_refused(done, "callbacks.mine writes to ", "must be in the run's folder")
