"""When heads appear, from rows made by hand. `test_published` has the section of a report."""

import csv
import math

import pytest

from tril.model.heads.records import COPY_LOSSES, UNIFORM, read_records
from tril.model.heads.scores import SCORES
from tril.scripts.experiments.emergence import CONTEXT, steps_of

STEPS = [0, 1, 2, 4, 8, 10]


def steps_from(folder, induction=(0, 0, 0, 0.1, 0.5, 0.8), second=(7, 7, 7, 7, 5, 5)):
    """Of two heads: L0H0 attends to the previous token from step 2 on, and L0H1 has the induction scores."""
    previous, weak = (0.02, 0.02, 0.9, 0.7, 0.8, 0.8), [0.05] * 6
    with (folder / "heads.csv").open("w", newline="") as file:
        log = csv.DictWriter(file, ["step", "head", *SCORES, *COPY_LOSSES], restval=0.0)
        log.writeheader()
        for i, step in enumerate(STEPS):
            same = {"step": step, "first_copy_loss": 7, "second_copy_loss": second[i]}
            log.writerow(same | {"head": "L0H0", "previous": previous[i], "induction": 0.3 - 0.05 * i, "self": weak[i]})
            log.writerow(same | {"head": "L0H1", "induction": induction[i], "first": 0.3})
            log.writerow(same | {"head": UNIFORM, "previous": 0.02, "induction": 0.01, "first": 0.2, "self": 0.02})
    return steps_of(read_records(folder))


def test_the_steps_of_a_run(tmp_path):
    # 0.4 of 0.8: between 0.02 at 1 and 0.9 at 2; between 0.1 at 4 and 0.5 at 8. The drop is made between 4 and 8
    expected = {"previous": 1 + 0.38 / 0.88, "first": math.nan, "self": math.nan, "induction": 4 + 4 * 0.3 / 0.4}
    assert steps_from(tmp_path) == pytest.approx(expected | {CONTEXT: 6}, nan_ok=True)
    found = steps_from(tmp_path, [0.01] * 5 + [0.09], [6, 6, 6, 6, 6, 5.8])
    assert math.isnan(found["induction"]) and math.isnan(found[CONTEXT])  # too weak; a drop of 0.2 alone
    assert steps_from(tmp_path, [0.5, 0.1, 0.1, 0.1, 0.1, 0.9])["induction"] == 0
