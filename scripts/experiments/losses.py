"""The losses of a sweep's runs as one array, and their comparison at the level of the sweep's last launch.

`report.py tune=KEY` chooses a value of a swept key for each variant, and compares the variants on other documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tril.data.settings import flatten
from tril.model.comparison import Comparison, compare
from tril.model.intervals import MIN_DOCUMENTS, block_starts
from tril.model.runs import SETTINGS, partial_validation, read_settings
from tril.scripts.experiments.sweep import RUNNING, Run, Sweep, text_of

NATS, BITS = "nats per token", "bits per byte"
UNFINISHED = "unfinished"  # while runs are missing: a verdict before all have ended would be an uncounted test
FIRST_ALPHA, LATER_ALPHA = 0.04, 0.01  # levels of the first launch and of all later ones together, 0.05
STRIDE = 4  # of so many documents, one chooses the value of a tuned setting, and the others are compared
SAME_BYTES = 1e-6  # relative: rounding of bytes per token
# Settings of the data that leave the validation text as it is; the tokenizer and the budget change the fingerprint.
OF_BATCHES = ("data.batch_size", "data.val_batch_size", "data.double_length_at", "data.document_mask", "data.cache_dir")
OF_TOKENS = ("data.tokenizer", "data.token_budget")


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


@dataclass(frozen=True)
class Losses:
    """The losses of V variants, the baseline first, with S seeds on G documents.

    Attributes:
        losses: (V, S, G) mean loss of each document; NaN where there is no finished run, inf where it diverged.
        sizes: (G,) targets of each document.
        unit: NATS, or BITS if the tokenizer differs between runs, and the text is compared as a whole.
        documents: what is compared, such as "66 documents" or "the whole text".
        comparable: all runs are validated on one text.
        paired: all runs have as many parameters: most of those of one seed begin with equal values.
        tuning: how the variants were chosen; None: they are those of the sweep.
    """

    losses: np.ndarray
    sizes: np.ndarray
    unit: str
    documents: str
    comparable: bool
    paired: bool
    tuning: Tuning | None = None

    @property
    def by_seed(self) -> np.ndarray:
        """(V, S): the mean loss of each run."""
        return self.losses @ self.sizes / self.sizes.sum()

    def of(self, variants: Sequence[int], documents: np.ndarray) -> "Losses":
        """The losses of some variants on some documents, a mask (G,)."""
        name = f"{documents.sum()} {self.documents.partition(' ')[2]}"
        losses, sizes = self.losses[variants][..., documents], self.sizes[documents]
        return replace(self, losses=losses, sizes=sizes, documents=name)

    @property
    def correlation(self) -> float | None:
        """The correlation over the seeds of two variants, in the mean over all pairs; None: fewer than three seeds."""
        rows = self.by_seed[:, np.isfinite(self.by_seed).all(0)]
        if rows.shape[1] < 3 or len(rows) < 2 or not rows.std(1).all():
            return None
        return float(np.corrcoef(rows)[np.triu_indices(len(rows), 1)].mean())


def launch_alpha(launch: int) -> float:
    """The level of the comparisons after a launch, from 1: 0.04, then 0.005, 0.0025, ..., whose sum is below 0.05.

    Adding seeds until there is a verdict is repeated testing. With a level of its own for each launch that adds seeds
    or variants, any rule of adding them keeps the sum (alpha spending).
    """
    return FIRST_ALPHA if launch == 1 else LATER_ALPHA / 2 ** (launch - 1)


def compare_sweep(losses: Losses, sweep: Sweep, margin: float | None = None) -> dict[str, Comparison]:
    """Compares each other variant with the baseline: label -> comparison. While runs are missing, there is no verdict.

    Args:
        margin: nats per token, a difference below it counts as none; ignored for losses in bits per byte.

    Returns:
        {} without another variant, and for runs on different texts, whose losses nothing compares.
    """
    if not sweep.others or not losses.comparable:
        return {}
    margin, alpha = margin if losses.unit == NATS else None, launch_alpha(sweep.launch)
    compared = compare(losses.losses, losses.sizes, alpha, margin, paired=losses.paired)
    if sweep.launches and any(run.state in RUNNING for run in sweep.runs):
        compared = [Comparison(replace(each.difference, low=None, high=None), UNFINISHED) for each in compared]
    return {variant.label: each for variant, each in zip(sweep.others, compared, strict=True)}


def losses_of(sweep: Sweep) -> Losses:
    """The losses of the finished runs on documents that all of them have in common, else on the whole text."""
    variants, seeds = [sweep.baseline, *sweep.others], sorted({run.seed for run in sweep.runs})
    places = {(v, seeds.index(run.seed)): run for v, variant in enumerate(variants) for run in variant.finished}
    finite = {place: run for place, run in places.items() if not run.diverged}
    is_prepared_once = len({run.summary.get("data_fingerprint") for run in places.values()}) < 2
    kept = [windows for run in finite.values() if (windows := run.windows) is not None]
    found = document_sums(kept) if is_prepared_once and len(kept) == len(finite) > 0 else None
    name = "final_val_loss" if is_prepared_once else "final_val_bpb"
    whole = np.reshape([run.summary[name] for run in finite.values()], (-1, 1)), np.ones(1), "the whole text"
    nll, sizes, documents = found or whole
    losses = np.full((len(variants), len(seeds), len(sizes)), math.nan)
    for place in places:
        losses[place] = math.inf
    for place, sums in zip(finite, nll, strict=True):
        losses[place] = sums / sizes
    paired = len({run.summary.get("parameters") for run in places.values()}) < 2
    unit = NATS if is_prepared_once else BITS
    return Losses(losses, sizes.astype(float), unit, documents, is_one_text([*places.values()]), paired)


def document_sums(windows: Sequence[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, str] | None:
    """Losses of R runs on their common documents, or on blocks of windows if there are few documents.

    Returns:
        Nats (R, G), targets (G,) above 0, and what the G are, such as "66 documents"; None if the runs do not cover
        the same text.
    """
    sizes = [each.get("document_targets", np.zeros(0)) for each in windows]
    if np.count_nonzero(sizes[0]) >= MIN_DOCUMENTS and all(np.array_equal(each, sizes[0]) for each in sizes):
        kept = sizes[0] > 0
        return np.array([each["document_nll"][kept] for each in windows]), sizes[0][kept], f"{kept.sum()} documents"
    # windows of different lengths are merged into the shortest spans that consist of whole windows of all runs
    span = math.lcm(*(int(each["context_length"]) for each in windows))
    starts = [np.arange(0, len(each["nll"]), span // int(each["context_length"])) for each in windows]
    targets = [np.add.reduceat(each["targets"], at) for each, at in zip(windows, starts, strict=True)]
    if not all(np.array_equal(each, targets[0]) for each in targets):
        return None
    nll = [np.add.reduceat(each["nll"], at) for each, at in zip(windows, starts, strict=True)]
    blocks = block_starts(targets[0])
    sums, sizes = np.add.reduceat(nll, blocks, axis=1), np.add.reduceat(targets[0], blocks)
    return sums, sizes, f"{len(sizes)} blocks of windows"


def is_one_text(finished: Sequence[Run]) -> bool:
    """Whether runs are validated on one text: their settings of the text are equal, apart from the tokenizer and the
    training tokens; equal settings give equal fingerprints; and the runs score the same part of it, with as many bytes.
    """
    parts = {partial_validation(run.summary.get("val_windows")) for run in finished if not run.diverged}
    folders = {run.summary.get("data_fingerprint"): run.folder for run in finished}
    every = [flatten(read_settings(folder / SETTINGS)) for folder in folders.values()]
    data = [{key: x for key, x in each.items() if key.startswith("data.") and key not in OF_BATCHES} for each in every]
    prepared = {text_of(each) for each in data}
    texts = {text_of({key: x for key, x in each.items() if not key.startswith(OF_TOKENS)}) for each in data}
    scored = [(run.windows, run.summary.get("val_bytes_per_token")) for run in finished]
    sizes = [float(windows["targets"].sum()) * each for windows, each in scored if windows is not None and each]
    is_as_long = not sizes or math.isclose(min(sizes), max(sizes), rel_tol=SAME_BYTES)
    return len(prepared) == len(folders) and len(texts) < 2 and len(parts) < 2 and is_as_long


def tuned(sweep: Sweep, losses: Losses, key: str) -> tuple[Sweep, Losses]:
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
    return kept, replace(losses.of(best, np.logical_not(chooses)), tuning=Tuning(key, found, ends))
