"""Where a run starts: what must not differ from the checkpoint of a run that goes on, and what another model gives."""

import shutil
from functools import reduce
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import assert_refused
from tests.runs import TINY, in_process
from tril.model.checkpoint import Checkpoint

BARE = ("~callbacks.causality", "~callbacks.samples", "~callbacks.heads", "~callbacks.progress")
SHORT = ("trainer.max_steps=2", "trainer.val_check_interval=2", *BARE)
EDITS = {  # each changed the result of a resumed run
    "trainer.gradient_clip_val": 0.01,
    "trainer.max_time": "00:00:00:01",
    "trainer.precision": "bf16-mixed",
    "trainer.accumulate_grad_batches": 2,
    "model.resid_dropout": 0.3,
    "model.backend": "explicit",
    "optim.lr": 0.5,
    "optim.schedule.warmup_steps": 1,
    "data.batch_size": 2,
    "data.document_mask": True,
    "callbacks.early_stop": {"patience": 1, "min_passes": 0.0},
    "causality.allow_leak": True,
    "seed": 1,
}
FREE = {"checkpoint.every_n_steps": 1, "trainer.log_every_n_steps": 1, "data.val_batch_size": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a run of two steps in run/."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), "utf-8")
    done = in_process(*TINY, *SHORT, f"data.path={folder / 'text.txt'}", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(source, tmp_path):
    return Path(shutil.copytree(source, tmp_path / "source"))


def edit(folder, key, value):
    path = folder / "run" / "config.yaml"
    content = yaml.safe_load(path.read_text("utf-8"))
    *groups, name = key.split(".")
    reduce(dict.__getitem__, groups, content)[name] = value
    path.write_text(yaml.safe_dump(content), "utf-8")


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_setting_that_changes_the_result_is_refused(copied, key):
    edit(copied, key, EDITS[key])
    before = sorted(path.name for path in (copied / "run").rglob("*"))
    done = in_process("resume=run", "trainer.max_steps=3", cwd=copied)
    assert_refused(done, key, "to change it, type")
    assert sorted(path.name for path in (copied / "run").rglob("*")) == before


def test_edits_that_change_no_result_and_typed_settings_are_taken(copied):
    for key, value in FREE.items():
        edit(copied, key, value)
    edit(copied, "optim.lr", 0.5)
    done = in_process("resume=run", "trainer.max_steps=3", "optim.lr=0.25", cwd=copied)
    assert done.returncode == 0, done.stderr
    checkpoint = Checkpoint.read(copied / "run" / "checkpoints" / "last.ckpt")
    assert (checkpoint.step, checkpoint.settings["optim.lr"], checkpoint.settings["trainer.max_steps"]) == (3, 0.25, 3)


def test_other_code_and_torch_are_a_warning(copied, monkeypatch):
    path = copied / "run" / "checkpoints" / "last.ckpt"
    from tril.model.checkpoint import read_state, write_state

    state = read_state(path)
    state["tril"] = state["tril"] | {"code": "0" * 64, "torch_version": "1.0.0"}
    write_state(path, state)
    done = in_process("resume=run", "trainer.max_steps=3", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert "torch is 2" in done.stderr and "was 1.0" in done.stderr and "0" * 12 in done.stderr


def test_a_folder_that_has_a_run_is_not_started_over(copied):
    before = (copied / "run" / "summary.json").read_bytes()
    for folder in ("run", "text.txt/run"):
        done = in_process(*TINY, *SHORT, "data.path=text.txt", f"hydra.run.dir={folder}", cwd=copied)
        assert_refused(done, f"hydra.run.dir={folder}" if folder == "run" else "text.txt")
    assert_refused(in_process(*TINY, *SHORT, "data.path=text.txt", "hydra.run.dir=", cwd=copied), "hydra.run.dir=''")
    assert (copied / "run" / "summary.json").read_bytes() == before


def test_a_finished_run_is_unchanged_and_stays_in_its_folder(copied):
    done = in_process("resume=run", cwd=copied)
    assert done.returncode == 0 and "has finished its 2 steps; it is unchanged" in done.stdout
    assert_refused(in_process("resume=run", "optim.lr=0.5", cwd=copied), "finished its 2 steps without optim.lr")
    assert_refused(in_process("resume=run", "+optim.x=1", cwd=copied), "there is no setting optim.x")
    assert_refused(in_process("resume=", cwd=copied / "run"), "an empty path names nothing")
    moved = in_process("resume=run", "trainer.max_steps=3", "hydra.run.dir=more", cwd=copied)
    assert_refused(moved, "hydra.run.dir=more cannot be combined with resume")


def test_a_run_starts_from_the_weights_of_another(copied):
    settings = ("data=files", "data.path=text.txt", "trainer.max_steps=1", "optim.lr_scale=1e-30", *BARE)
    done = in_process("init_from=run", *settings, "model.vocab_size=320", "data.batch_size=2", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert "model.vocab_size=320 from 300: 20 new rows" in done.stdout
    (path,) = (copied / "outputs").rglob("last.ckpt")
    new, old = Checkpoint.read(path), Checkpoint.read(copied / "run" / "checkpoints" / "best.ckpt")
    assert new.lineage["source"] == str(old.path.absolute()) and new.lineage["step"] == 2
    for name, tensor in old.weights.items():
        assert torch.equal(new.weights[name][: len(tensor)], tensor), name
    assert torch.allclose(new.weights["embed.weight"][300:], old.weights["embed.weight"].mean(0), atol=1e-6)
    (cached,) = (copied / "cache").rglob("taken_over/*.json")
    cached.unlink()  # the checkpoint has the tokenizer
    done = in_process("resume=latest", "trainer.max_steps=2", cwd=copied)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.dim=64"], "model.dim=64 must be 32"),
        (["data.tokenizer.kind=byte"], "data.tokenizer.kind=byte contradicts init_from=run"),
        (["model.vocab_size=256"], "model.vocab_size=256 must be at least 300"),
        (["optim.scale_with_width=true"], "optim.scale_with_width=true"),
        (["resume=run"], "init_from=run cannot be combined with resume"),
    ],
)
def test_what_contradicts_the_other_model_is_refused(copied, settings, words):
    given = ("data=files", "data.path=text.txt") if settings != ["resume=run"] else ()
    assert_refused(in_process("init_from=run", *given, *settings, cwd=copied), words)
    assert not (copied / "outputs").exists()
