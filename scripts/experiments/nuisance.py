"""Settings that are tuned for each variant of a sweep, and the values that were tried and chosen."""

import math
from dataclasses import dataclass

from tril.scripts.experiments.sweep import Sweep, read_json

CHOSEN = "chosen.json"  # in the folder of a variant's trials


@dataclass(frozen=True)
class Tuning:
    """The trials of a variant.

    Attributes:
        chosen: the value with the lowest loss.
        losses: value -> nats per token on the tuning text, ascending; infinite if a trial failed or diverged.
    """

    chosen: str
    losses: dict[str, float]

    @property
    def at_edge(self) -> bool:
        return self.chosen in (list(self.losses)[0], list(self.losses)[-1])


def read_tuning(sweep: Sweep) -> dict[str, Tuning]:
    """Label -> trials of each variant whose value is chosen; {} for a sweep that was not tuned."""
    found = {}
    for variant in sweep.variants:
        trials = next((str(run.planned["tuning"]) for run in variant.runs if "tuning" in run.planned), None)
        if trials is not None and (path := sweep.folder / trials / CHOSEN).is_file():
            chosen = read_json(path)
            losses = {float(value): math.inf if loss is None else float(loss) for value, loss in chosen["curve"]}
            ordered = {f"{value:g}": losses[value] for value in sorted(losses)}
            found[variant.label] = Tuning(f"{chosen['lr_scale']:g}", ordered)
    return found
