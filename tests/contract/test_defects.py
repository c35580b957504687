"""The contract catches every deliberate defect of `defects.txt`, which are edited into copies of the project."""

import pytest

from tests.contract.defects import ROOT, load, outcome

DEFECTS = load()


def test_there_are_forty_defects_and_their_lines_are_still_in_the_product():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 40
    for defect in DEFECTS:
        assert (ROOT / defect.file).read_text("utf-8").count(defect.old) == 1, f"{defect.name}: move the patch"
        assert defect.old != defect.new, defect.name


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_caught(defect):
    n_failed, _, printed = outcome(defect, [defect.test])
    assert n_failed, printed


@pytest.mark.slow
def test_a_copy_without_a_defect_passes():
    n_failed, _, printed = outcome(None, sorted({defect.test for defect in DEFECTS}))
    assert not n_failed, printed
