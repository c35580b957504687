"""Runs of train.py: their files, samples, validations and checkpoints, an early stop, precision, and wandb, offline.

python -m pytest -n0 tests/test_train.py
"""

import io
import json
import re
import shutil
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.contract.harness import BARE, TINY, interrupted, merged, metrics, run, summary
from tril.data.cache import PROGRESS
from tril.data.sources.files import Files
from tril.model import backends, load
from tril.model.checkpoint import code_sha256, read_state
from tril.model.runs import SWEEP, Run, find_checkpoint
from tril.model.training.checkpoints import CheckpointFiles
from tril.model.training.hardware import compile_error
from tril.model.training.summary import plot_losses
from tril.scripts.cli.errors import UserError
from tril.train import train

BF16 = 0.002  # nats between bf16 and float32 after 30 steps
QUICK = ("data.tokenizer.kind=byte", "~callbacks.heads", "~callbacks.causality")


def state(folder, name="last"):
    return read_state(folder / "checkpoints" / f"{name}.ckpt")


def last_sample(folder):
    return (folder / "samples.txt").read_text("utf-8").split("--- sample at step 8 ---\n")[1]


def test_a_run_draws_its_losses_prints_samples_and_keeps_its_certificate(text, tmp_path, capsys):
    folder = tmp_path / "run"
    settings = f"data.path={text}", f"data.cache_dir={tmp_path}", f"hydra.run.dir={folder}"
    assert train(*TINY, *settings).summary["causality"] == "certified"
    assert Image.open(folder / "loss.png").width == 900
    assert (folder / "samples.txt").read_text("utf-8").count("--- sample at step") == 2
    printed = re.findall(r"--- sample (\d) of 3 ---\n(.*)\n", capsys.readouterr().out)  # of the last step alone
    assert [number for number, _ in printed] == ["1", "2", "3"] and len({text for _, text in printed}) > 1
    assert last_sample(folder) == f"{printed[0][1]}\n"
    certificate = state(folder, "best")["tril"]["certificate"]
    assert certificate["passed"] and certificate["certified_at_step"] == 8
    assert certificate == {key: json.loads((folder / "causality.json").read_text())[key] for key in certificate}


