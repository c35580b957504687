"""A run on a mixture of texts: its losses against a loop over the targets, and how it goes on."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.contract.harness import BARE, merged, metrics, roll_back, summary
from tests.runs import in_process
from tril.data.config import parse
from tril.data.datamodule import TextDataModule
from tril.model.checkpoint import load, read_state
from tril.scripts import evaluate

T = 32  # tokens of a window
BYTES = merged(BARE, "data.tokenizer.kind=byte", "hydra.run.dir=run")


def train(cwd, *settings, base=BYTES):
    done = in_process(*merged(base, *settings), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def run_on(cwd, script, *arguments):
    return call(script.main, *arguments, "device=cpu", cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


def scored(lm, text, limit):
    """The losses of the targets in the first windows of a text, and the bytes, the window and the document of each."""
    ids = text.tokens("val").astype(int)
    windows = torch.nn.functional.pad(torch.from_numpy(ids), (0, -len(ids) % T)).view(-1, T)
    with torch.no_grad():
        log_p = lm.model(windows).double().log_softmax(-1).flatten(0, 1)
    at = range(min(len(ids) - 1, limit * T))  # inputs of targets
    owners = text.documents("val")[at]
    nats = np.array([-log_p[i, ids[i + 1]].item() for i in at])
    return nats, ids[np.add(at, 1)] != lm.eot_id, np.array(at) // T, owners


def in_units(nats, n_bytes):
    return pytest.approx([nats.mean(), nats.sum() / math.log(2) / n_bytes.sum()], rel=1e-5)


def validated(run, limit):
    """What the last validation of a run scored of each text, after a comparison with its losses and its windows."""
    lm, result, windows = load(run / "checkpoints/last.ckpt"), summary(run), np.load(run / "windows_last.npz")
    texts = parse(yaml.safe_load((run / "config.yaml").read_text())["data"]).prepare().texts
    parts = {name: scored(lm, text, limit) for name, text in texts.items()}
    nats, n_bytes, *_ = map(np.concatenate, zip(*parts.values(), strict=True))
    assert [result["final_val_loss"], result["final_val_bpb"]] == in_units(nats, n_bytes)
    assert windows["targets"].tolist() == [n for part in parts.values() for n in np.bincount(part[2]) if n]
    for name, weighted in (("document_targets", False), ("document_nll", True)):
        sums = [np.bincount(owners, nats if weighted else None) for nats, _, _, owners in parts.values()]
        assert windows[name].tolist() == pytest.approx(np.concatenate(sums).tolist(), rel=1e-4)
    return parts


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))


def test_a_run_on_a_mixture_has_the_losses_of_each_source_and_goes_on_with_the_same_shares_only(tmp_path):
    """Of 40 documents all validation windows are scored, of the other text 12."""
    (tmp_path / "docs").mkdir()
    for d in range(40):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (tmp_path / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "other.txt").write_text("".join(f"{i}! The square of {i} is {i * i}\n" for i in range(600)))
    settings = ("data=mixture", "data.sources={docs: 0.75, other.txt: 0.25}", "data.val_batch_size=4")
    settings += ("data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3")
    printed = train(tmp_path, *settings, "+trainer.limit_val_batches=3").stdout
    run, result = tmp_path / "run", summary(tmp_path / "run")
    parts = validated(run, limit=12)
    for name, share in (("docs", 0.75), ("other.txt", 0.25)):
        found = result["sources"][name]
        losses = [found["final_val_loss"], found["final_val_bpb"]]
        assert losses == [metrics(run, f"val/{name}/{key}")[8] for key in ("loss", "bpb")]
        assert losses == in_units(*parts[name][:2])
        epochs = 8 * 6 * T * share / found["training_tokens"]
        assert [found["share"], found["epochs"]] == pytest.approx([share, epochs])
    assert max(parts["docs"][2]) < 11 == max(parts["other.txt"][2]) and max(parts["docs"][3]) > 0
    data = TextDataModule(parse(yaml.safe_load((run / "config.yaml").read_text())["data"]), context_length=T)
    first = [text.tokens("val")[: 2 * T] for text in data.texts.values()]  # of each the same number of windows
    assert data.first_val_windows(4)[0].flatten().tolist() == np.concatenate(first).tolist()
    windows = result["val_windows"]
    assert f"on {windows['scored']} of {windows['of']} windows, not comparable with other runs" in printed

    refused = run_on(tmp_path, evaluate, "ckpt=run")
    assert_refused(refused, "a mixture has several texts; evaluate one of its sources, such as data=stdlib")
    checkpoint = "ckpt=run/checkpoints/last.ckpt"
    done = run_on(tmp_path, evaluate, checkpoint, "data=files", "data.path=docs", "out=out")
    assert done.returncode == 0, done.stderr
    loss = json.loads((tmp_path / "out/evaluation.json").read_text())["figures"]["loss"]["mean"]
    assert loss == pytest.approx(result["sources"]["docs"]["final_val_loss"], rel=1e-5)

    roll_back(shutil.copytree(run, tmp_path / "half"))
    saved = tmp_path / "half/config.yaml"
    original = saved.read_text()
    shares = "data.sources={'docs': 0.667, 'other.txt': 0.333} must be {'docs': 0.75, 'other.txt': 0.25}, as in "
    for old, new, refusal in (
        ("weight: 0.75", "weight: 0.5", shares),
        ("path: docs", "path: docs/1*", ") must be those of half/checkpoints/last.ckpt"),
    ):
        saved.write_text(original.replace(old, new))
        done = in_process("resume=half", cwd=tmp_path)
        assert done.returncode == 2 and refusal in done.stderr.splitlines()[-1], done
    saved.write_text(original.replace("weight: 0.75", "weight: 3").replace("weight: 0.25", "weight: 1"))
    train(tmp_path, "resume=half", base=())  # the same shares
    whole, half = (read_state(tmp_path / name / "checkpoints/last.ckpt") for name in ("run", "half"))
    assert whole["global_step"] == half["global_step"] == 8
    assert all(torch.equal(half["state_dict"][name], weight) for name, weight in whole["state_dict"].items())
    assert metrics(tmp_path / "half", "val/docs/loss") == metrics(run, "val/docs/loss")
