"""What a planned sweep will be able to detect, from the noise of an earlier one."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tril.model.runs import SWEEP, state_of
from tril.scripts.ablation.comparable_losses import NATS, ComparableLosses, comparable_losses
from tril.scripts.ablation.detection import POWER, Design, smallest_detectable
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.stages import stage_alpha
from tril.scripts.ablation.statistics import differences
from tril.scripts.ablation.sweep_files import read_json
from tril.scripts.ablation.variances import SeedVariance, text_variance


@dataclass(frozen=True)
class EarlierNoise:
    """Noise of a finished sweep, in nats per token.

    Attributes:
        folder: of the sweep.
        seed_sd: standard deviation between seeds of a run's loss, beyond what the seed changes for all variants alike.
        seed_df: degrees of freedom of its square.
        text_se: contribution of the choice of the text to the standard error of a difference; the median over its
            comparisons.
        text_df: degrees of freedom of its square.
    """

    folder: Path
    seed_sd: float
    seed_df: float
    text_se: float
    text_df: float


def earlier_noise(root: Path) -> EarlierNoise | None:
    """The noise of the newest sweep below root/*/* whose runs are finished, with two seeds or more of each variant."""
    files = sorted(Path(root).glob(f"*/*/{SWEEP}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((noise for file in files if (noise := _noise_of(file.parent)) is not None), None)


def _noise_of(folder: Path) -> EarlierNoise | None:
    """None if the sweep is not finished, cannot be read or has no variance between seeds."""
    try:
        entries = read_json(folder / SWEEP)["cells"]
        if any(state_of(folder / entry["folder"]) != "finished" for entry in entries):
            return None
        sweep = read_sweep(folder)
        if min(len(variant.finished) for variant in sweep.variants) < 2:
            return None
        families = [family for family in comparable_losses(sweep, "final") if family.unit == NATS]
    except (OSError, ValueError, KeyError, TypeError):  # an earlier sweep is only a source of information
        return None
    return next((noise for family in families if (noise := _noise_of_family(folder, family)) is not None), None)


def _noise_of_family(folder: Path, family: ComparableLosses) -> EarlierNoise | None:
    arms, share = {**family.arms, "": family.baseline}, family.targets / family.targets.sum()
    means = {name: {seed: float(losses @ share) for seed, losses in arm.items()} for name, arm in arms.items()}
    if not np.isfinite([loss for runs in means.values() for loss in runs.values()]).all():
        return None
    between = SeedVariance.of(means)
    if not between.pooled > 0:
        return None
    text = [text_variance(differences(arm, family.baseline)[1], family.targets) for arm in family.arms.values()]
    variance, df = (statistics.median(values) for values in zip(*text, strict=True))
    return EarlierNoise(folder, math.sqrt(between.pooled), between.df, math.sqrt(variance), df)


def detectable_difference(arms: int, seeds: int, noise: EarlierNoise | None, stage: int = 1) -> float:
    """The difference from the baseline that a sweep finds with probability POWER at the level of a stage.

    Args:
        arms: variants with the baseline.
        seeds: of each variant.
        noise: None: the difference is in standard deviations between seeds, for a text that adds no variance.
    """
    variance, text, text_df = (
        (1.0, 0.0, math.inf) if noise is None else (noise.seed_sd**2, noise.text_se**2, noise.text_df)
    )
    return smallest_detectable(Design(seeds, arms - 1, arms - 1, 2 * variance, text, text_df), stage_alpha(stage))


def detectable_line(arms: int, seeds: int, folder: Path, stage: int = 1) -> str:
    """One line for the plan of a sweep: the smallest difference from the baseline that it can be expected to find.

    Args:
        arms: variants with the baseline.
        seeds: of each variant.
        folder: of all sweeps, such as multirun.
        stage: whose level the sweep will be tested at.
    """
    if arms < 2:
        return "one variant: there is nothing to compare"
    if seeds < 2:
        return "one seed: no difference can be told from chance; add seed=0,1,2"
    noise = earlier_noise(folder)
    difference = detectable_difference(arms, seeds, noise, stage)
    found = f"{arms} variants with {seeds} seeds find a difference from the baseline of"
    if noise is None:
        return (
            f"{found} {difference:.1f} standard deviations between seeds in {POWER:.0%} of sweeps "
            f"(no finished sweep below {folder} says how much that is)"
        )
    source = f"{noise.seed_sd:.2g} between seeds, {noise.text_se:.2g} from the text, as in {noise.folder}"
    return f"{found} {difference:.2g} nats per token in {POWER:.0%} of sweeps (standard deviation {source})"
