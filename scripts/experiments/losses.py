"""The losses of a sweep's runs as one array, and their comparison at the level of the sweep's last launch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tril.model.comparison import Comparison, compare
from tril.model.intervals import MIN_DOCUMENTS, Interval, block_starts
from tril.scripts.experiments.sweep import RUNNING, Run, Sweep

NATS, BITS = "nats per token", "bits per byte"
UNFINISHED = "unfinished"  # the verdict while runs are missing: a verdict now would be another look
WHOLE = None, np.ones(1), "the whole text"  # no losses of parts of the text, in the place of `document_sums`
FIRST_ALPHA, LATER_ALPHA = 0.04, 0.01  # levels of the first launch and of all later ones together, 0.05
SAME_BYTES = 1e-6  # relative: rounding of bytes per token


@dataclass(frozen=True)
class Losses:
    """The losses of V variants, the baseline first, with S seeds on G documents.

    Attributes:
        losses: (V, S, G) mean loss of each document; NaN where there is no finished run, inf where it diverged.
        sizes: (G,) targets of each document.
        unit: NATS, or BITS if text or tokenizer differ between runs, and the text is compared as a whole.
        documents: what is compared, such as "66 documents" or "the whole text".
    """

    losses: np.ndarray
    sizes: np.ndarray
    unit: str
    documents: str


def launch_alpha(launch: int) -> float:
    """The level of the comparisons after a launch, from 1: 0.04, then 0.005, 0.0025, ..., whose sum is below 0.05.

    Adding seeds until there is a verdict is repeated testing. With a level of its own for each launch that adds seeds
    or variants, any rule of adding them keeps the sum (alpha spending).
    """
    return FIRST_ALPHA if launch == 1 else LATER_ALPHA / 2 ** (launch - 1)


def launch_count(sweep: Sweep) -> int:
    return max(1, len(sweep.launches))


def compare_sweep(losses: Losses, sweep: Sweep, margin: float | None = None) -> dict[str, Comparison]:
    """Compares each other variant with the baseline: label -> comparison. While runs are missing, there is no verdict.

    Args:
        margin: nats per token, a difference below it counts as none; ignored for losses in bits per byte.

    Returns:
        {} without another variant, and for runs on different texts, whose losses nothing compares.
    """
    if not sweep.others or different_texts(sweep.runs):
        return {}
    margin = margin if losses.unit == NATS else None
    compared = compare(losses.losses, losses.sizes, launch_alpha(launch_count(sweep)), margin)
    if sweep.launches and any(run.state in RUNNING for run in sweep.runs):
        without = [replace(each.difference, low=None, high=None) for each in compared]
        compared = [Comparison(interval, UNFINISHED, interval.n) for interval in without]
    return {variant.label: each for variant, each in zip(sweep.others, compared, strict=True)}


def losses_of(sweep: Sweep) -> Losses:
    """The losses of the finished runs on documents that all of them have in common, else on the whole text."""
    variants = [sweep.baseline, *sweep.others]
    seeds = sorted({run.seed for run in sweep.runs})
    places = {(v, seeds.index(run.seed)): run for v, variant in enumerate(variants) for run in variant.finished}
    finite = {place: run for place, run in places.items() if not run.diverged}
    one_text = len({run.summary.get("data_fingerprint") for run in places.values()}) < 2
    windows = [run.windows for run in finite.values()]
    kept = [each for each in windows if each is not None]
    nll, sizes, kind = document_sums(kept) if one_text and len(kept) == len(windows) > 0 else WHOLE
    if nll is None:
        name = "final_val_loss" if one_text else "final_val_bpb"
        nll = np.array([[run.summary[name]] for run in finite.values()]).reshape(-1, 1)
    losses = np.full((len(variants), len(seeds), len(sizes)), math.nan)
    for place in places:
        losses[place] = math.inf
    for place, sums in zip(finite, nll, strict=True):
        losses[place] = sums / sizes
    documents = kind if kind == WHOLE[2] else f"{len(sizes)} {kind}"
    return Losses(losses, sizes.astype(float), NATS if one_text else BITS, documents)


def document_sums(windows: Sequence[dict[str, np.ndarray]]) -> tuple[np.ndarray | None, np.ndarray, str]:
    """Losses of R runs on their common documents, or on blocks of windows if there are few documents.

    Returns:
        Nats (R, G), targets (G,) above 0, and what the G are; WHOLE if the runs do not cover the same text.
    """
    sizes = [each.get("document_targets", np.zeros(0)) for each in windows]
    if np.count_nonzero(sizes[0]) >= MIN_DOCUMENTS and all(np.array_equal(each, sizes[0]) for each in sizes):
        kept = sizes[0] > 0
        nll = np.array([each["document_nll"][kept] for each in windows])
        return nll, sizes[0][kept], "documents"
    # windows of different lengths are merged into the shortest spans that consist of whole windows of all runs
    span = math.lcm(*(int(each["context_length"]) for each in windows))
    starts = [np.arange(0, len(each["nll"]), span // int(each["context_length"])) for each in windows]
    targets = [np.add.reduceat(each["targets"], at) for each, at in zip(windows, starts, strict=True)]
    if not all(np.array_equal(each, targets[0]) for each in targets):
        return WHOLE
    nll = [np.add.reduceat(each["nll"], at) for each, at in zip(windows, starts, strict=True)]
    blocks = block_starts(targets[0])
    return np.add.reduceat(nll, blocks, axis=1), np.add.reduceat(targets[0], blocks), "blocks of windows"


def different_texts(runs: Iterable[Run]) -> str | None:
    """The sizes of the validation texts of finished runs, if they differ: then no loss compares the runs.

    The bytes of a text are known from the tokens that a run scored and its bytes per token.
    """
    sizes = []
    for run in runs:
        windows, per_token = run.windows, run.summary.get("val_bytes_per_token")
        if windows is not None and per_token is not None:
            sizes.append(float(windows["targets"].sum()) * per_token)
    if not sizes or math.isclose(min(sizes), max(sizes), rel_tol=SAME_BYTES):
        return None
    return f"{min(sizes):,.0f} and {max(sizes):,.0f} bytes"


def spread(interval: Interval, sign: str = "") -> str:
    """2.8516 ± 0.0123; the mean alone without an interval."""
    if not math.isfinite(interval.mean):
        return "diverged" if interval.n else "-"
    half = "" if interval.low is None else f" ± {interval.half_width:.4f}"
    return f"{interval.mean:{sign}.4f}{half}"
