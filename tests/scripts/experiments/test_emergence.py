"""The steps at which heads appear: the example of docs/emergence.md, on heads.csv files made by hand."""

import csv

import pytest

from tests.documented import ROOT, blocks
from tril.model.heads.records import COPY_LOSSES, UNIFORM
from tril.model.heads.scores import SCORES

STEPS = [0, 1, 2, 4, 8, 10]


def write_heads(folder, induction, second):
    """Of two heads: L0H0 attends to the previous token from step 2 on, and L0H1 has the induction scores."""
    previous, weak = (0.02, 0.02, 0.9, 0.7, 0.8, 0.8), [0.05] * 6
    folder.mkdir(parents=True)
    with (folder / "heads.csv").open("w", newline="") as file:
        log = csv.DictWriter(file, ["step", "head", *SCORES, *COPY_LOSSES], restval=0.0)
        log.writeheader()
        for i, step in enumerate(STEPS):
            same = {"step": step, "first_copy_loss": 7, "second_copy_loss": second[i]}
            log.writerow(same | {"head": "L0H0", "previous": previous[i], "induction": 0.3 - 0.05 * i, "self": weak[i]})
            log.writerow(same | {"head": "L0H1", "induction": induction[i], "first": 0.3})
            log.writerow(same | {"head": UNIFORM, "previous": 0.02, "induction": 0.01, "first": 0.2, "self": 0.02})


def test_the_steps_of_two_runs(tmp_path, monkeypatch):
    write_heads(tmp_path / "multirun/a/a,seed=0", (0, 0, 0, 0.1, 0.5, 0.8), (7, 7, 7, 7, 5, 5))
    write_heads(tmp_path / "multirun/a/a,seed=1", (0.01,) * 5 + (0.09,), (6, 6, 6, 6, 6, 5.8))
    monkeypatch.chdir(tmp_path)
    [example] = blocks(ROOT / "docs/emergence.md", "python")
    exec(example, names := {})
    steps = names["steps"]
    # 0.4 of 0.8: between 0.02 at 1 and 0.9 at 2; between 0.1 at 4 and 0.5 at 8. The drop happens between 4 and 8
    first, second = steps.loc["a,seed=0"].dropna(), steps.loc["a,seed=1"].dropna()
    assert first.to_dict() == pytest.approx(
        {"previous": 1 + 0.38 / 0.88, "induction": 4 + 4 * 0.3 / 0.4, "in-context loss": 6}
    )
    assert second.to_dict() == pytest.approx({"previous": 1 + 0.38 / 0.88})  # too weak; a drop of 0.2 alone
