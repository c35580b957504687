"""scripts/report.py: the files it writes, that no text of a sweep becomes markup in them, what it refuses."""

import csv
import json
import math
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.experiments.synthetic import BYTES_PER_TOKEN, FOUR, HEADS, ONE, sweep_of, write_sweep
from tril.scripts.experiments.losses import compare_sweep, losses_of
from tril.scripts.experiments.report import Request, answer, escape, printable, write_report
from tril.scripts.report import find_sweep, main

NASTY = "<script>alert(1)<b>|`*_$^$ & "
MESSAGE = "</td></script><script>alert('2')| \x1b[31m red\nand more \udcff"
LOSSES = {(NASTY,): {0: 3.1, 1: 3.25, 2: "failed"}, ("relu2",): {0: 3.0, 1: 3.1, 2: 3.3}}
FILES = {"report.md", "report.html", "results.csv", "runs.csv", "differences.png", "losses.png"}


class Page(HTMLParser):
    """Tags, addresses of loaded resources, and texts, as a browser finds them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.loaded, self.texts, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.fixture
def sweep(tmp_path):
    folder = write_sweep(tmp_path / "multirun" / "day" / "new", ["model.mlp"], LOSSES, baseline=("relu2",))
    failed = next(folder.rglob("failed.json"))
    failed.write_text(json.dumps({"status": 1, "message": MESSAGE}))
    return folder


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def unescaped(line: str) -> list[str]:
    """The columns of a line of a Markdown table."""
    return re.split(r"(?<!\\)\|", line)[1:-1]


@pytest.mark.filterwarnings("error::UserWarning")
def test_report_of_the_newest_sweep(sweep, tmp_path):
    write_sweep(tmp_path / "multirun" / "day" / "old", ["model.mlp"], {("gelu",): {0: 9.0}})
    os.utime(tmp_path / "multirun" / "day" / "old" / "sweep.json", (1, 1))
    done = call(main, "dir=latest", "baseline=mlp=relu2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Against mlp=relu2: ") and "\x1b" not in done.stdout
    assert re.search(r"\| mlp=.* not distinguishable +\| +\+0.1250 ± ", done.stdout)
    last = done.stdout.splitlines()[-1]
    files = set(last.partition(": ")[2].split(", "))
    assert last.startswith("multirun/day/new: ") and files == FILES | {"curves.png"}
    assert {path.name for path in sweep.iterdir() if path.is_file()} == files | {"sweep.json"}

    text = (sweep / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and not {"script", "link", "iframe", "b"} & set(page.tags)
    assert "http:" not in text and "https:" not in text
    pictures = [name for name in files if name.endswith(".png")]
    assert len(page.loaded) == len(pictures) and all(
        address.startswith("data:image/png;base64,iVBOR") for address in page.loaded
    )
    assert f"mlp={NASTY}".strip() in page.texts and any(
        "</td></script><script>alert('2')| " in found for found in page.texts
    )

    markdown = (sweep / "report.md").read_text(encoding="utf-8")
    assert "\x1b" not in markdown and not re.search(r"(?<!\\)<", markdown)
    assert set(re.findall(r"\]\(([^)]*)\)", markdown)) == set(pictures)
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(unescaped(line)) for line in table.splitlines()}) == 1
    assert r"\</td\>\</script\>\<script\>alert('2')\| \[31m red and more" in markdown


def test_out_and_which(sweep, tmp_path):
    for path in sweep.glob("model.mlp=relu2*/windows_best.npz"):
        np.savez(path, step=75, context_length=32, nll=np.full(8, 2.0 * 32), targets=np.full(8, 32))
    for log in sweep.rglob("metrics.csv"):  # curves take seconds to draw
        log.unlink()
    before = set(sweep.rglob("*"))
    done = call(main, f"dir={sweep}", "out=made/here", "which=best", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(sweep.rglob("*")) == before
    assert {path.name for path in (tmp_path / "made" / "here").iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "multirun"]
    difference = float(read_csv(tmp_path / "made" / "here" / "results.csv")[0]["difference"])
    assert difference == pytest.approx((3.09 + 3.24) / 2 - 2)  # the best windows lie 0.01 below the last ones


def test_csv_files_have_all_digits(tmp_path):
    losses = {(1,): {0: 3.1, 1: 3.2 + 1e-15, 2: "failed"}, (4,): {0: math.pi, 1: math.e}}
    sweep = sweep_of(tmp_path, losses)
    write_report(sweep, losses_of(sweep), Request(), tmp_path, published=False)
    one, four = read_csv(tmp_path / "results.csv")
    names = ("variant", "model.n_heads", "baseline", "seeds", "finished")
    assert [one[name] for name in names] == ["n_heads=1", "1", "False", "3", "2"]
    assert float(four["final_val_loss"]) == pytest.approx((math.pi + math.e) / 2, rel=1e-15)
    half = 12.706204736174698 * (math.pi - math.e) / 2  # Student's t, 1 degree of freedom
    assert float(four["final_val_loss_high"]) - float(four["final_val_loss"]) == pytest.approx(half)
    assert float(four["best_val_bpb"]) == pytest.approx(((math.pi + math.e) / 2 - 0.01) / math.log(2) / 3)
    assert [float(one[x]) for x in ("parameters", "training_flops", "tokens_per_second")] == [1000, 38400000, 1000]
    [found] = compare_sweep(losses_of(sweep), sweep).values()
    interval = [found.difference.mean, found.difference.low, found.difference.high]
    assert [float(one[f"difference{side}"]) for side in ("", "_low", "_high")] == interval
    assert (float(one["detectable"]), one["verdict"], one["common_seeds"]) == (found.detectable, found.verdict, "2.0")
    assert four["verdict"] == four["difference"] == ""
    runs = read_csv(tmp_path / "runs.csv")
    assert [(run["seed"], run["state"]) for run in runs[:3]] == [("0", "finished"), ("1", "finished"), ("2", "failed")]
    finished = [run.summary["final_val_loss"] for variant in sweep.variants for run in variant.finished]
    assert [float(run["final_val_loss"]) for run in runs if run["final_val_loss"]] == finished
    assert runs[2]["final_val_loss"] == "" and runs[2]["folder"].endswith("model.n_heads=1,seed=2")


def said(sweep, **request):
    losses = losses_of(sweep)
    return answer(sweep, Request(**request), losses, compare_sweep(losses, sweep, request.get("margin")))


def written(sweep, folder, **request):
    """report.md without its escapes; no picture is drawn, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: path.write_bytes(b""))
        write_report(sweep, losses_of(sweep), Request(**request), folder, published=True)
    return (folder / "report.md").read_text().replace("\\", "")


