"""scripts/report.py: the files it writes, that no text of a sweep becomes markup in them, what it refuses."""

import csv
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.experiments.synthetic import BYTES_PER_TOKEN, FOUR, HEADS, ONE, sweep_of, write_run, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.report import Report, Request, escape, printable, table
from tril.scripts.report import main

NASTY = "<script>alert(1)<b>|`*_$^$ & "
MESSAGE = "</td></script><script>alert('2')| \x1b[31m red\nand more \udcff"
LOSSES = {(NASTY,): {0: 3.1, 1: 3.25, 2: "failed"}, ("relu2",): {0: 3.0, 1: 3.1, 2: 3.3}}


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


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_report_has_every_file_and_no_text_becomes_markup(tmp_path):
    folder = write_sweep(tmp_path / "multirun" / "day" / "new", ["model.mlp"], LOSSES, baseline=("relu2",))
    next(folder.rglob("failed.json")).write_text(json.dumps({"status": 1, "message": MESSAGE}))
    done = call(main, "dir=latest", "baseline=mlp=relu2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Against mlp=relu2, ") and "\x1b" not in done.stdout
    assert re.search(r"\| mlp=.* not distinguishable +\| +\+0.1250 ± ", done.stdout)
    pictures = {"differences.png", "losses.png", "curves.png"}
    files = {"report.md", "report.html", "results.csv", "runs.csv"} | pictures
    last = done.stdout.splitlines()[-1]
    assert last.startswith("multirun/day/new: ") and set(last.partition(": ")[2].split(", ")) == files
    assert {path.name for path in folder.iterdir() if path.is_file()} == files | {"sweep.json"}

    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and not {"script", "link", "iframe", "b"} & set(page.tags)
    assert "http:" not in text and "https:" not in text
    assert len(page.loaded) == 3 and all(address.startswith("data:image/png;base64,iVBOR") for address in page.loaded)
    assert f"mlp={NASTY}".strip() in page.texts
    assert any("</td></script><script>alert('2')| " in shown for shown in page.texts)

    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "\x1b" not in markdown and not re.search(r"(?<!\\)<", markdown)
    assert set(re.findall(r"\]\(([^)]*)\)", markdown)) == pictures
    assert r"\</td\>\</script\>\<script\>alert('2')\| \[31m red and more" in markdown


