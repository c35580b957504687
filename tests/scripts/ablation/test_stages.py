"""Levels of the stages of a sweep, and which seeds belong to which stage."""

import pytest

from tril.scripts.ablation.stages import FAMILY_ALPHA, stage_alpha, stages_of_sweep


def test_levels_of_all_stages_together_are_the_familys():
    assert [stage_alpha(stage) for stage in (1, 2, 3)] == pytest.approx([0.04, 0.005, 0.0025])
    total = sum(stage_alpha(stage) for stage in range(1, 60))
    assert total <= FAMILY_ALPHA == pytest.approx(total)


@pytest.mark.parametrize(
    "index, expected",
    [
        ({}, [[0, 1, 2, 3]]),
        ({"stages": [{"seeds": [0, 1, 2, 3], "date": "2026-11-22"}]}, [[0, 1, 2, 3]]),
        ({"stages": [{"seeds": [0, 1]}, {"seeds": [3, 2]}]}, [[0, 1], [2, 3]]),
        ({"stages": [{"seeds": [0]}, {"seeds": [3]}]}, [[0, 1, 2], [3]]),
        ({"stages": [{"seeds": [0, 1]}, {"seeds": [9]}, {"seeds": [2, 3]}]}, [[0, 1], [], [2, 3]]),
    ],
)
def test_seeds_of_each_stage(index, expected):
    assert stages_of_sweep(index, [3, 0, 1, 2]) == expected
