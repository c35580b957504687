"""When heads appear, from rows made by hand: the steps, what never appears, and the section of the report."""

import csv
import math

import numpy as np
import pytest

from tests.scripts.experiments.synthetic import write_sweep
from tril.model.heads.records import COPY_LOSSES, UNIFORM, read_records
from tril.model.heads.scores import SCORES
from tril.model.intervals import mean_interval
from tril.scripts.experiments.emergence import CONTEXT, KINDS, crossing, read_steps, steps_of
from tril.scripts.experiments.published import write_report
from tril.scripts.experiments.report import Request, read_report
from tril.scripts.experiments.sweep import read_sweep

STEPS = [0, 1, 2, 4, 8, 10]


def write_records(folder, induction=(0, 0, 0, 0.1, 0.5, 0.8), second=(7, 7, 7, 7, 5, 5)):
    """heads.csv of two heads: L0H0 attends to the previous token from step 2 on, and L0H1 has the induction scores."""
    previous, weak = (0.02, 0.02, 0.9, 0.7, 0.8, 0.8), [0.05] * 6
    with (folder / "heads.csv").open("w", newline="") as file:
        log = csv.DictWriter(file, ["step", "head", *SCORES, *COPY_LOSSES], restval=0.0)
        log.writeheader()
        for i, step in enumerate(STEPS):
            same = {"step": step, "first_copy_loss": 7, "second_copy_loss": second[i]}
            log.writerow(same | {"head": "L0H0", "previous": previous[i], "induction": 0.3 - 0.05 * i, "self": weak[i]})
            log.writerow(same | {"head": "L0H1", "induction": induction[i], "first": 0.3})
            log.writerow(same | {"head": UNIFORM, "previous": 0.02, "induction": 0.01, "first": 0.2, "self": 0.02})
    return folder


def test_the_steps_of_a_run(tmp_path):
    found = steps_of(read_records(write_records(tmp_path)))
    # 0.4 of 0.8: between 0.02 at 1 and 0.9 at 2; between 0.1 at 4 and 0.5 at 8. The drop is made between 4 and 8
    expected = {"previous": 1 + 0.38 / 0.88, "first": math.nan, "self": math.nan, "induction": 4 + 4 * 0.3 / 0.4}
    assert found == pytest.approx(expected | {CONTEXT: 6}, nan_ok=True)
    found = steps_of(read_records(write_records(tmp_path, [0.01] * 5 + [0.09], [6, 6, 6, 6, 6, 5.8])))
    assert math.isnan(found["induction"]) and math.isnan(found[CONTEXT])  # too weak; a drop of 0.2 alone
    assert crossing(np.array(STEPS), np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.9]), 0.45) == 0
    (tmp_path / "heads.csv").write_text("step,head\nx,L0H0\n")
    with pytest.raises(ValueError, match=r"heads.csv is damaged .*; restore it"):
        read_records(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """Four heads (the baseline): induction at 4 + seed. Two: 2 later, never in seed 2. One: without records."""
    sweep = write_sweep(tmp_path / "sweep", {(n,): {0: 3.0, 1: 3.1, 2: 3.2} for n in (4, 2, 1)})
    for run in read_sweep(sweep).runs:
        n_heads = run.settings["model.n_heads"]
        if n_heads == 1:
            continue
        later = {0: 0, 1: 0.1, 2: 0.2}[run.seed] + (0.0 if n_heads == 4 else 0.1)
        scores = (0, 0, 0, 0.4 - later, 0.8 - later, 0.8) if (n_heads, run.seed) != (2, 2) else [0.01] * 6
        write_records(run.folder, scores)
    return sweep


def test_the_section_of_the_report(folder, drawn):
    report = read_report(folder, Request())
    report.write(folder, published=True)
    steps, text = read_steps(report.sweep), (folder / "report.md").read_text()
    # the level 0.4 between 0.4 - d at 4 and 0.8 - d at 8: at 4 + 10 d
    assert steps["induction"].tolist() == [
        pytest.approx([4, 5, 6]),
        pytest.approx([5, 6, math.nan], nan_ok=True),
        [math.inf] * 3,
    ]
    half = mean_interval([4.0, 5.0, 6.0]).half_width
    [section] = [part for part in text.split("\n## ") if part.startswith("When heads appear")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| n"]
    columns = {kind: i for i, kind in enumerate((*KINDS, CONTEXT), 1)}
    induction = columns["induction"]
    assert [rows[0][i] for i in (0, induction, columns["self"], -1)] == [
        *("n_heads=4", f"5 ± {half:.0f} (3 of 3)", "never (0 of 3)", "3 of 3")
    ]
    assert rows[1][induction].endswith("(2 of 3)") and rows[1][-1] == "2 of 2" and rows[2][induction] == "-"
    assert rows[3][0] == "n_heads=2" and rows[3][induction].startswith("+1 ± 0, later")
    assert rows[4][induction] == rows[3][columns["self"]] == "-"
    rows = {row["folder"]: row for row in csv.DictReader((folder / "runs.csv").open())}
    cells = [[rows[run.folder.name]["step of induction"] for run in each.runs] for each in report.sweep.others]
    assert [float(cell or "nan") for cell in cells[0]] == pytest.approx([5, 6, math.nan], nan_ok=True)
    assert cells[1] == ["", "", ""]
    means = [line for line in drawn["appearance.png"].axes[0].lines if line.get_marker() == "|"]
    assert sorted(float(line.get_xdata()[0]) for line in means)[-2:] == pytest.approx([6, 6])


def test_a_published_report_has_the_section_again_and_a_sweep_without_records_has_none(folder, tmp_path, drawn):
    write_report(folder, dict.fromkeys(vars(Request())), None, str(tmp_path / "published"))
    text = (tmp_path / "published/report.md").read_text()
    write_report(tmp_path / "published", dict.fromkeys(vars(Request())), str(tmp_path / "again"), None)
    assert "## When heads appear" in text and (tmp_path / "again/report.md").read_text() == text
    for path in folder.rglob("heads.csv"):
        path.unlink()
    write_report(folder, dict.fromkeys(vars(Request())), None, None)
    assert "heads appear" not in (folder / "report.md").read_text() and not (folder / "appearance.png").exists()
