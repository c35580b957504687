"""scripts/heads.py on runs with separate documents, and dir=SWEEP over seeds. The contract has changes and scores."""

import csv
import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import train_typed, typed
from tril.model.checkpoint import read_state, write_state
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.description import prompt_ids, write_maps
from tril.model.heads.scores import HeadScores
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens
from tril.scripts.heads import main

T = 32  # context length of tests.runs.TINY, which has 2 layers of 2 heads
NAMES = ["L0H0", "L0H1", "L1H0", "L1H1"]
OPTIONS = ("windows=8", "device=cpu")
CELLS = ((1, 0), (1, 1), (2, 0), (2, 1))  # heads and seed of the runs of the sweep
RUN = "sweep/heads2-seed0"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function: the folder with the runs of a number of heads and a seed."""
    folder = tmp_path_factory.mktemp("heads")
    lines = [json.dumps({"text": f"line {i}: the square of {i} is {i * i}."}) for i in range(1000)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    base = ("data.tokenizer.kind=byte", "data.document_mask=true", f"data.path={folder / 'text.jsonl'}")
    base += ("trainer.max_steps=10", "trainer.val_check_interval=10")
    base += ("callbacks.causality=null", "callbacks.samples=null")

    def train(*cells):
        for n_heads, seed in cells:
            where = folder / ("sweep" if n_heads else "without") / f"heads{n_heads}-seed{seed}"
            if not where.exists():
                train_typed(typed(*base, f"model.n_heads={n_heads}", f"seed={seed}", f"hydra.run.dir={where}"))
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        yield train


@pytest.fixture(scope="module")
def folder(train):
    """A working directory with a run with two heads."""
    return train((2, 0))


def heads(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True)


def read(path):
    return list(csv.DictReader(path.open(encoding="utf-8")))


@torch.no_grad()
def loss_of(lm, tokens, numbers):
    """The mean loss of windows, each of whose documents passes the model by itself."""
    total = 0.0
    for number in numbers:
        window = tokens[number * T : number * T + T + 1]
        for start, end in pairwise(sorted({0, *(i for i in range(T) if window[i] == lm.eot_id), T})):
            logits = lm.model(window[None, start:end])[0].double()
            total += F.cross_entropy(logits, window[start + 1 : end + 1], reduction="sum").item()
    return total / (len(numbers) * T)


def test_the_heads_of_one_run(folder):
    run = read_run(folder / RUN / "checkpoints/best.ckpt")
    before, out = set(folder.rglob("*")), folder / "one"
    result = heads(folder, f"ckpt={RUN}", *OPTIONS, "out=one")
    assert result.returncode == 0, result.stderr
    written = result.stdout.splitlines()[-1].removeprefix("one: ").split(", ")
    assert set(folder.rglob("*")) - before == {out, *(out / name for name in written)} and len(written) == 8
    assert len(result.stderr.splitlines()) == 1  # what is measured, and no warnings
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    [tokens] = validation_tokens(run)
    content, tokens = json.loads((out / "heads.json").read_text()), torch.tensor(tokens.astype(int))
    numbers = [i * ((len(tokens) - 1) // T - 1) // 7 for i in range(8)]
    assert content["windows"] == {"of": "the validation part", "length": T, "numbers": numbers}
    checkpoint = str(Path(RUN, "checkpoints/best.ckpt"))
    assert (content["document_mask"], content["steps"], content["checkpoint"]) == (True, 10, checkpoint)
    lm = run.checkpoint.language_model()
    assert content["loss"] == pytest.approx(loss_of(lm, tokens, numbers), abs=1e-5)
    assert "".join(content["shown_tokens"]) == lm.tokenizer.decode(tokens[:T].tolist(), skip_special_tokens=False)
    assert [row["head"] for row in content["heads"]] == NAMES
    ranked = [row["head"] for row in sorted(content["heads"], key=lambda row: -row["change"])]
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("| L")] == ranked
    prompted = heads(folder, f"ckpt={RUN}", "windows=2", "device=cpu", "prompt=line", "out=two")
    assert prompted.returncode == 0, prompted.stderr
    for name, steps in (("one", [0, 1, 2, 4, 8, 10]), ("two", [])):  # the run has recorded its text, and no other one
        page = (folder / name / "attention.html").read_text()
        assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["steps"] == steps


def test_windows_are_whole_and_evenly_spaced_and_no_document_is_in_two_texts():
    """The token 0 opens a document; the second text has no whole window."""
    texts = [[1, 2, 0, 3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 0, 15, 16]]
    checkpoint = SimpleNamespace(config=SimpleNamespace(context_length=3), data={"eot_id": 0})
    run, texts = TrainedRun(checkpoint, {"document_mask": True}), [np.array(text, np.uint16) for text in texts]
    numbers, windows, clusters = sample_windows(run, texts, 3)
    assert (numbers.tolist(), windows.document_eot) == ([0, 1, 3], 0)
    assert windows.ids.tolist() == [[1, 2, 0], [3, 4, 5], [14, 0, 15]]
    assert windows.targets.tolist() == [[2, 0, 3], [4, 5, 6], [0, 15, 16]]
    assert clusters.n_documents == 4
    with pytest.raises(ValueError, match="windows=5 exceeds the 4 whole windows of 3 tokens"):
        sample_windows(run, texts, 5)


def test_the_maps_of_a_prompt_keep_documents_apart_as_the_run_did(folder, tmp_path, monkeypatch):
    pages, lm = [], read_run(folder / RUN / "checkpoints/best.ckpt").checkpoint.language_model()
    monkeypatch.setattr("tril.model.heads.description.write_page", lambda path, **page: pages.append(page))
    ids, window = [*prompt_ids(lm, None, "3 é"), lm.eot_id, *prompt_ids(lm, None, "a")], torch.zeros(1, 1)
    scores = HeadScores({"entropy_share": torch.zeros(2, 2)}, {}, 1, (0.0, 0.0))
    write_maps(tmp_path, lm, ids, TokenWindows(window, window, lm.eot_id), "it", scores)
    assert pages[0]["tokens"] == ["3", " ", "\ufffd", "\ufffd", "<|endoftext|>", "a"]  # a character of two tokens
    assert (pages[0]["maps"][:, :, 4:, :4] == 0).all() and (pages[0]["maps"][:, :, 3, :4] > 0).all()
    with torch.no_grad():
        expected = lm.model(torch.tensor([ids[4:]]))[0, -1].softmax(-1)[: lm.n_ids].topk(10)
    shown, chances = zip(*pages[0]["probabilities"][-1], strict=True)
    assert list(shown) == [lm.tokenizer.decode([i], skip_special_tokens=False) for i in expected.indices.tolist()]
    assert list(chances) == pytest.approx(expected.values.tolist(), abs=1e-6)
    assert prompt_ids(lm, np.arange(100), None) == list(range(T))  # no more than the context
    assert prompt_ids(lm, np.arange(100), "") == [lm.eot_id]


@pytest.mark.slow
def test_the_averages_of_a_sweep_are_those_of_its_runs_and_what_it_leaves_out_is_named(train, tmp_path):
    """The runs of one head diverged, each in another way, and a variant has no heads."""
    folder = train(*CELLS, (0, 0))
    runs = Path(shutil.copytree(folder / "sweep", tmp_path / "runs"))
    shutil.copytree(folder / "without/heads0-seed0", runs / "none")
    summary = json.loads((runs / "heads1-seed0/summary.json").read_text()) | {"diverged": "step 9"}
    (runs / "heads1-seed0/summary.json").write_text(json.dumps(summary))
    for path in (runs / "heads1-seed1/checkpoints").glob("*.ckpt"):
        content = read_state(path)
        content["state_dict"]["model.norm.weight"].fill_(math.nan)
        write_state(path, content)
    result = heads(tmp_path, "dir=runs", *OPTIONS, "out=here")
    assert result.returncode == 0, result.stderr
    for remark in (
        "n_heads=1, seed 0, diverged: left out.",
        "n_heads=0, seed 0, has model.n_heads=0, blocks without attention heads: left out.",
        "n_heads=1, seed 1, has weights that are not finite, as its run diverged: left out.",
    ):
        assert remark in result.stdout
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"heads.csv", "averages.csv", "ranks.png"}
    without = "last.ckpt has model.n_heads=0, blocks without attention heads; name another run"
    assert_refused(heads(tmp_path, "ckpt=runs/none/checkpoints/last.ckpt"), without)
    of_runs, averages = (read(tmp_path / "here" / name) for name in ("heads.csv", "averages.csv"))
    assert heads(tmp_path, "ckpt=runs/heads2-seed0", *OPTIONS, "out=one").returncode == 0
    assert [(x["seed"], x["model.n_heads"]) for x in of_runs] == [("0", "2")] * 4 + [("1", "2")] * 4
    columns = ("head", "change", "low", "verdict", "documents")
    ours, alone = (
        [tuple(map(x.get, columns)) for x in rows] for rows in (of_runs[:4], read(tmp_path / "one/heads.csv"))
    )
    assert ours == alone[:4]  # the last row is that of uniform weights
    rises, expected = np.array([float(row["change"]) for row in of_runs]).reshape(2, 4), {}  # (seeds, heads)
    expected |= {f"layer {n}": rises[:, 2 * n : 2 * n + 2].sum(1) for n in (0, 1)}
    expected |= {f"rank {n}": each for n, each in enumerate(np.sort(rises)[:, ::-1].T, 1)}
    assert [row["quantity"] for row in averages] == list(expected)
    for row, values in zip(averages, expected.values(), strict=True):
        change, low, high = (float(row[name]) for name in ("change", "low", "high"))
        assert change == pytest.approx(values.mean(), rel=1e-6, abs=1e-9) and low < change < high
        assert high - low > np.ptp(values) and (row["variant"], row["seeds"]) == ("n_heads=2", "2")
        assert f"{change:+.4f} ± {(high - low) / 2:.4f}" in result.stdout


def test_refusals_are_one_line_and_leave_nothing(folder, tmp_path):
    run = Path(shutil.copytree(folder / RUN, tmp_path / "unfinished/run"))
    (run / "summary.json").unlink()
    before, unfinished = set(tmp_path.rglob("*")), "let one finish. the configuration, seed 0, is unfinished: left out."
    assert_refused(heads(tmp_path, "dir=unfinished"), f"has no finished run; {unfinished}")
    done = heads(tmp_path, f"ckpt={run}", "windows=4", f"prompt={'print(x, ' * 9}")
    assert_refused(done, "more than the model's context_length=32; sh")
    (run / "heads.csv").write_text("step,head\nx,L0H0\n")
    assert_refused(heads(tmp_path, f"ckpt={run}"), "heads.csv is damaged")
    assert set(tmp_path.rglob("*")) == before
