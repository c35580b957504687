"""Settings of `+tune=lr`, and the trials that follow from them: equally many for each arm, by the same rule.

An arm is a variant of the grid: its values without the seed. A trial is a run of an arm with a multiplier of the
learning rates (`optim.lr_scale`) and a seed of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from omegaconf import DictConfig
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.scripts.cli.errors import UserError, user_errors

TUNE = "tune"  # key of the settings in sweep.json, and folder of the trials below that of the sweep
SCALE = "optim.lr_scale"
RATES = (SCALE, "optim.lr", "optim.muon_lr")  # not swept: the multiplier would undo the sweep
MIN_RATIO = 1.01  # of neighboring multipliers
DEFAULT = "use [0.5, 0.71, 1, 1.41, 2]"

Multiplier = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch.Generator


@dataclass(frozen=True, config=strict_settings("tune"))
class TuneConfig:
    """The budget of each arm.

    Attributes:
        multipliers: ascending, at least two.
        seeds: of the trials; each multiplier is tried with all of them.
        extend: while the best multiplier is an end of the range, one more step beyond it is tried, at most so often.
    """

    multipliers: Annotated[tuple[Multiplier, ...], Field(strict=False)]  # not strict: yaml has lists
    seeds: Annotated[tuple[Seed, ...], Field(strict=False)]
    extend: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _check(self) -> "TuneConfig":
        values = self.multipliers
        if len(values) < 2:
            raise ValueError(f"tune.multipliers={list(values)} must have at least two numbers; {DEFAULT}")
        if any(high / low < MIN_RATIO for low, high in zip(values, values[1:], strict=False)):
            raise ValueError(
                f"tune.multipliers={list(values)} must rise by at least 1 % from each to the next; {DEFAULT}"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"tune.seeds={list(self.seeds)} must have at least one seed and none twice; use [1000]")
        return self

    @property
    def n_trials(self) -> int:
        """Trials of an arm without extension of the range."""
        return len(self.multipliers) * len(self.seeds)

    def next_multiplier(self, losses: Mapping[float, float]) -> float | None:
        """The multiplier by which the range is extended; None if the best one is inside, or the budget is spent.

        Args:
            losses: of all multipliers tried so far; infinite if a trial failed or diverged.
        """
        best = best_multiplier(losses)
        if best is None or len(losses) - len(self.multipliers) >= self.extend or not at_edge(losses):
            return None
        ordered = sorted(losses)
        neighbor = ordered[1] if best == ordered[0] else ordered[-2]
        return float(f"{best * best / neighbor:.3g}")


def best_multiplier(losses: Mapping[float, float]) -> float | None:
    """The multiplier with the lowest loss, of equal ones the nearest to 1; None if all trials failed or diverged."""
    best = min(losses, key=lambda multiplier: (losses[multiplier], abs(math.log(multiplier))))
    return best if math.isfinite(losses[best]) else None


def at_edge(losses: Mapping[float, float]) -> bool:
    """Whether the best multiplier is an end of the range, so that a better one may be outside of it."""
    return best_multiplier(losses) in (min(losses), max(losses))


def read_tune(config: DictConfig) -> TuneConfig | None:
    """The settings of `+tune=lr`; None without it. Raises UserError for invalid ones."""
    if TUNE not in config:
        return None
    if not isinstance(config[TUNE], DictConfig):
        raise UserError(f"tune={config[TUNE]} is not a group of settings; write +tune=lr")
    with user_errors():
        return build(TuneConfig, config[TUNE], TUNE)


def without_tune(overrides: Sequence[str]) -> list[str]:
    """The overrides of a run or trial of its own: those that choose or set `tune` are left out."""
    return [text for text in overrides if key_of(text).partition(".")[0] != TUNE]


def trial_overrides(overrides: Sequence[str], multiplier: float, seed: int) -> list[str]:
    """The command line of a trial of the arm whose run has these overrides."""
    arm = [text for text in without_tune(overrides) if key_of(text) != "seed"]
    return [*arm, f"seed={seed}", scale_override(multiplier)]


def scale_override(multiplier: float) -> str:
    return f"{SCALE}={multiplier!r}"


def trial_name(multiplier: float, seed: int) -> str:
    """The folder of a trial in that of its arm."""
    return f"lr_scale={multiplier:.6g},seed={seed}"


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]