def shown(values, quantile=4.302652729911275):
    """Mean ± half of its interval, by the textbook; of Student's t with 2 degrees of freedom."""
    return f"{np.mean(values):.4f} ± {quantile * np.std(values, ddof=1) / math.sqrt(len(values)):.4f}"


def test_the_tables_of_the_losses(tmp_path):
    text = written(sweep_of(tmp_path), tmp_path)
    for name, values in (("n_heads=1", ONE), ("n_heads=4 (baseline)", FOUR)):
        bits = [value / math.log(2) / BYTES_PER_TOKEN for value in values]
        cells = [name, "3", shown(values), shown(bits), shown(np.array(values) - 0.01)]
        assert re.search(r"\| " + r" +\| +".join(map(re.escape, cells)) + " +\\|", text), cells


def test_unfinished_runs_are_named_and_not_in_the_means(tmp_path):
    runs = {
        (1,): {0: 3.1, 1: "failed", 2: 3.16},
        (4,): {**HEADS[4,], 3: "unfinished"},
        (8,): {0: 3.2, 1: "not started", 2: "unfinished"},
    }
    sweep = sweep_of(tmp_path, runs)
    text = written(sweep, tmp_path)
    assert "- model.n_heads: 1, 4, 8\n- seed: 0, 1, 2, 3\n- baseline: n_heads=4\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["n_heads=1", "1", "failed", "RuntimeError: out of memory"] in rows
    assert ["n_heads=8", "1", "not started", ""] in rows
    assert [row[1] for row in rows if len(row) == 5 and "±" in row[2]][-2:] == ["2 of 3", "3 of 4"]
    assert "- n_heads=8: left out, because not finished in both: seed 1, 2" in text
    assert "n_heads=1, n_heads=8 are not compared yet, because runs are missing. 4 of 10 runs have not fin" in said(
        sweep
    )


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (
            {(4,): {0: "unfinished"}, (1,): {0: 3.0}},
            "No run of the baseline n_heads=4 has finished, so there is nothing",
        ),
        (
            {(4,): {0: 3.0}},
            "There is one variant, n_heads=4: final validation loss 3.0000 nats per token over one seed",
        ),
        (
            {(4,): {0: 3.0}, (1,): {0: 3.1}},
            "n_heads=1 is not compared, because fewer than two seeds are common to both",
        ),
        ({(4,): {0: 3.0, 1: 3.1}, (1,): {0: 5.0, 1: 5.1001}}, "n_heads=1 is worse by 2.0000 ± 0.0008 nats per token."),
        (
            {(4,): {0: 3.0, 1: 3.1}, (1,): {0: 1.0, 1: 1.1001}, (2,): {0: 3.0, 1: 3.1}},
            "Against n_heads=4: n_heads=1 is better by 2.0000 ± 0.0005 nats per token; n_heads=2 is equal to it within",
        ),
    ],
)
def test_the_answer_is_one_sentence(tmp_path, losses, expected):
    assert expected in said(sweep_of(tmp_path, losses), margin=0.01)