def test_out_and_which(tmp_path, drawn):
    folder = write_sweep(tmp_path / "sweep", ["model.mlp"], LOSSES, baseline=("relu2",))
    for path in folder.glob("model.mlp=relu2*/windows_best.npz"):
        np.savez(path, step=75, context_length=32, nll=np.full(8, 2.0 * 32), targets=np.full(8, 32))
    before = set(folder.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tril.scripts.experiments.report.page", lambda *_: "")
        done = call(main, f"dir={folder}", "out=made/here", "which=best", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(folder.rglob("*")) == before and (tmp_path / "made" / "here" / "report.md").is_file()
    difference = float(read_csv(tmp_path / "made" / "here" / "results.csv")[0]["difference"])
    assert difference == pytest.approx((3.09 + 3.24) / 2 - 2)  # the best windows lie 0.01 below the last ones


def report_of(sweep, **request):
    return Report(sweep, losses_of(sweep, request.get("which", "final")), Request(**request))


def test_csv_files_have_all_digits(tmp_path, drawn):
    losses = {(1,): {0: 3.1, 1: 3.2 + 1e-15, 2: "failed"}, (4,): {0: math.pi, 1: math.e}}
    report = report_of(sweep_of(tmp_path, losses))
    report.write(tmp_path, published=True)
    one, four = read_csv(tmp_path / "results.csv")
    names = ("variant", "model.n_heads", "baseline", "seeds", "finished")
    assert [one[name] for name in names] == ["n_heads=1", "1", "False", "3", "2"]
    assert float(four["final_val_loss"]) == pytest.approx((math.pi + math.e) / 2, rel=1e-15)
    half = 12.706204736174698 * (math.pi - math.e) / 2  # Student's t, 1 degree of freedom
    assert float(four["final_val_loss_high"]) - float(four["final_val_loss"]) == pytest.approx(half)
    assert float(four["best_val_bpb"]) == pytest.approx(((math.pi + math.e) / 2 - 0.01) / math.log(2) / 3)
    assert [float(one[x]) for x in ("parameters", "training_flops", "tokens_per_second")] == [1000, 38400000, 1000]
    [each] = report.comparisons.values()
    interval = [each.difference.mean, each.difference.low, each.difference.high]
    assert [float(one[f"difference{side}"]) for side in ("", "_low", "_high")] == interval
    assert (float(one["detectable"]), one["verdict"], one["common_seeds"]) == (each.detectable, each.verdict, "2.0")
    assert four["verdict"] == four["difference"] == ""
    runs = read_csv(tmp_path / "runs.csv")
    assert [(run["seed"], run["state"]) for run in runs[:3]] == [("0", "finished"), ("1", "finished"), ("2", "failed")]
    assert runs[2]["final_val_loss"] == "" and runs[2]["folder"].endswith("model.n_heads=1,seed=2")


def shown(values, quantile=4.302652729911275):
    """Mean ± half of its interval, by the textbook; of Student's t with 2 degrees of freedom."""
    return f"{np.mean(values):.4f} ± {quantile * np.std(values, ddof=1) / math.sqrt(len(values)):.4f}"


def test_tables_and_pictures_have_the_losses_and_no_column_that_is_constant(tmp_path, drawn):
    report = report_of(sweep_of(tmp_path))
    report.write(tmp_path, published=True)
    text = (tmp_path / "report.md").read_text().replace("\\", "")
    for name, values in (("n_heads=1", ONE), ("n_heads=4 (baseline)", FOUR)):
        bits = [value / math.log(2) / BYTES_PER_TOKEN for value in values]
        cells = [name, shown(values), shown(bits), shown(np.array(values) - 0.01)]
        assert re.search(r"\| " + r" +\| +".join(map(re.escape, cells)) + " +\\|", text), cells
    assert (
        "Equal in all rows: seeds: 3." in text and "Equal in all rows: parameters: 1,000; FLOPs per token: 6,0" in text
    )
    [each] = report.comparisons.values()
    [bar] = drawn["differences.png"].axes[0].containers
    ends = bar.lines[2][0].get_segments()[0]
    assert ends.tolist() == [pytest.approx([x, 0]) for x in (each.difference.low, each.difference.high)]
    above, below = drawn["curves.png"].axes
    lines = [line.get_xydata().tolist() for line in above.lines if len(line.get_xydata()) and line.get_ls() != "None"]
    assert lines == [run.curves["val"].tolist() for run in report.sweep.runs] and below.get_xlim()[0] == 3200


def test_runs_with_one_validation_have_curves_of_their_training_loss(tmp_path, drawn):
    folder = write_sweep(tmp_path / "sweep", ["model.n_heads"], HEADS)
    for path in folder.rglob("metrics.csv"):
        rows = path.read_text().splitlines()
        path.write_text("\n".join(line for i, line in enumerate(rows) if i not in (2, 4, 6)) + "\n")
    assert call(main, f"dir={folder}", f"publish={tmp_path / 'out'}", cwd=tmp_path).returncode == 0
    lines = [line.get_ydata() for line in drawn["curves.png"].axes[0].lines]
    trained, validated = lines[0::2], lines[1::2]
    assert [len(line) for line in trained] == [4] * 6 and [len(line) for line in validated] == [1] * 6
    assert trained[0] == pytest.approx(ONE[0] + np.array([1.1, 0.4, 0.09, 0.1]))


def test_unfinished_runs_are_named_and_not_in_the_means(tmp_path, drawn):
    runs = {
        (1,): {0: 3.1, 1: "failed", 2: 3.16},
        (4,): {**HEADS[4,], 3: "unfinished"},
        (8,): {0: 3.2, 1: "not started", 2: "unfinished"},
    }
    report = report_of(sweep_of(tmp_path, runs))
    report.write(tmp_path, published=True)
    text = (tmp_path / "report.md").read_text().replace("\\", "")
    assert "- model.n_heads: 1, 4, 8\n- seed: 0, 1, 2, 3\n- baseline: n_heads=4\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["n_heads=1", "1", "failed", "RuntimeError: out of memory"] in rows
    assert ["n_heads=8", "1", "not started", ""] in rows
    assert [row[-1] for row in rows if row[0].startswith("n_heads") and len(row) == 5][-3:-1] == ["2 of 3", "3 of 4"]
    assert "These runs are left out" in text
    expected = "n_heads=1, n_heads=8: not compared, because runs are missing. 4 of 10 runs have not finished."
    assert report.answer() == f"Against n_heads=4, {expected}"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({(4,): {0: "unfinished"}, (1,): {0: 3.0}}, "No run of the baseline n_heads=4 has finished, so there is noth"),
        ({(4,): {0: 3.0, 1: 3.0}}, "There is one variant, n_heads=4: final validation loss 3.0000 ± 0.0000 nats per t"),
        ({(4,): {0: 3.0}, (1,): {0: 3.1}}, "n_heads=1: not compared, because fewer than two seeds are common to both"),
        (
            {(4,): {0: 3.0, 1: 3.1}, (1,): {0: 1.0, 1: 1.1001}, (2,): {0: 3.0, 1: 3.1}},
            "n_heads=1: better by 2.0000 ± 0.0005 nats per token; n_heads=2: equal within the margin",
        ),
    ],
)
def test_the_answer_is_one_sentence(tmp_path, losses, expected):
    assert expected in report_of(sweep_of(tmp_path, losses), margin=0.01).answer()


