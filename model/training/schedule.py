"""Learning-rate schedules: a linear warm-up, then constant, linear, cosine or warmup-stable-decay (WSD).

A schedule is a pure function from step to a factor in [0, 1] that multiplies every group's learning rate, as in
LambdaLR.
"""

import math

from tril.model.training.settings import ScheduleConfig

SHORT_WARMUP = 10  # a warm-up that is longer than the run becomes one step in so many


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The factor on the learning rate for optimizer step `step` = 0 .. total_steps - 1.

    W is warmup_steps, or a tenth of the run if the run is shorter; m is min_lr_ratio. D is the step where the decay
    starts: W for "linear" and "cosine", total_steps - round(decay_fraction * total_steps) but not before W for "wsd".

        step < W              (step + 1) / (W + 1)                 not 0 at step 0; reaches 1 at step W
        W <= step <= D        1
        D <= step             m + (1 - m) * (1 - p)                "linear", "wsd";  p = (step - D) / (total_steps - D)
                              m + (1 - m) * (1 + cos(pi p)) / 2    "cosine"
        step >= total_steps   m, so the last step of the run is one step above the end point

    "cosine" is nanoGPT's schedule with total_steps = lr_decay_iters and m = min_lr / learning_rate.
    "wsd" is the trapezoid of Hägele et al., 2024, https://arxiv.org/abs/2405.18392.
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if warmup > total_steps:
        warmup = total_steps // SHORT_WARMUP
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.kind == "constant":
        return 1.0
    if step >= total_steps:
        return floor
    start = max(warmup, total_steps - round(config.decay_fraction * total_steps)) if config.kind == "wsd" else warmup
    progress = max(0, step - start) / max(1, total_steps - start)  # a wsd decay can round to zero steps
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.kind == "cosine" else 1 - progress
    return floor + (1 - floor) * remaining