@pytest.mark.parametrize(
    ("entries", "warning"),
    [
        ({"device": "cuda"}, "The finished runs differ in their device: cpu; cuda. Differences between variants may"),
        ({"data_fingerprint": "another"}, "The finished runs differ in their text or tokenizer: compare bits per byte"),
        ({"causality": "LEAK"}, "The losses of 3 finished runs are invalid: the model sees the tokens it predicts."),
    ],
)
def test_what_makes_the_losses_doubtful_is_a_warning(tmp_path, entries, warning):
    usual = {"device": "cpu", "causality": "certified"}
    sweep = sweep_of(tmp_path, summary={(1,): usual | entries, (4,): usual})
    assert f"**Warning.** {warning}" in written(sweep, tmp_path)
    assert "Warning" not in written(sweep_of(tmp_path / "usual", summary={(1,): usual, (4,): usual}), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest"),
        (["dir=latest"], "no sweep.json below multirun/"),
        (["dir=nowhere"], "nowhere is not a folder"),
        (["dir=.", "which=median"], "which=median must be 'final' or 'best'"),
        (["dir=.", "folder=x"], "there is no setting folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_end_in_one_line(overrides, message, tmp_path):
    assert_refused(call(main, *overrides, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())


def test_unknown_baseline_is_refused(sweep, tmp_path):
    before = set(tmp_path.rglob("*"))
    done = call(main, f"dir={sweep}", "baseline=mlp=swiglu", cwd=tmp_path)
    assert_refused(done, "baseline=mlp=swiglu is not a variant; choose one of")
    assert set(tmp_path.rglob("*")) == before


def test_latest_is_the_newest_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, time in (("a", 3), ("b", 9), ("c", 5)):
        path = tmp_path / "multirun" / name / "sweep.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (time, time))
    assert find_sweep("latest").name == "b" and str(find_sweep("a=b/c")) == "a=b/c"


def test_text_is_escaped_for_markdown():
    assert (
        escape("n_heads=1 _a_ *b* `c` [d](e) <f> g|h \\")
        == r"n_heads=1 \_a\_ \*b\* \`c\` \[d\](e) \<f\> g\|h " + "\\\\"
    )
    assert printable("a\tb\x00\x1b[1m\nc ± é") == "a b [1m c ± é"
