"""A setting that each variant of a sweep chooses: `report.py tune=KEY`, for a grid with that key as one of its own."""

from dataclasses import dataclass, replace

import numpy as np

from tril.scripts.experiments.losses import Losses
from tril.scripts.experiments.sweep import RUNNING, Sweep, text_of

STRIDE = 4  # of so many documents, one chooses, and the others are compared


@dataclass(frozen=True)
class Tuning:
    """The choice of each variant.

    Attributes:
        key: the setting.
        losses: label of a variant -> value of the setting -> nats per token on the documents that choose, infinite if
            a run diverged.
        ends: labels of the variants whose value is an end of the range.
    """

    key: str
    losses: dict[str, dict[str, float]]
    ends: list[str]


def tuned(sweep: Sweep, losses: Losses, key: str) -> tuple[Sweep, Losses, Tuning]:
    """Keeps one value of a swept key for each combination of the others: the one with the lowest loss.

    Every fourth document chooses, by the mean over the seeds that finished with all values. The losses that are
    returned are those of the other documents.

    Args:
        losses: of the sweep, see `losses_of`.

    Raises:
        ValueError: the key is not swept, runs are missing, or there are no losses of documents.
    """
    if key not in sweep.keys:
        raise ValueError(f"tune={key} is not swept; choose one of: {', '.join(sweep.keys)}")
    if left := sum(run.state in RUNNING for run in sweep.runs):
        raise ValueError(f"tune={key} chooses when all runs have ended, and {left} of {len(sweep.runs)} have not")
    if len(losses.sizes) < 2 or not losses.comparable:
        raise ValueError(f"tune={key} needs runs on one text, whose documents have losses of their own")
    variants, chooses = [sweep.baseline, *sweep.others], np.arange(len(losses.sizes)) % STRIDE == 0
    by_seed = losses.of(range(len(variants)), chooses).by_seed
    groups: dict[str, list[int]] = {}  # the baseline's is the first
    for i, variant in enumerate(variants):
        groups.setdefault(text_of({**variant.values, key: None}), []).append(i)
    best, found, ends = [], {}, []
    for members in groups.values():
        members = [i for i in members if not np.isnan(by_seed[i]).all()]
        common = ~np.isnan(by_seed[members]).any(0)
        if not members or not common.any():
            raise ValueError(f"tune={key}: a variant has no seed that finished with all values")
        means, values = by_seed[members][:, common].mean(1), [variants[i].values[key] for i in members]
        chosen = int(means.argmin())
        best.append(members[chosen])
        label = variants[members[chosen]].label
        found[label] = dict(zip(map(text_of, values), means.tolist(), strict=True))
        numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) == len(values) and values[chosen] in (min(numbers), max(numbers)):
            ends.append(label)
    kept = replace(sweep, variants=tuple(variants[i] for i in best), baseline=variants[best[0]])
    return kept, losses.of(best, np.logical_not(chooses)), Tuning(key, found, ends)