@pytest.mark.parametrize(
    ("entries", "warning"),
    [
        ({"device": "cuda"}, "The finished runs differ in their device: cpu; cuda. Differences between variants may"),
        ({"data_fingerprint": "another"}, "The finished runs differ in their text or tokenizer, so they are compared"),
        ({"data_fingerprint": "x", "val_bytes_per_token": 4.0}, "runs have different validation texts, of 768 and 1,0"),
        ({"causality": "LEAK"}, "The losses of 3 finished runs are invalid: the model sees the tokens it predicts."),
        ({}, ""),
    ],
)
def test_what_makes_the_losses_doubtful_is_a_warning(tmp_path, drawn, entries, warning):
    usual = {"device": "cpu", "causality": "certified"}
    report_of(sweep_of(tmp_path, summary={(1,): usual | entries, (4,): usual})).write(tmp_path, published=True)
    text = (tmp_path / "report.md").read_text()
    assert warning in text and ("**Warning.**" in text) == bool(warning)


def test_a_single_run_is_a_sweep_of_one(tmp_path):
    folder = write_run(tmp_path / "day" / "time", 3.0, config={"model.dim": 8}, seed=1)
    (folder / "samples.txt").write_text(
        "--- sample at step 50 ---\nold\n--- sample at step 100 ---\n<b>\n```\n# it\x1b"
    )
    (folder / "causality.json").write_text(json.dumps({"verdict": "model: causal: 9 checks"}))
    (folder / "heads").mkdir()
    rows = "head,change,low,high,verdict\nL0H0,0.25,0.2,0.3,worse\nL1H0,0.5,0.4,0.6,worse\nuniform,,,,\n"
    (folder / "heads" / "heads.csv").write_text(rows)
    done = call(main, f"dir={folder}", cwd=tmp_path)
    assert done.stdout.startswith("Best validation loss 2.9900 nats per token at step 75 of 100; at the end 3.0000.")
    text = (folder / "report.md").read_text()
    assert text.startswith("# Run day/time\n") and "What was swept" not in text and "Compared with" not in text
    assert "## Sample\n\n    <b>\n    ```\n    # it\ufffd\n" in text and "model: causal: 9 checks" in text
    assert re.search(r"\| L1H0 \| +\+0.5000 ± 0.1000 \| worse +\|\n\| L0H0 \| +\+0.2500 ± 0.0500 \|", text)
    page = Page((folder / "report.html").read_text())
    assert "b" not in page.tags and "<b>\n```\n# it\ufffd" in page.texts and len(page.loaded) == 1


def test_wrong_settings_end_in_one_line(tmp_path):
    message = "dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest"
    assert_refused(call(main, cwd=tmp_path), message)
    assert_refused(call(main, "dir=.", "publish=a", "out=b", cwd=tmp_path), "out=b excludes publish=a")
    assert not list(tmp_path.iterdir())


def test_text_is_escaped_for_markdown():
    escaped = r"n_heads=1 \_a\_ \*b\* \`c\` \[d\](e) \<f\> g\|h " + "\\\\"
    assert escape("n_heads=1 _a_ *b* `c` [d](e) <f> g|h \\") == escaped
    assert printable("a\tb\x00\x1b[1m\nc ± é") == "a b [1m c ± é"
    assert table([["a", "b_", "c"], ["1", "2", "3"], ["4", "2", "3"]]).endswith("Equal in all rows: b\\_: 2; c: 3.")
