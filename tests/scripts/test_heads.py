"""scripts/heads.py on runs with separate documents, against a loop over documents; and dir=SWEEP, over seeds."""

import csv
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.runs import train_typed, typed
from tril.model.checkpoint import read_state, save, write_state
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.description import prompt_ids, write_maps
from tril.model.heads.records import COPY_LOSSES, compress_maps, save_maps
from tril.model.heads.scores import SCORES, HeadScores
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
    base += ("callbacks.causality=null", "callbacks.samples=null", "callbacks.heads=null")

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


def document_losses(lm, tokens, numbers, gate=None):
    """The sums of the losses of each document in the windows, and their numbers; each passes the model by itself."""
    sums, eot = {}, lm.tokenizer.token_to_id(lm.eot)
    for number in numbers:
        window = tokens[number * T : number * T + T + 1]
        starts = sorted({0, *(i for i in range(T) if window[i] == eot)})
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            with torch.no_grad():
                logits = lm.model(window[None, start:end], head_gate=gate)[0]
            loss = F.cross_entropy(logits.double(), window[start + 1 : end + 1], reduction="sum").item()
            entry = sums.setdefault((tokens[: number * T + start + 1] == eot).sum().item(), [0.0, 0])
            entry[:] = entry[0] + loss, entry[1] + end - start
    return np.array([*sums.values()]).T


