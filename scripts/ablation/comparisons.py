"""Compares the variants of a sweep with its baseline, paired by seed and by cluster of the validation text."""

from collections.abc import Sequence
from dataclasses import replace

from tril.model.intervals import Interval
from tril.scripts.ablation.comparable_losses import NATS, ComparableLosses, comparable_losses
from tril.scripts.ablation.results import Sweep, Variant
from tril.scripts.ablation.stages import stage_alpha, stages_of_sweep
from tril.scripts.ablation.statistics import EQUAL, Arm, Comparison, compare_arms, with_proposal

RUNNING = ("unfinished", "not started")
FOUND = ("better", "worse", EQUAL)


def compare_with_baseline(sweep: Sweep, which: str = "final", margin: float | None = None) -> dict[str, Comparison]:
    """Compares the finished runs of each other variant with those of the baseline; all comparisons form one family.

    The clusters of the text are its documents. If the losses of documents were not kept, or there are few documents,
    they are blocks of windows; windows of different lengths are merged into the shortest spans that consist of whole
    windows of all runs. If text or tokenizer differ, or the losses of windows were not kept, the bits per byte of the
    whole text are paired by seed alone, and the remark says so.

    Each stage of the sweep is tested at its own level (see `stages`). A stage with runs that are not finished gives no
    verdict; the remark then has that of the last stage that is complete.

    Args:
        sweep: with at least one variant.
        which: "final" or "best" validation.
        margin: nats per token; a difference below it counts as none. None: no verdict "equal within the margin".

    Returns:
        Label -> comparison.
    """
    others = [variant for variant in sweep.variants if variant is not sweep.baseline]
    if not others:
        return {}
    stages = stages_of_sweep(sweep.index, [run.seed for run in sweep.runs])
    families = comparable_losses(sweep, which)
    looks = [_look(families, stages[: stage + 1], len(others), margin) for stage in range(len(stages))]
    complete = _complete_stages(sweep, stages)
    found = {}
    for variant in others:
        of_stages = [look[variant.label] for look in looks]
        reason = next((family.reasons.get(variant.label) for family in families if family.reasons), None)
        comparison = _current(of_stages, complete, sweep)
        remarks = [_stage_remark(each, stages) for each in of_stages[:complete] if _is_news(each, comparison)]
        remarks += [f"Compared as a whole, by seed alone: {reason}."] if reason else []
        remarks += _left_out(variant, sweep.baseline)
        found[variant.label] = replace(comparison, remark=" ".join(filter(None, [comparison.remark, *remarks])))
    return found


def _look(
    families: Sequence[ComparableLosses], stages: Sequence[Sequence[int]], n_comparisons: int, margin: float | None
) -> dict[str, Comparison]:
    """The comparisons with the seeds of these stages, at the level of the last one."""
    seeds, found = {seed for stage in stages for seed in stage}, {}

    def restricted(arm: Arm) -> Arm:
        return {seed: losses for seed, losses in arm.items() if seed in seeds}

    for family in families:
        comparisons = compare_arms(
            {label: restricted(arm) for label, arm in family.arms.items()},
            restricted(family.baseline),
            family.targets,
            alpha=stage_alpha(len(stages)),
            n_comparisons=n_comparisons,
            margin=margin if family.unit == NATS else None,
        )
        clusters = {"clusters": family.clusters} | ({} if family.clusters else {"n_clusters": 0})
        for label in family.compared:
            found[label] = replace(comparisons[label], unit=family.unit, stage=len(stages), **clusters)
    return found


def _complete_stages(sweep: Sweep, stages: Sequence[Sequence[int]]) -> int:
    """How many of the first stages have no run that is still to finish; all of them without a sweep.json."""
    running = {run.seed for run in sweep.runs if run.state in RUNNING} if sweep.index else set()
    return next((number for number, seeds in enumerate(stages) if running & set(seeds)), len(stages))


def _current(of_stages: Sequence[Comparison], complete: int, sweep: Sweep) -> Comparison:
    """The comparison of the current stage: without interval and verdict while it has unfinished runs."""
    last = of_stages[-1]
    if complete == len(of_stages):
        return with_proposal(last, next_alpha=stage_alpha(last.stage + 1))
    if last.noise is None:
        return last
    left = sum(run.state in RUNNING for run in sweep.runs)
    remark = f"Preliminary: {left} of {len(sweep.runs)} runs of the sweep have not finished."
    without = replace(last.difference, low=None, high=None)
    return replace(last, difference=without, p=None, p_equal=None, verdict="preliminary", remark=remark)


def _is_news(earlier: Comparison, current: Comparison) -> bool:
    """Whether the remark on the current stage should mention the verdict of an earlier one."""
    if current.verdict == "preliminary":
        return earlier.noise is not None
    return earlier.stage < current.stage and earlier.verdict in FOUND and earlier.verdict != current.verdict


def _stage_remark(found: Comparison, stages: Sequence[Sequence[int]]) -> str:
    interval: Interval = found.difference
    seeds = ", ".join(str(seed) for stage in stages[: found.stage] for seed in stage)
    assert interval.high is not None
    return (
        f"Stage {found.stage} (seed {seeds}; level {found.alpha}): {found.verdict}, "
        f"{interval.mean:+.4f} ± {interval.high - interval.mean:.4f}."
    )


def _left_out(variant: Variant, baseline: Variant) -> list[str]:
    planned, finished = (
        [{run.seed for run in runs} for runs in pair]
        for pair in ((variant.runs, baseline.runs), (variant.finished, baseline.finished))
    )
    seeds = sorted(set.union(*planned) - set.intersection(*finished))
    return [f"Left out, because not finished in both: seed {', '.join(map(str, seeds))}."] if seeds else []
