"""The contract catches every deliberate defect of `defects.txt`, which are edited into copies of the project."""

import pytest

from tests.contract.defects import edited, fails, load
from tests.contract.harness import ROOT

DEFECTS = load()


def test_there_are_52_defects_and_their_lines_are_still_in_the_product():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 52
    assert all(edited(defect, ROOT) for defect in DEFECTS)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [*DEFECTS, None], ids=lambda defect: defect.name if defect else "none")
def test_a_defect_is_caught_and_a_copy_without_one_passes(defect):
    one_of_each_file = {each.test.partition("::")[0]: each.test for each in DEFECTS}
    assert fails({defect.test} if defect else {*one_of_each_file.values()}, defect) is (defect is not None)