def test_the_heads_of_one_run(folder):
    run = read_run(folder / RUN / "checkpoints/best.ckpt")
    lm, before, out = run.checkpoint.language_model(), set(folder.rglob("*")), folder / "one"
    result = heads(folder, f"ckpt={RUN}", *OPTIONS, "out=one")
    assert result.returncode == 0, result.stderr
    written = result.stdout.splitlines()[-1].removeprefix("one: ").split(", ")
    assert set(folder.rglob("*")) - before == {out, *(out / name for name in written)} and len(written) == 7
    assert len(result.stderr.splitlines()) == 1  # what is measured, and no warnings
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    [tokens] = validation_tokens(run)
    content, tokens = json.loads((out / "heads.json").read_text()), torch.tensor(tokens.astype(int))
    numbers = [i * ((len(tokens) - 1) // T - 1) // 7 for i in range(8)]
    assert content["windows"] == {"of": "the validation part", "length": T, "numbers": numbers}
    checkpoint = str(Path(RUN, "checkpoints/best.ckpt"))
    assert (content["document_mask"], content["steps"], content["checkpoint"]) == (True, 10, checkpoint)
    whole, sizes = document_losses(lm, tokens, numbers)
    assert content["loss"] == pytest.approx(whole.sum() / (8 * T), abs=1e-5)
    assert [row["head"] for row in content["heads"]] == NAMES
    assert content["observations"]["documents"] == content["observations"]["clusters"] == len(sizes)
    ranked = [row["head"] for row in sorted(content["heads"], key=lambda row: -row["change"])]
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("| L")] == ranked
    nothing = document_losses(lm, tokens, numbers, torch.zeros(2, 2))[0].sum() / (8 * T)
    assert content["removal"][-1]["loss"] == pytest.approx(nothing, abs=1e-5)
    assert [float(row["loss"]) for row in read(out / "removal.csv")] == [row["loss"] for row in content["removal"]]
    assert "".join(content["shown_tokens"]) == lm.tokenizer.decode(tokens[:T].tolist(), skip_special_tokens=False)


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
    for document_eot in (None, lm.eot_id):
        write_maps(tmp_path, lm, ids, TokenWindows(window, window, document_eot), "it", scores)
    assert pages[0]["tokens"] == ["3", " ", "\ufffd", "\ufffd", "<|endoftext|>", "a"]  # a character of two tokens
    across = [page["maps"][:, :, 4:, :4] for page in pages]
    assert (across[0] > 0).all() and (across[1] == 0).all()
    with torch.no_grad():
        expected = [lm.model(torch.tensor([part]))[0, -1].softmax(-1)[: lm.n_ids] for part in (ids, ids[4:])]
    for page, after in zip(pages, expected, strict=True):
        top = after.argsort(descending=True)[:10].tolist()
        names, chances = zip(*page["probabilities"][-1], strict=True)
        assert list(names) == [lm.tokenizer.decode([i], skip_special_tokens=False) for i in top]
        assert list(chances) == pytest.approx(after[top].tolist(), abs=1e-6)
    assert prompt_ids(lm, np.arange(100), None) == list(range(T))  # no more than the context
    assert prompt_ids(lm, np.arange(100), "") == [lm.eot_id]


def test_what_a_run_has_recorded_of_its_heads_is_drawn(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # takes a second each
    run = Path(shutil.copytree(folder / RUN, tmp_path / "run"))
    [tokens] = validation_tokens(read_run(run / "checkpoints/best.ckpt"))
    codes = compress_maps(np.full((2, 2, T, T), 0.25, np.float32))
    save_maps(run, tokens[:T].tolist(), (2, 2, T, T), {0: codes, 4: codes})
    lines = ["step,head," + ",".join([*SCORES, *COPY_LOSSES])]
    lines += [
        f"{step},{head},1,1,{i + step},0,0,2,0.5,7,6" for step in (0, 4) for i, head in enumerate([*NAMES, "uniform"])
    ]
    (run / "heads.csv").write_text("\n".join(lines))
    for options, steps in (([], [0, 4]), (["prompt=line"], [])):
        result = heads(tmp_path, "ckpt=run", "windows=2", "device=cpu", *options)
        assert result.returncode == 0 and result.stdout.endswith("attention.html, heads_over_time.png\n"), result.stderr
        page = (run / "heads/attention.html").read_text()
        assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["steps"] == steps
    (run / "heads.csv").write_text("step,head\nx,L0H0\n")
    assert_refused(heads(tmp_path, "ckpt=run"), "heads.csv is damaged")


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
    of_runs, averages, single = read(tmp_path / "here/heads.csv"), read(tmp_path / "here/averages.csv"), []
    for seed in (0, 1):
        done = heads(tmp_path, f"ckpt=runs/heads2-seed{seed}", *OPTIONS, f"out=seed-{seed}")
        assert done.returncode == 0, done.stderr
        one = json.loads((tmp_path / f"seed-{seed}/heads.json").read_text())
        rows = [row for row in of_runs if (row["model.n_heads"], row["seed"]) == ("2", str(seed))]
        assert [(row["head"], float(row["low"]), row["verdict"], int(row["documents"])) for row in rows] == [
            (head["head"], head["low"], head["verdict"], one["observations"]["documents"]) for head in one["heads"]
        ]
        rises = {head["head"]: head["change"] for head in one["heads"]}
        sums = {f"layer {n}": sum(rise for head, rise in rises.items() if head[1] == str(n)) for n in (0, 1)}
        single.append(sums | {f"rank {n}": rise for n, rise in enumerate(sorted(rises.values())[::-1], 1)})
    for row in averages:
        values = [each[row["quantity"]] for each in single]
        change, low, high = (float(row[name]) for name in ("change", "low", "high"))
        assert change == pytest.approx(np.mean(values), rel=1e-6, abs=1e-9) and low < change < high
        assert high - low > abs(values[0] - values[1]) and (row["variant"], row["seeds"]) == ("n_heads=2", "2")
        assert f"{change:+.4f} ± {(high - low) / 2:.4f}" in result.stdout


def test_refusals_are_one_line_and_leave_nothing(folder, tmp_path):
    run = folder / RUN
    checkpoint = read_run(run / "checkpoints/last.ckpt").checkpoint
    without = LanguageModel(tiny_gpt(vocab_size=257, n_heads=0), checkpoint.language_model().tokenizer)
    save(tmp_path / "none/checkpoints/last.ckpt", without, **checkpoint.data)
    shutil.copy(run / "config.yaml", tmp_path / "none")
    (Path(shutil.copytree(run, tmp_path / "unfinished/run")) / "summary.json").unlink()
    before = set(tmp_path.rglob("*"))
    for arguments, message in (
        (["ckpt=none"], "last.ckpt has model.n_heads=0, blocks without attention heads; name another run"),
        ([f"ckpt={run}", "windows=4", f"prompt={'print(x, ' * 9}"], "more than the model's context_length=32; sh"),
        (
            ["dir=unfinished"],
            "has no finished run; let one finish. the configuration, seed 0, is unfinished: left out.",
        ),
    ):
        assert_refused(heads(tmp_path, *arguments), message)
    assert set(tmp_path.rglob("*")) == before
