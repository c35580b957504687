"""Runs of train.py that the contract does not have: their files, documents apart, validations, and an early stop."""

import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import assert_refused
from tests.runs import DRAWN_BY, in_process, rows, train_typed, typed
from tril.data.sources.files import Files
from tril.model.checkpoint import load, read_state
from tril.model.runs import find_checkpoint
from tril.model.training.summary import plot_losses
from tril.scripts.cli.errors import UserError

QUICK = ("data.tokenizer.kind=byte", "callbacks.samples=null", "callbacks.heads=null", "callbacks.causality=null")


def state(folder, name="last"):
    return read_state(folder / "checkpoints" / f"{name}.ckpt")


def test_the_files_of_a_run(configure, tmp_path, monkeypatch, capsys):
    config = configure()
    monkeypatch.setattr(DRAWN_BY, plot_losses)
    run = train_typed(config)
    folder, summary = tmp_path / "run", run.summary
    assert run.folder == folder and summary["final_val_loss"] < math.log(300)
    assert (summary["steps"], summary["tokens"], summary["causality"]) == (8, 8 * 4 * 32, "certified")
    assert summary["parameters"] == load(folder).model.n_parameters()
    assert Image.open(folder / "loss.png").width == 900
    samples = (folder / "samples.txt").read_text(encoding="utf-8")
    assert samples.count("--- sample at step") == 2
    printed = re.findall(r"--- sample (\d) of 3 ---\n(.*)\n", capsys.readouterr().out)  # of the last step alone
    assert [number for number, _ in printed] == ["1", "2", "3"] and len({text for _, text in printed}) > 1
    assert samples.endswith(f"--- sample at step 8 ---\n{printed[0][1]}\n")
    certificate = state(folder, "best")["tril"]["certificate"]
    assert certificate["passed"] and certificate["certified_at_step"] == 8 and len(certificate.pop("of")) == 64
    assert certificate == {key: json.loads((folder / "causality.json").read_text())[key] for key in certificate}
    logged = rows(folder)
    assert [int(row["step"]) for row in logged if row["train/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [int(row["step"]) for row in logged if row["val/loss"]] == [4, 8]
    windows = np.load(folder / "windows_last.npz")
    assert windows["nll"].sum() / windows["targets"].sum() == pytest.approx(summary["final_val_loss"], rel=1e-6)


@pytest.mark.parametrize(("kind", "given", "used"), [("byte", "a\né", "a\né"), ("char", "é", "")])
def test_a_sample_begins_as_suits_the_text_if_the_tokenizer_knows_it(kind, given, used, configure, monkeypatch):
    monkeypatch.setattr(Files, "prompt", given)
    settings = [f"data.tokenizer.kind={kind}", *QUICK[2:], "callbacks.samples.max_new_tokens=1", "seed=1"]
    folder = train_typed(configure(*settings)).folder
    lines = (folder / "samples.txt").read_text(encoding="utf-8").split("--- sample at step 8 ---\n")
    assert lines[1].startswith(used) and len(lines[1]) <= len(used) + 2  # a token of a character, and a line end
    assert state(folder)["tril"]["data"]["prompt"] == given  # where the page to play with begins


def test_validations_change_no_training_step_and_the_last_step_is_validated(configure, tmp_path):
    """With dropout, whose random numbers they must not take: six validations end as one does, bit for bit."""
    dropout = (*QUICK[:1], *QUICK[2:], "model.resid_dropout=0.2", "trainer.accumulate_grad_batches=2")
    weights = []
    for interval, steps in ((1, [1, 2, 3, 4, 5, 6]), (4, [4, 6]), (100, [6])):
        folder = tmp_path / str(interval)
        settings = ("trainer.max_steps=6", f"trainer.val_check_interval={interval}", f"hydra.run.dir={folder}")
        train_typed(configure(*dropout, *settings))
        assert [int(row["step"]) for row in rows(folder) if row["val/loss"]] == steps
        assert {state(folder, name)["global_step"] for name in ("last", "best")} == {6}  # the loss falls all the way
        weights.append(state(folder)["state_dict"])
    assert all(torch.equal(each[name], weight) for each in weights[1:] for name, weight in weights[0].items())


def test_what_does_not_fit_the_text_is_refused_before_the_first_step(configure, tmp_path):
    settings = ("data.tokenizer.kind=char", "callbacks.samples.prompt=é")
    with pytest.raises(UserError, match="callbacks.samples: the prompt has 'é'"):
        train_typed(configure(*settings))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_early_stop_says_why_keeps_the_best_and_ends_the_run_until_more_patience(tmp_path):
    """Random digits to train on, and letters to validate on: the validation loss rises soon."""
    random = np.random.default_rng(0)
    (tmp_path / "train.txt").write_text("".join(map(str, random.integers(0, 10, 400))))
    (tmp_path / "val.txt").write_text("".join(map(chr, random.integers(97, 123, 200))))
    settings = ["data.path=train.txt", "data.val_path=val.txt", "hydra.run.dir=run", "trainer.max_steps=400"]
    settings += ["trainer.val_check_interval=3", "callbacks.early_stop.patience=3", "callbacks.early_stop.min_passes=0"]
    words = [each.typed for each in typed(*QUICK, *settings, "optim.lr_scale=2")]
    done = in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    val = [(int(row["step"]), float(row["val/loss"])) for row in rows(run) if row["val/loss"]]
    summary, last, best = json.loads((run / "summary.json").read_text()), val[-1][0], min(val, key=lambda row: row[1])
    assert [step for step, _ in val] == [3 * (i + 1) for i in range(len(val))] and len(val) < 100  # each once
    assert val[-4] == best and (summary["steps"], summary["best_step"]) == (last, best[0])
    reason = f"at step {last} of 400 by callbacks.early_stop.patience"
    assert summary["stopped_early"].startswith(reason) and f"stopped     {reason}" in done.stdout
    assert {name: state(run, name)["global_step"] for name in ("last", "best")} == {"last": last, "best": best[0]}
    assert find_checkpoint(run).name == "best.ckpt"  # what is sampled
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    end = f"has stopped at step {last} by callbacks.early_stop.patience"
    assert f"{end}; it is unchanged" in in_process("resume=run", cwd=tmp_path).stdout
    other = in_process("resume=run", "optim.lr=0.5", cwd=tmp_path)
    assert_refused(other, f"run {end} without optim.lr; raise callbacks.early_stop.patience to continue it")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert in_process("resume=run", "callbacks.early_stop.patience=5", cwd=tmp_path).returncode == 0
    assert json.loads((run / "summary.json").read_text())["steps"] > last  # from the last checkpoint, not the best
