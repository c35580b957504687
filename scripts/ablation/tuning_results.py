"""The multipliers of the learning rates that were tried for each variant of a tuned sweep, and the chosen ones."""

import math
from dataclasses import dataclass

from tril.scripts.ablation.results import Sweep
from tril.scripts.ablation.tuning import read_chosen


@dataclass(frozen=True)
class Tuning:
    """The trials of a variant.

    Attributes:
        lr_scale: the chosen multiplier.
        losses: multiplier -> nats per token on the tuning text, ascending; infinite if a trial failed or diverged.
        at_edge: the chosen multiplier is the smallest or the largest one.
        trials: how many.
        failed: how many of them.
        seconds: of the finished trials together.
        training_flops: of the finished trials together.
    """

    lr_scale: float
    losses: dict[float, float]
    at_edge: bool
    trials: int
    failed: int
    seconds: float
    training_flops: float


def read_tuning(sweep: Sweep) -> dict[str, Tuning]:
    """Label -> trials of each variant whose multiplier is chosen; {} for a sweep that was not tuned."""
    found = {}
    for variant in sweep.variants:
        arm = next((str(run.planned["tuning"]) for run in variant.runs if "tuning" in run.planned), None)
        chosen = read_chosen(sweep.folder / arm) if arm is not None else None
        if chosen is None:
            continue
        try:
            losses = {float(scale): math.inf if loss is None else float(loss) for scale, loss in chosen["curve"]}
            found[variant.label] = Tuning(
                float(chosen["lr_scale"]),
                dict(sorted(losses.items())),
                bool(chosen["at_edge"]),
                int(chosen.get("trials", len(losses))),
                int(chosen.get("failed", 0)),
                float(chosen["seconds"]),
                float(chosen["training_flops"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{sweep.folder / str(arm)} has a damaged chosen.json ({error!r}); remove it, and start the sweep again"
            ) from error
    return found
