"""Runs on a mixture: the losses of each source, resuming, the end of a source, and what reads the validation part."""

import json
import math

import numpy as np
import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY, in_process, interrupted, rows, train_typed, typed
from tril.data.config import parse
from tril.model.checkpoint import load
from tril.scripts import evaluate
from tril.scripts.cli.errors import UserError

MIXTURE = ["data=mixture", *TINY[1:], "data.sources={docs: 0.75, other.txt: 0.25}"]
T = 32  # context length


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a folder of 40 documents and a text, and run/, a run on both with document masks."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "docs").mkdir()
    for d in range(40):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (folder / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "other.txt").write_text("".join(f"{i}! The square of {i} is {i * i}\n" for i in range(500)))
    options = ["data.document_mask=true", "hydra.run.dir=run"]
    done = in_process(*MIXTURE, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "run" / "printed").write_text(done.stdout, encoding="utf-8")
    return folder


@pytest.fixture
def configure(folder, tmp_path, monkeypatch):
    """A function that returns the settings of a run without document masks, in a folder of tmp_path."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRIL_CACHE", str(folder / "cache"))

    def configure(*overrides, run="run", sources=MIXTURE[-1]):
        return typed(sources, f"hydra.run.dir={tmp_path / run}", *overrides, base=MIXTURE[:-1])

    return configure


def resume(folder):
    return train_typed(typed(f"resume={folder}", base=[]))


def validations(run):
    """The rows of metrics.csv with validation losses."""
    return [row for row in rows(run) if row["val/loss"]]


def nats_by_hand(lm, tokens):
    """The sum of the losses of all targets, in windows one after another."""
    total, ids = 0.0, torch.from_numpy(tokens.astype(int))
    for start in range(0, len(ids) - 1, T):
        window = ids[start : start + T + 1]
        with torch.no_grad():
            log_p = lm.model(window[None, :-1])[0].double().log_softmax(-1)
        total -= log_p.gather(1, window[1:, None]).sum().item()
    return total


def test_the_losses_of_each_source_and_of_all(configure, tmp_path):
    trained = train_typed(configure())
    run, lm = tmp_path / "run", load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    texts = parse(trained.settings["data"]).prepare().texts
    nats = {name: nats_by_hand(lm, text.tokens("val")) for name, text in texts.items()}
    targets = {name: len(text.tokens("val")) - 1 for name, text in texts.items()}
    counts = {name: text.meta["counts"]["val"] for name, text in texts.items()}
    sizes = {name: count["bytes"] - count["first_bytes"] for name, count in counts.items()}
    summary, logged = json.loads((run / "summary.json").read_text()), validations(run)[-1]
    for name in ("docs", "other.txt"):
        loss, bpb = nats[name] / targets[name], nats[name] / math.log(2) / sizes[name]
        found = summary["sources"][name]
        for value in (float(logged[f"val/{name}/loss"]), found["final_val_loss"]):
            assert value == pytest.approx(loss, rel=1e-5)
        for value in (float(logged[f"val/{name}/bpb"]), found["final_val_bpb"]):
            assert value == pytest.approx(bpb, rel=1e-5)
    total, count = sum(nats.values()), sum(targets.values())
    assert float(logged["val/loss"]) == summary["final_val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert summary["final_val_bpb"] == pytest.approx(total / math.log(2) / sum(sizes.values()), rel=1e-5)
    assert abs(nats["docs"] / targets["docs"] - nats["other.txt"] / targets["other.txt"]) > 0.01
    assert summary["val_bytes_per_token"] == pytest.approx(sum(sizes.values()) / count)
    assert [summary["sources"][name]["share"] for name in ("docs", "other.txt")] == [0.75, 0.25]
    epochs = 8 * 4 * T * 0.25 / texts["other.txt"].meta["counts"]["train"]["tokens"]
    assert summary["sources"]["other.txt"]["epochs"] == pytest.approx(epochs)

    windows = np.load(run / "windows_last.npz")
    assert len(windows["nll"]) == sum(-(-n // T) for n in targets.values())
    assert windows["nll"].sum() == pytest.approx(total, rel=1e-5) and windows["targets"].sum() == count
    documents = [text.meta["counts"]["val"]["documents"] for text in texts.values()]
    assert len(windows["document_nll"]) == sum(documents)
    of_docs = windows["document_nll"][: documents[0]].sum()
    assert of_docs == pytest.approx(nats["docs"], rel=1e-5)


@pytest.mark.slow
def test_a_limit_of_validation_is_one_for_each_source(configure, tmp_path):
    run = train_typed(configure("+trainer.limit_val_batches=2", "data.val_batch_size=1"))
    windows = np.load(tmp_path / "run" / "windows_last.npz")
    assert windows["targets"].tolist() == [T] * 4
    for name, nats in (("docs", windows["nll"][:2].sum()), ("other.txt", windows["nll"][2:].sum())):
        found = run.summary["sources"][name]
        assert found["final_val_loss"] == pytest.approx(nats / (2 * T))
        n_bytes = nats / math.log(2) / found["final_val_bpb"]
        assert n_bytes == pytest.approx(round(n_bytes), abs=1e-3)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(configure, tmp_path):
    steps = ["data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3"]
    train_typed(configure(*steps, run="whole"))
    with interrupted():
        train_typed(configure(*steps, run="half"))
    last = torch.load(tmp_path / "half" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 3
    resume(tmp_path / "half")
    weights = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "half")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    tables = [validations(tmp_path / name) for name in ("whole", "half")]
    losses = [[row[f"val/{name}/loss"] for row in table for name in ("docs", "other.txt")] for table in tables]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.slow
def test_evaluate_measures_one_source_as_the_run_did(folder):
    refused = call(evaluate.main, "ckpt=run", cwd=folder, TRIL_CACHE=str(folder / "cache"))
    assert_refused(refused, "a mixture has several texts; evaluate one of its sources, such as data=stdlib")
    refused = call(evaluate.main, "ckpt=run", "data=mixture", MIXTURE[-1], cwd=folder)
    assert_refused(refused, "a mixture has several texts")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    for path in ("docs", "other.txt"):
        files = ["data=files", f"data.path={path}", f"out={folder / 'out'}"]
        done = call(
            evaluate.main, "ckpt=run/checkpoints/last.ckpt", *files, cwd=folder, TRIL_CACHE=str(folder / "cache")
        )
        assert done.returncode == 0, done.stderr
        report = json.loads((folder / "out" / "evaluation.json").read_text())
        figures = report["figures"]
        assert figures["loss"]["mean"] == pytest.approx(summary["sources"][path]["final_val_loss"], rel=1e-5)


@pytest.mark.slow
def test_other_weights_and_other_text_are_refused_when_a_run_is_resumed(configure, tmp_path):
    with interrupted():
        train_typed(configure())
    saved = tmp_path / "run" / "config.yaml"
    original = saved.read_text()
    saved.write_text(original.replace("weight: 0.75", "weight: 0.5"))
    message = r"data.sources={'docs': 0.667, 'other.txt': 0.333} must be {'docs': 0.75, 'other.txt': 0.25}, as in "
    message += ".*; leave it out, or start a new run"
    with pytest.raises(UserError, match=message):
        resume(tmp_path / "run")
    saved.write_text(original.replace("path: docs", "path: docs/1*"))
    with pytest.raises(UserError, match="the data .* must be those of"):
        resume(tmp_path / "run")
    saved.write_text(original.replace("weight: 0.75", "weight: 3").replace("weight: 0.25", "weight: 1"))
    resume(tmp_path / "run")  # the same shares
