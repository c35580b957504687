"""scripts/report.py: recorded reports, that no text of a sweep becomes markup in them, and their pictures.

TRIL_GOLDEN=write in the environment records the reports again. `test_published` has those of docs.
"""

import html
import json
import os
import re
from pathlib import Path

import pytest

from tests.calls import call
from tests.scripts.experiments.synthetic import HEADS, change, sweep_of, write_run, write_sweep
from tril.scripts.experiments.losses import losses_of
from tril.scripts.experiments.report import Report, Request
from tril.scripts.report import main

GOLDEN = Path(__file__).with_name("report.md")
NASTY = "<script>alert(1)<b>|`*_$^$ & [d](e)"
MESSAGE = "</td></script><script>alert('2')| \x1b[31m red\nand more \udcff"
LOSSES = {
    (4, NASTY): {0: 3.1, 1: 3.25, 2: "failed"},
    (4, "relu2"): {0: 3.0, 1: 3.1, 2: 3.3},
    (8, "relu2"): {0: 2.0, 1: "not started", 2: "unfinished"},
}
DOUBTFUL = {"device": "cuda", "causality": "LEAKS at 1"}
SAMPLE = "--- sample at step 50 ---\nold\n--- sample at step 100 ---\n<b>\n```\n# it\x1b"
HEADS_CSV = "head,change,low,high,verdict\nL0H0,0.25,0.2,0.3,worse\nL1H0,0.5,0.4,0.6,worse\nuniform,,,,\n"


@pytest.mark.filterwarnings("error::UserWarning")  # of matplotlib
def test_reports_are_the_recorded_ones_and_no_text_becomes_markup(tmp_path):
    folder, keys = tmp_path / "multirun/day/new", ["model.n_heads", "model.mlp"]
    usual = {"device": "cpu", "causality": "certified"}
    summary = {values: usual | (DOUBTFUL if values[0] == 8 else {}) for values in LOSSES}
    write_sweep(folder, LOSSES, keys, baseline=(4, "relu2"), summary=summary)
    change(next(folder.rglob("failed.json")), message=MESSAGE)
    launches = [{"seeds": [0, 1, 2], "date": "2026-11-22", "command": "python train.py -m model.mlp='<b>'"}]
    change(folder / "sweep.json", launches=launches)
    done = call(main, "dir=latest", "baseline=mlp=relu2", "margin=0.5", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "\x1b" not in done.stdout
    pictures = {"differences.png", "losses.png", "curves.png"}
    files = {"report.md", "report.html", "results.csv", "runs.csv"} | pictures
    assert {path.name for path in folder.iterdir() if path.is_file()} == files | {"sweep.json"}
    last = done.stdout.splitlines()[-1]
    assert last.startswith("multirun/day/new: ") and set(last.partition(": ")[2].split(", ")) == files

    single = write_run(tmp_path / "day/time", 3.0, {"model.dim": 8}, seed=1)  # a sweep of one
    (single / "samples.txt").write_text(SAMPLE)
    (single / "causality.json").write_text(json.dumps({"verdict": "model: causal: 9 checks"}))
    (single / "heads").mkdir()
    (single / "heads/heads.csv").write_text(HEADS_CSV)
    done = call(main, f"dir={single}", cwd=tmp_path)
    assert done.stdout.startswith("Best validation loss 2.9900 nats per token at step 75 of 100; at the end 3.0000.")

    text = "\n".join((each / "report.md").read_text("utf-8") for each in (folder, single))
    if os.environ.get("TRIL_GOLDEN") == "write":
        GOLDEN.write_text(text, "utf-8")
    assert text == GOLDEN.read_text("utf-8")
    assert "\x1b" not in text and not re.search(r"(?<!\\)<", re.sub(r"```.*?```|    <b>", "", text, flags=re.DOTALL))
    page, of_single = ((each / "report.html").read_text("utf-8") for each in (folder, single))
    tags = {*re.findall(r"<(\w+)", page + of_single)}
    assert not {"script", "link", "iframe", "b", "a"} & tags and not re.search("https?:", page)
    loaded = [re.findall(r'(?:src|href)="(.{27})', each) for each in (page, of_single)]
    assert loaded == [["data:image/png;base64,iVBOR"] * 3, ["data:image/png;base64,iVBOR"]]
    shown = html.unescape(re.sub("<.*?>", "", page))
    assert NASTY in shown and "</td></script><scr" in shown and "&lt;b&gt;\n```\n# it\ufffd" in of_single


def report_of(sweep, **request):
    return Report(sweep, losses_of(sweep), Request(**request))


ANSWERS = {
    "No run of the baseline n_heads=4 has finished, so there is noth": {(4,): {0: "unfinished"}, (1,): {0: 3.0}},
    "There is one variant, n_heads=4: final validation loss 3.0000 ± 0.0000 nats per t": {(4,): {0: 3.0, 1: 3.0}},
    "n_heads=1: not compared, because fewer than two seeds are common to both": {(4,): {0: 3.0}, (1,): {0: 3.1}},
    "Against n_heads=4, n_heads=2: equal within the margin; n_heads=1: better by 2.0000 ± 0.0005 nats": {
        **dict.fromkeys([(4,), (2,)], {0: 3.0, 1: 3.1}),
        (1,): {0: 1.0, 1: 1.1001},
    },
}
WARNINGS = {
    "The finished runs differ in their text or tokenizer, so they are compared": {"data_fingerprint": "another"},
    "have different validation texts, of 768 and 1,0": {"data_fingerprint": "x", "val_bytes_per_token": 4.0},
    "The losses are those of 4 of 8 windows of the validation part": {"val_windows": {"scored": 4, "of": 8}},
    "": {},
}


def test_the_answer_is_one_sentence_and_what_makes_the_losses_doubtful_is_a_warning(tmp_path):
    for number, (expected, losses) in enumerate(ANSWERS.items()):
        assert expected in report_of(sweep_of(tmp_path / str(number), losses), margin=0.01).answer()
    for number, (warning, entries) in enumerate(WARNINGS.items(), start=len(ANSWERS)):
        both = entries if "val_windows" in entries else {}
        report = report_of(sweep_of(tmp_path / str(number), summary={(1,): entries, (4,): both}))
        text = report.text({}, law="", published=True)
        assert warning in text and ("**Warning.**" in text) == bool(warning)


def test_pictures_have_the_differences_and_the_curves(tmp_path, drawn):
    report = report_of(sweep_of(tmp_path))
    report.write(tmp_path, published=True)
    [each] = report.comparisons.values()
    [bar] = drawn["differences.png"].axes[0].containers
    assert bar.lines[0].get_xdata() == each.difference.mean
    ends = bar.lines[2][0].get_segments()[0]
    assert ends.tolist() == [pytest.approx([x, 0]) for x in (each.difference.low, each.difference.high)]
    above, below = drawn["curves.png"].axes
    lines = [line.get_xydata().tolist() for line in above.lines if len(line.get_xydata()) and line.get_ls() != "None"]
    assert lines[0] == [[1600, 4.1], [3200, 3.1 + 0.3], [4800, 3.1 - 0.01], [6400, 3.1]] and below.get_xlim()[0] == 3200
    assert [line[-1] for line in lines] == [[6400, loss] for seeds in HEADS.values() for loss in seeds.values()]
