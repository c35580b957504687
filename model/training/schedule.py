"""Learning-rate schedules: a short linear warm-up, then constant, linear, cosine or warmup-stable-decay (WSD).

A schedule is a pure function from step to a factor in [0, 1] that multiplies every group's learning rate, so it fits LambdaLR as is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

SCHEDULES = ("linear", "cosine", "wsd", "constant")


def is_number(value: object) -> bool:
    """A finite int or float; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_legal(config: object, prefix: str, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raises one ValueError that lists every field of `config` whose rule (is legal, what is legal) fails."""
    wrong = [
        f"{prefix}.{name}={getattr(config, name)!r} (legal: {legal})" for name, (ok, legal) in rules.items() if not ok
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class ScheduleConfig:
    """The shape of the learning rate over a run.

    kind: what follows the warm-up (SCHEDULES).
    warmup_steps: optimizer steps of linear warm-up.
    decay_fraction: "wsd" only: the share of all steps, at the end, over which the rate falls linearly.
    min_lr_ratio: the factor at the end of the decay; "constant" has no decay and does not use it.

    Raises ValueError naming every illegal value at once.
    """

    kind: str = "wsd"
    warmup_steps: int = 20
    decay_fraction: float = 0.7
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        require_legal(
            self,
            "optim.schedule",
            {
                "kind": (self.kind in SCHEDULES, ", ".join(SCHEDULES)),
                "warmup_steps": (is_whole(self.warmup_steps) and self.warmup_steps >= 0, "a whole number >= 0"),
                "decay_fraction": (is_number(self.decay_fraction) and 0 < self.decay_fraction <= 1, "above 0, up to 1"),
                "min_lr_ratio": (is_number(self.min_lr_ratio) and 0 <= self.min_lr_ratio <= 1, "0 to 1"),
            },
        )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The factor on the learning rate for optimizer step `step` = 0 .. total_steps - 1 of a run of `total_steps`.

    With W = warmup_steps, m = min_lr_ratio and D = the step where the decay starts (W for "linear" and "cosine",
    total_steps - round(decay_fraction * total_steps), but not before W, for "wsd"):

        step < W              (step + 1) / (W + 1)                 step 0 already learns; the factor is 1 first at step W
        W <= step <= D        1
        D <= step             m + (1 - m) * (1 - p)                "linear", "wsd";  p = (step - D) / (total_steps - D)
                              m + (1 - m) * (1 + cos(pi p)) / 2    "cosine"
        step >= total_steps   m, so that the last step taken still lies one step above the end point

    "cosine" is nanoGPT's schedule with total_steps = lr_decay_iters and m = min_lr / learning_rate.
    "wsd" is the trapezoid of Hägele et al., 2024, https://arxiv.org/abs/2405.18392.

    Raises ValueError if the warm-up is longer than the run.
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if warmup > total_steps:
        raise ValueError(
            f"optim.schedule.warmup_steps={warmup} is longer than the run of {total_steps} steps; "
            f"set it to at most {total_steps} or train longer"
        )
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.kind == "constant":
        return 1.0
    if step >= total_steps:
        return floor
    start = max(warmup, total_steps - round(config.decay_fraction * total_steps)) if config.kind == "wsd" else warmup
    progress = max(0, step - start) / max(1, total_steps - start)  # a wsd decay may round to no step at all
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.kind == "cosine" else 1 - progress
    return floor + (1 - floor) * remaining
