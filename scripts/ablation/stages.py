"""The stages of a sweep: each launch that adds seeds is another look at the results, tested at a level of its own.

Adding seeds until there is a verdict is repeated testing: tested at 5 % each time, some variant is falsely called
better or worse in more than 5 % of sweeps. The levels of all stages together are at most FAMILY_ALPHA (alpha spending),
so that any rule of adding seeds, also one that looks at the results, keeps it.
"""

from collections.abc import Mapping, Sequence

FAMILY_ALPHA = 0.05
FIRST_ALPHA = 0.04  # most sweeps have one stage
LATER_ALPHA = 0.01  # of all later stages together


def stage_alpha(stage: int) -> float:
    """The level of the comparisons of a stage, from 1: 0.04, then 0.005, 0.0025, ..., whose sum is below 0.05."""
    assert stage >= 1
    return FIRST_ALPHA if stage == 1 else LATER_ALPHA / 2 ** (stage - 1)


def stages_of_sweep(index: Mapping[str, object], seeds: Sequence[int]) -> list[list[int]]:
    """The seeds that each stage added.

    Args:
        index: the content of sweep.json; {} without one.
        seeds: all seeds of the sweep. Those that belong to no stage, as in a sweep of an older version, belong to the
            first.

    Returns:
        At least one stage; stages that added none of `seeds` are kept, because they were looks as well.
    """
    recorded = index.get("stages") or [{"seeds": []}]
    stages = [sorted(set(stage["seeds"]) & set(seeds)) for stage in recorded]  # pyright: ignore[reportGeneralTypeIssues]
    known = {seed for stage in stages for seed in stage}
    return [sorted({*stages[0], *(set(seeds) - known)}), *stages[1:]]
