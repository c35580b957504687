"""Runs on a mixture: the losses of each source, resuming, and what reads the validation part."""

import json
import math

import numpy as np
import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY, interrupted, rows, train_typed, typed
from tril.data.config import parse
from tril.model.checkpoint import load, read_state
from tril.scripts import evaluate
from tril.scripts.cli.errors import UserError

MIXTURE = ["data=mixture", *TINY[1:-1], "data.tokenizer.kind=byte"]
MIXTURE += ["~callbacks.samples", "~callbacks.heads", "~callbacks.causality"]
SOURCES = "data.sources={docs: 0.75, other.txt: 0.25}"
T = 32  # context length


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """A function that returns the settings of a run on a folder of 20 documents and a text."""
    (tmp_path / "docs").mkdir()
    for d in range(20):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (tmp_path / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "other.txt").write_text("".join(f"{i}! The square of {i} is {i * i}\n" for i in range(300)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    return lambda *settings, run="run": typed(SOURCES, f"hydra.run.dir={run}", *settings, base=MIXTURE)


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
    run, lm, summary = tmp_path / "run", load(tmp_path / "run/checkpoints/last.ckpt"), trained.summary
    texts = parse(trained.settings["data"]).prepare().texts
    nats = {name: nats_by_hand(lm, text.tokens("val")) for name, text in texts.items()}
    targets = {name: len(text.tokens("val")) - 1 for name, text in texts.items()}
    counts = {name: text.meta["counts"]["val"] for name, text in texts.items()}
    sizes = {name: count["bytes"] - count["first_bytes"] for name, count in counts.items()}
    logged = [row for row in rows(run) if row["val/loss"]][-1]
    for name in texts:
        found, bpb = summary["sources"][name], nats[name] / math.log(2) / sizes[name]
        values = [float(logged[f"val/{name}/{key}"]) for key in ("loss", "bpb")]
        assert values == [found["final_val_loss"], found["final_val_bpb"]]
        assert values == pytest.approx([nats[name] / targets[name], bpb], rel=1e-5)
    total, count = sum(nats.values()), sum(targets.values())
    assert float(logged["val/loss"]) == summary["final_val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert summary["final_val_bpb"] == pytest.approx(total / math.log(2) / sum(sizes.values()), rel=1e-5)
    assert summary["val_bytes_per_token"] == pytest.approx(sum(sizes.values()) / count)
    assert [summary["sources"][name]["share"] for name in ("docs", "other.txt")] == [0.75, 0.25]
    epochs = 8 * 4 * T * 0.25 / texts["other.txt"].meta["counts"]["train"]["tokens"]
    assert summary["sources"]["other.txt"]["epochs"] == pytest.approx(epochs)
    windows, documents = np.load(run / "windows_last.npz"), [count["documents"] for count in counts.values()]
    assert len(windows["nll"]) == sum(-(-n // T) for n in targets.values())
    assert windows["targets"].sum() == count and len(windows["document_nll"]) == sum(documents)
    assert windows["document_nll"][: documents[0]].sum() == pytest.approx(nats["docs"], rel=1e-5)
    options = {"cwd": tmp_path, "TRIL_CACHE": str(tmp_path / "cache")}
    refused = call(evaluate.main, "ckpt=run", **options)
    assert_refused(refused, "a mixture has several texts; evaluate one of its sources, such as data=stdlib")
    checkpoint = "ckpt=run/checkpoints/last.ckpt"
    done = call(evaluate.main, checkpoint, "data=files", "data.path=docs", "out=out", **options)
    assert done.returncode == 0, done.stderr
    loss = json.loads((tmp_path / "out/evaluation.json").read_text())["figures"]["loss"]["mean"]
    assert loss == pytest.approx(summary["sources"]["docs"]["final_val_loss"], rel=1e-5)


def test_a_limit_of_validation_is_one_for_each_source(configure, capsys):
    run = train_typed(configure("+trainer.limit_val_batches=2", "data.val_batch_size=1", "trainer.max_steps=2"))
    windows = np.load("run/windows_last.npz")
    assert windows["targets"].tolist() == [T] * 4
    for name, nats in (("docs", windows["nll"][:2].sum()), ("other.txt", windows["nll"][2:].sum())):
        assert run.summary["sources"][name]["final_val_loss"] == pytest.approx(nats / (2 * T))
    part = f"on 4 of {run.summary['val_windows']['of']} windows, not comparable with other runs"
    assert part in capsys.readouterr().out


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit_and_needs_the_same_shares(configure, tmp_path):
    steps = ("data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3")
    train_typed(configure(*steps, run="whole"))
    with interrupted():
        train_typed(configure(*steps, run="half"))
    saved, resume = tmp_path / "half/config.yaml", typed("resume=half", base=[])
    original = saved.read_text()
    shares = r"data.sources={'docs': 0.667, 'other.txt': 0.333} must be {'docs': 0.75, 'other.txt': 0.25}, as in "
    for old, new, refusal in (
        ("weight: 0.75", "weight: 0.5", shares),
        ("path: docs", "path: docs/1*", "the data .* must be those of"),
    ):
        saved.write_text(original.replace(old, new))
        with pytest.raises(UserError, match=refusal):
            train_typed(resume)
    saved.write_text(original.replace("weight: 0.75", "weight: 3").replace("weight: 0.25", "weight: 1"))
    train_typed(resume)  # the same shares
    states = [read_state(tmp_path / name / "checkpoints/last.ckpt") for name in ("whole", "half")]
    weights = [state["state_dict"] for state in states]
    assert [state["global_step"] for state in states] == [8, 8]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    columns = [f"val/{name}/loss" for name in ("docs", "other.txt")]
    tables = [[[row[key] for key in columns] for row in rows(tmp_path / name)] for name in ("whole", "half")]
    assert tables[0] == tables[1]
