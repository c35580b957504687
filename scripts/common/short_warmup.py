"""The warm-up of a run that is shorter than the warm-up of its recipe."""

import copy
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from tril.scripts.common.cli import task_overrides

KEY = "optim.schedule.warmup_steps"
SHARE = 10  # the warm-up becomes one step in so many


def with_short_warmup(cfg: DictConfig, overrides: Sequence[str] | None = None) -> tuple[DictConfig, str]:
    """The settings with a warm-up of a tenth of the run if that of the recipe is longer than the run.

    A warm-up that is typed is kept: `check_config` refuses one that is too long.

    Args:
        overrides: key=value each; None: those of the command line.

    Returns:
        The settings, and what has changed, in words; "" if nothing has.
    """
    overrides = task_overrides() if overrides is None else overrides
    if any(override.partition("=")[0].lstrip("+~") == KEY for override in overrides):
        return cfg, ""
    steps, before = (OmegaConf.select(cfg, key) for key in ("trainer.max_steps", KEY))
    if type(steps) is not int or type(before) is not int or not 0 < steps < before:  # check_config refuses other types
        return cfg, ""
    cfg, after = copy.deepcopy(cfg), steps // SHARE
    cfg.optim.schedule.warmup_steps = after
    return cfg, f"{KEY}={before} is longer than the run of {steps} steps, so it is {after}"
