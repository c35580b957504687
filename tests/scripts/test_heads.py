"""scripts/heads.py on runs with separate documents, and dir=SWEEP over seeds. The contract has changes and scores."""

import base64
import csv
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.conftest import byte_model
from tests.contract import harness
from tests.contract.harness import run
from tril.model.atomic_files import write_json
from tril.model.checkpoint import Checkpoint, save
from tril.model.evaluation.evaluate import text_of_run
from tril.model.runs import Run, load
from tril.scripts.experiments.trained_heads import prompt_ids

T = 32  # context length of harness.TINY, which has 2 layers of 2 heads
OPTIONS = ("windows=8", "device=cpu")
RUN = "sweep/seed0"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function: trains the run of a seed, and returns the working directory."""
    folder = tmp_path_factory.mktemp("heads")
    lines = [json.dumps({"text": f"line {i}: the square of {i} is {i * i}."}) for i in range(1000)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    base = ("data.tokenizer.kind=byte", "data.document_mask=true", f"data.path={folder / 'text.jsonl'}")
    base += ("trainer.max_steps=10", "trainer.val_check_interval=10", "~callbacks.causality", "~callbacks.samples")

    def train(seed):
        harness.train(*base, f"seed={seed}", f"hydra.run.dir={folder / f'sweep/seed{seed}'}")
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        yield train


@pytest.fixture(scope="module")
def folder(train):
    return train(0)


def heads(folder, *arguments):
    return run("heads", *arguments, cwd=folder, strict=True, TRIL_CACHE=os.environ["TRIL_CACHE"])  # of the fixture


def read(path):
    return list(csv.DictReader(path.open(encoding="utf-8")))


def page_of(folder):
    """The data of the page, and its weights (L, H, T, T)."""
    page = (folder / "attention.html").read_text()
    data, codes = json.loads(re.search(r'id="data">(.*?)</script>', page)[1]), re.search(r'id="maps">(.*?)<', page)[1]
    maps = np.frombuffer(base64.b64decode(codes), "<f2").astype(np.float32)
    return data, maps.reshape(data["layers"], data["heads"], *[len(data["tokens"])] * 2)


def test_the_heads_of_one_run_are_ranked_in_words_and_files(folder):
    result, out = heads(folder, f"ckpt={RUN}", *OPTIONS, "out=one").succeeded(), folder / "one"
    assert {path.name for path in out.iterdir()} == {"heads.csv", "removal.csv", "heads.png", "attention.html"}
    assert len(result.stderr.splitlines()) == 1  # what is measured, and no warnings
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("|")) <= 120
    ranked = [row["head"] for row in sorted(read(out / "heads.csv")[:-1], key=lambda row: -float(row["change"]))]
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("| L")] == ranked
    assert sorted(ranked) == ["L0H0", "L0H1", "L1H0", "L1H1"]


def test_the_page_shows_the_recorded_text_or_a_prompt(folder):
    out, lm = folder / "page", load(folder / RUN)
    heads(folder, f"ckpt={RUN}", "windows=2", "device=cpu", "out=page").succeeded()
    (data, maps), tokens = page_of(out), text_of_run(Checkpoint.read(folder / RUN / "checkpoints/best.ckpt"))
    shown = tokens.tokens("val")[:T].tolist()
    assert "".join(data["tokens"]) == lm.tokenizer.decode(shown, skip_special_tokens=False)
    assert data["steps"] == [0, 1, 2, 4, 8, 10]  # the run has recorded this text
    start = shown.index(lm.eot_id)  # the second document; the maps keep documents apart, as the run did
    assert start > 0 and (maps[:, :, start:, :start] == 0).all() and (maps[:, :, start - 1, :start] > 0).all()
    with torch.no_grad():
        chances = lm.model(torch.tensor([shown[start:]]))[0, -1, : lm.n_ids].softmax(-1).topk(10).values
    assert [p for _, p in data["probabilities"][-1]] == pytest.approx(chances.tolist(), abs=1e-6)
    heads(folder, f"ckpt={RUN}", "windows=2", "device=cpu", "prompt=", "out=two").succeeded()
    data, _ = page_of(folder / "two")
    assert (data["tokens"], data["steps"]) == (["<|endoftext|>"], [])


def test_the_default_text_repeats_its_beginning():
    lm, tokens = byte_model(context_length=60), np.arange(100, dtype=np.uint16)
    assert prompt_ids(lm, tokens, None) == [*range(48), *range(12)]


def test_what_is_refused_leaves_nothing(folder, tmp_path):
    run = Path(shutil.copytree(folder / RUN, tmp_path / "unfinished/run"))
    (run / "summary.json").unlink()
    for name in ("damaged", "other", "large", "none"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "damaged/heads.csv").write_text("step,head\nx,L0H0\n")
    (tmp_path / "other/heads.csv").write_text("step,head,entropy\n1,L0H0,2\n")
    large = {"ids": np.zeros(1 << 14, int), "shape": [2, 1, 1 << 14, 1 << 14], "0": np.zeros(9, np.uint8)}
    np.savez(tmp_path / "large/head_maps.npz", **large)
    save(tmp_path / "none/checkpoints/last.ckpt", byte_model(n_heads=0, pos="none"))
    before = set(tmp_path.rglob("*"))
    for settings, *names in (
        (["dir=unfinished"], "no run", "seed 0, is unfinished"),
        ([f"ckpt={run}", f"prompt={'print(x, ' * 9}"], "context_length=32"),
        ([f"ckpt={run}", "windows=9999"], "windows=9999"),
        (["ckpt=damaged"], "heads.csv"),
        (["ckpt=other"], "other/heads.csv", "heads or scores"),
        (["ckpt=large"], "head_maps.npz", "shape"),
        (["ckpt=none/checkpoints/last.ckpt"], "model.n_heads=0"),
    ):
        heads(tmp_path, *settings).refused(*names)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_averages_of_a_sweep_are_those_of_its_runs(folder, train, tmp_path):
    train(1)
    runs = Path(shutil.copytree(folder / "sweep", tmp_path / "runs"))
    other = Path(shutil.copytree(folder / RUN, runs / "dim16"))  # another variant, which diverged
    settings = Run(other).settings
    settings["model"]["dim"] = 16
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    write_json(other / "summary.json", Run(other).summary | {"diverged": "step 9"})
    result = heads(tmp_path, "dir=runs", *OPTIONS, "out=here").succeeded()
    assert "dim=16, seed 0, diverged: left out." in result.stdout
    of_runs, averages = (read(tmp_path / "here" / name) for name in ("heads.csv", "averages.csv"))
    assert [(x["seed"], x["model.dim"]) for x in of_runs] == [("0", "32")] * 4 + [("1", "32")] * 4
    heads(tmp_path, "ckpt=runs/seed0", *OPTIONS, "out=one").succeeded()
    for row, alone in zip(of_runs[:4], read(tmp_path / "one/heads.csv"), strict=False):  # a last row of uniform weights
        assert all(row[name] == alone[name] for name in ("head", "change", "low", "verdict", "documents"))
    rises = np.array([float(row["change"]) for row in of_runs]).reshape(2, 4)  # (seeds, heads)
    expected = [rises[:, :2].sum(1), rises[:, 2:].sum(1), *np.sort(rises)[:, ::-1].T]  # of each layer, of each rank
    assert [row["quantity"].split()[0] for row in averages] == ["layer"] * 2 + ["rank"] * 4
    for row, values in zip(averages, expected, strict=True):
        change, low, high = (float(row[name]) for name in ("change", "low", "high"))
        assert change == pytest.approx(values.mean(), rel=1e-6, abs=1e-9) and low < change < high
        assert high - low > np.ptp(values) and (row["variant"], row["seeds"]) == ("dim=32", "2")