def test_on_a_terminal_bars_show_progress_and_an_error_begins_a_line_without_warnings(train_tiny, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(PROGRESS, "delay", 0)
    with pytest.raises(UserError, match="lr_scale"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train_tiny("trainer.val_check_interval=1", "trainer.max_steps=3", "optim.lr_scale=1e30")
    shown = terminal.getvalue()
    assert all(re.search(bar, shown) for bar in (r"causality: \d", r"1/3 ")), shown
    assert shown.endswith("\n")


@pytest.mark.parametrize(("kind", "given", "used"), [("byte", "a\né", "a\né"), ("char", "é", "")])
def test_a_sample_begins_as_suits_the_text_if_the_tokenizer_knows_it(kind, given, used, train_tiny, monkeypatch):
    monkeypatch.setattr(Files, "prompt", given)
    settings = [*QUICK, f"data.tokenizer.kind={kind}", "callbacks.samples.max_new_tokens=1", "seed=1"]
    folder = train_tiny(*settings).folder
    sample = last_sample(folder)
    assert sample.startswith(used) and len(sample) <= len(used) + 2  # a token of a character, and a line end
    assert state(folder)["tril"]["data"]["prompt"] == given  # where the page to play with begins
    if kind == "char":
        with pytest.raises(UserError, match="callbacks.samples: the prompt has 'é'"):
            train_tiny(*settings, "callbacks.samples.prompt=é", folder="refused")
        assert not (folder.parent / "refused" / "checkpoints").exists()


PENALTIES = [(["kind=bpe", "vocab_size=300"], None, 1.1), (["kind=char"], None, 1.0), (["kind=byte"], 1.7, 1.7)]


@pytest.mark.parametrize(("tokenizer", "given", "penalty"), PENALTIES)
def test_a_sample_repeats_tokens_less_unless_they_are_characters(tokenizer, given, penalty, train_tiny):
    settings = [*QUICK[1:], *(f"data.tokenizer.{each}" for each in tokenizer)]
    settings += [f"callbacks.samples.repetition_penalty={given}"] if given else []
    folder = train_tiny(*settings).folder
    lm = load(folder / "checkpoints" / "last.ckpt", device="cpu")
    texts = {each: lm.generate("", 8, seed=0, repetition_penalty=each) for each in (1.0, 1.1, 1.7)}
    assert last_sample(folder) == f"{texts[penalty]}\n" and len({*texts.values()}) > 1
    assert lm.penalty == (penalty if given is None else 1.0)


def test_validations_change_no_training_step_and_the_last_step_is_validated(train_tiny):
    """With dropout, whose random numbers they must not take: six validations end as two do, bit for bit."""
    dropout = (*QUICK, "model.resid_dropout=0.2", "trainer.accumulate_grad_batches=2", "trainer.max_steps=6")
    weights = []
    for interval, steps in ((1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])):
        folder = train_tiny(*dropout, f"trainer.val_check_interval={interval}", folder=str(interval)).folder
        assert [*metrics(folder, "val/loss")] == steps
        assert {state(folder, name)["global_step"] for name in ("last", "best")} == {6}  # the loss falls all the way
        weights.append(state(folder)["state_dict"])
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_an_early_stop_says_why_keeps_the_best_and_ends_the_run_until_more_patience(tmp_path):
    """Random digits to train on, and letters to validate on: the validation loss rises soon."""
    random, folder = np.random.default_rng(0), tmp_path / "run"
    (tmp_path / "train.txt").write_text("".join(map(str, random.integers(0, 10, 400))))
    (tmp_path / "val.txt").write_text("".join(map(chr, random.integers(97, 123, 200))))
    settings = ["data.path=train.txt", "data.val_path=val.txt", "data.tokenizer.kind=byte", "hydra.run.dir=run"]
    settings += ["trainer.max_steps=400", "trainer.val_check_interval=3", "optim.lr_scale=2"]
    settings += ["callbacks.early_stop.patience=3", "callbacks.early_stop.min_passes=0"]
    done = run("train", *merged(BARE, *settings), cwd=tmp_path).succeeded()
    val, found = metrics(folder, "val/loss"), summary(folder)
    last, best = max(val), min(val, key=val.get)
    assert list(val) == [*range(3, last + 1, 3)] and last < 300 and best == last - 3 * 3
    assert (found["steps"], found["best_step"]) == (last, best)
    reason = f"at step {last} of 400 by callbacks.early_stop.patience"
    assert found["stopped_early"].startswith(reason) and reason in done.stdout
    assert "optim.muon_weight_decay=4" in done.stdout  # the advice for so many passes
    assert {name: state(folder, name)["global_step"] for name in ("last", "best")} == {"last": last, "best": best}
    assert find_checkpoint(folder).name == "best.ckpt"  # of which samples are
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert f"step {last} by callbacks.early_stop.patience" in run("train", "resume=run", cwd=tmp_path).stdout
    run("train", "resume=run", "optim.lr=0.5", cwd=tmp_path).refused("optim.lr", "callbacks.early_stop.patience")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run("train", "resume=run", "callbacks.early_stop.patience=5", cwd=tmp_path).succeeded()
    assert summary(folder)["steps"] > last  # from the last checkpoint, not the best


def test_a_folder_with_a_run_is_no_folder_of_a_new_one(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").touch()  # before its first checkpoint
    for name in ("run", "killed", ""):
        run("train", *BARE, f"hydra.run.dir={name}", cwd=tmp_path).refused("hydra.run.dir", name)


def test_a_finished_run_is_unchanged_without_more_steps(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "at step 8 by trainer.max_steps" in run("train", "resume=run", cwd=tmp_path).succeeded().stdout
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_given_settings_replace_those_of_the_checkpoint_and_relative_paths_are_kept(text, tmp_path):
    steps = ("trainer.max_steps=2", "trainer.val_check_interval=2", "hydra.run.dir=run")
    run("train", *BARE, *steps, f"data.path={text.name}", cwd=tmp_path).succeeded()
    (tmp_path / "elsewhere").mkdir()
    before = state(tmp_path / "run")["tril"]["settings"]
    words = ("resume=../run", "trainer.max_steps=1e1", "optim.lr=0.25", f"data.cache_dir={tmp_path / 'cache'}")
    run("train", *words, cwd=tmp_path / "elsewhere").succeeded()
    changes = {"trainer.max_steps": 10, "optim.lr": 0.25, "data.cache_dir": str(tmp_path / "cache")}
    assert state(tmp_path / "run")["tril"]["settings"] == before | changes


@pytest.fixture
def written(monkeypatch):
    """The step and the name of each checkpoint that a run writes."""
    written, original = [], CheckpointFiles.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        written.append((checkpoint["global_step"], path.stem))
        original(self, checkpoint, path)

    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", save_checkpoint)
    return written


def test_a_run_writes_checkpoints_at_ends_of_steps_and_keeps_the_last_and_the_best(train_tiny, written, monkeypatch):
    rise = lambda step, *rest: 1.0 if step < 4 else 50.0  # noqa: E731  the loss is worse from step 5 on
    monkeypatch.setattr("tril.model.training.module.lr_factor", rise)
    accumulated = ["trainer.accumulate_grad_batches=3", "data.batch_size=2", "checkpoint.every_minutes=null"]
    folder = train_tiny(*QUICK, "~callbacks.samples", *accumulated, "checkpoint.every_n_steps=3").folder / "checkpoints"
    assert written == [(3, "last"), (4, "best"), (4, "last"), (6, "last"), (8, "last")]  # the last step is validated
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt"]
    [loader] = state(folder.parent)["loops"]["fit_loop"]["state_dict"].values()
    assert loader == [{"consumed": 8 * 3 * 2}]  # a longer run goes on with the next windows


def test_a_run_writes_checkpoints_by_time(train_tiny, written):
    train_tiny(*QUICK, "~callbacks.samples", "checkpoint.every_minutes=1e-9", "trainer.max_steps=3")
    assert [step for step, name in written if name == "last"] == [1, 2, 3]


TRACKERS = ("logger=wandb", "logger.wandb.log_model=true", "~callbacks.causality")


@pytest.fixture
def parts(monkeypatch):
    """What each start of a run gives to wandb.

    A part: `init`, the options of wandb.init; `rows`; `artifacts`; `status`, the exit code; `config` and `summary`.
    """
    import wandb

    parts, init = [], wandb.init

    def recording_init(**options):
        made = init(**options)
        part = SimpleNamespace(init=options, rows=[], artifacts=[])
        parts.append(part)
        log, finish = made.log, made.finish
        made.log = lambda row, *args, **more: (part.rows.append(row), log(row, *args, **more))
        made.log_artifact = lambda *arguments: part.artifacts.append(arguments)

        def finished(exit_code=None):
            part.status, part.config, part.summary = exit_code, dict(made.config), dict(made.summary)
            finish(exit_code)

        made.finish = finished
        return made

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb, "init", recording_init)
    return parts


@pytest.mark.slow  # wandb starts a process
def test_wandb_has_the_curves_of_metrics_csv_and_the_samples(parts, text, tmp_path):
    """Of a run in a sweep, which is interrupted after step 4 and resumed; wandb has settings and results as well."""
    folder, cache = tmp_path / "2026" / "sweep" / "a=1", f"data.cache_dir={tmp_path / 'cache'}"
    folder.parent.mkdir(parents=True)
    (folder.parent / SWEEP).write_text("{}")
    with interrupted():
        train(*TINY, f"data.path={text}", cache, f"hydra.run.dir={folder}", *TRACKERS)
    train(f"resume={folder}", cache, *TRACKERS[:2])  # a saved run names no logger
    logged = {(name, row["step"]): x for row in Run(folder).metrics for name, x in row.items() if name != "step"}
    results = {key: value for key, value in summary(folder).items() if isinstance(value, int | float | str)}
    settings, samples = yaml.safe_load((folder / "config.yaml").read_text()), (folder / "samples.txt").read_text()

    first, last = parts
    cells = [(row["trainer/global_step"], item) for row in first.rows + last.rows for item in row.items()]
    curves = {(name, step): x for step, (name, x) in cells if isinstance(x, float | int) and "global_step" not in name}
    assert curves == logged and {step for _, step in curves} == {*range(1, 9)}
    assert {key: last.config[key] for key in settings} == settings and last.config["code"] == code_sha256()[:12]
    names = {name: last.init[name] for name in ("id", "name", "group", "project")}
    assert names == {"id": first.init["id"], "name": "a=1", "group": "sweep", "project": "tril"}
    assert "anonymous" not in first.init  # wandb warns of it
    assert {key: last.summary[key] for key in results} == results and len(results) > 20
    assert (first.status, last.status) == (1, 0)
    [table] = [row["samples"] for row in last.rows if "samples" in row]
    [(step, prompt, sample)] = table.data
    assert step == 8 and f"--- sample at step 8 ---\n{prompt}{sample}\n" in samples
    assert last.artifacts[-1] == (str(folder / "checkpoints" / "best.ckpt"), f"model-{last.init['id']}", "model")


def test_the_legend_of_the_loss_covers_no_curve(tmp_path, monkeypatch):
    drawn, row = [], {"val/loss": 3.0, "val/bpb": 1.2}
    monkeypatch.setattr("tril.model.training.summary.write_picture", lambda path, figure, dpi: drawn.append(figure))
    rows = [{"step": step, "train/loss": 3 + step % 2} | row for step in range(1, 4)]
    run = SimpleNamespace(rows=lambda name: rows, best=lambda: row, val_windows=None)
    plot_losses(tmp_path / "loss.png", run, "a title", initial=5.5)
    [figure] = drawn
    figure.draw_without_rendering()
    assert not figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_tightbbox())


@pytest.fixture
def losses_of(train_tiny, monkeypatch):
    """A function: the losses of all 30 steps of a run, and of its validations."""

    def losses_of(backend, precision, *more, block=256):
        monkeypatch.setattr(backends, "QUERY_BLOCK", block)
        steps = ("trainer.max_steps=30", "trainer.val_check_interval=30", "optim.lr_scale=0.2", "~callbacks.samples")
        path = (f"model.backend={backend}", f"trainer.precision={precision}", *more)
        folder = train_tiny(*QUICK, *steps, *path, folder=f"{backend} {precision}").folder
        return [*metrics(folder, "train/loss").values(), *metrics(folder, "val/loss").values()]

    return losses_of


def test_bf16_has_the_losses_of_float32_also_in_blocks_of_queries(losses_of):
    expected = losses_of("explicit", "32-true")
    for backend, block in (("fused", 256), ("explicit", 5)):
        losses = losses_of(backend, "bf16-mixed", block=block)
        assert losses == pytest.approx(expected, abs=BF16) and losses != pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_machine_code_has_the_losses_of_float32(losses_of):
    """Forward and backward of a block, compiled by torch (15 s)."""
    torch._dynamo.reset()
    assert compile_error("cpu") is None
    expected = losses_of("explicit", "32-true", "model.n_layers=1")
    assert losses_of("fused", "bf16-mixed", "model.n_layers=1", "compile=regional") == pytest.approx(expected, abs=BF16)
