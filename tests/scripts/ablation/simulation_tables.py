"""Prints the tables of simulated sweeps in docs/ablations.md, of an earlier version and of this one:

    python -m tests.scripts.ablation.simulation_tables FILE SWEEPS

FILE is scripts/ablation/statistics.py of commit 448c4ed (`git show 448c4ed:scripts/ablation/statistics.py > FILE`). It
tested every report at 5 %, with Bonferroni's correction, separate variances and 20 blocks of windows as clusters.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tests.scripts.ablation.simulated_sweeps import (
    DOCUMENTS,
    SEED_SD,
    Method,
    Text,
    Truth,
    follow_proposals,
    load_before,
    now,
    plain,
    simulate,
)
from tril.model.intervals import clustered_mean, t_quantile
from tril.scripts.ablation.power import detectable_difference
from tril.scripts.ablation.stages import FIRST_ALPHA


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def text(n_windows: int | None, document_sd: float, n_arms: int = 2) -> Truth:
    """Arms that differ from document to document by document_sd, on the standard library's validation text."""
    pieces = Text.of(DOCUMENTS, n_windows)
    return Truth(np.zeros(n_arms), np.full(n_arms, SEED_SD), text=pieces, document_sd=document_sd)


ERRORS = [
    ("6 arms, equal variances", plain(6), 2),
    ("6 arms, equal variances", plain(6), 3),
    ("6 arms, equal variances", plain(6), 5),
    ("3 arms, equal variances", plain(3), 3),
    ("6 arms, heavy tails (t, 3 degrees of freedom)", plain(6, t_df=3), 3),
    ("6 arms, the baseline varies twice as much", plain(6, wide=0, ratio=2), 3),
    ("6 arms, the baseline varies three times as much", plain(6, wide=0, ratio=3), 3),
    ("6 arms, the baseline varies three times as much", plain(6, wide=0, ratio=3), 5),
    ("6 arms, another arm varies three times as much", plain(6, wide=1, ratio=3), 3),
    ("6 arms differ by document, 96 windows", text(96, 0.03, 6), 3),
    ("6 arms differ by document, all windows", text(None, 0.03, 6), 3),
]
COVERAGES = [(n_windows, sd, n_seeds) for n_windows in (96, None) for sd in (0.0, 0.03, 0.1) for n_seeds in (3, 8)]


def errors(before: Method, n: int) -> Iterator[list[str]]:
    for name, truth, n_seeds in ERRORS:
        old, new = (simulate(truth, n_seeds, n, method) for method in (before, now))
        rates = [old.family_error(0.05), new.family_error(0.05), new.family_error(FIRST_ALPHA)]
        yield [name, str(n_seeds), *map(percent, rates)]


def coverages(before: Method, n: int) -> Iterator[list[str]]:
    for n_windows, document_sd, n_seeds in COVERAGES:
        truth = text(n_windows, document_sd)
        rates = [simulate(truth, n_seeds, n, method).coverage for method in (before, now)]
        yield [f"{n_windows or 'all'}", f"{document_sd:g}", str(n_seeds), *map(percent, rates)]


def powers(before: Method, n: int) -> Iterator[list[str]]:
    for n_arms in (3, 6):
        for n_seeds in (2, 3, 5):
            for difference in (2, 3, 4):
                truth = plain(n_arms, difference * SEED_SD)
                old, new = (simulate(truth, n_seeds, n, method) for method in (before, now))
                rates = [old.found(0.05), new.found(0.05), new.found(FIRST_ALPHA)]
                yield [str(n_arms), str(n_seeds), str(difference), *map(percent, rates)]


def sequences(before: Method, n: int) -> Iterator[list[str]]:
    for n_arms in (3, 6):
        for difference in (0, 1.5, 2.5):
            truth = plain(n_arms, difference * SEED_SD)
            for name, method in (("before", before), ("now", None)):
                wrong, found, seeds = follow_proposals(truth, method, n)
                right = percent(found) if difference else "-"
                yield [str(n_arms), f"{difference:g}", name, percent(wrong), right, f"{seeds:.1f}"]


def equalities(n: int) -> Iterator[list[str]]:
    margin = 4 * SEED_SD
    method = functools.partial(now, alpha=FIRST_ALPHA, margin=margin)
    for n_arms in (2, 6):
        for n_seeds in (3, 5, 8):
            same, at_margin = plain(n_arms), plain(n_arms, margin)
            at_margin = replace(at_margin, effects=np.r_[0.0, np.full(n_arms - 1, margin)])  # every call is an error
            called = [simulate(truth, n_seeds, n, method).equal for truth in (at_margin, same)]
            rates = percent(called[0].any(1).mean()), percent(called[1].mean())
            yield [str(n_arms), str(n_seeds), *rates]


def detectables(n: int) -> Iterator[list[str]]:
    for n_arms, n_seeds in ((2, 3), (3, 2), (3, 3), (6, 2), (6, 3), (6, 5)):
        difference = detectable_difference(n_arms, n_seeds, None)
        found = simulate(plain(n_arms, difference * SEED_SD), n_seeds, n).found(FIRST_ALPHA)
        yield [str(n_arms), str(n_seeds), f"{difference:.1f}", percent(found)]


def clustered_means(n: int) -> Iterator[list[str]]:
    """Means over documents, whose targets are all equal or all independent, without any seeds."""
    for n_windows in (96, None):
        sizes = np.bincount(Text.of(DOCUMENTS, n_windows).document, Text.of(DOCUMENTS, n_windows).tokens)
        for name, scale in (("equal", sizes), ("independent", np.sqrt(sizes))):
            sums = scale * np.random.default_rng(0).normal(size=(n, len(sizes)))
            found = [clustered_mean(row, sizes) for row in sums]
            residuals = sums - sums.sum(1, keepdims=True) * sizes / sizes.sum()  # (n, G)
            plain_se = np.sqrt((residuals**2).sum(1) * len(sizes) / (len(sizes) - 1)) / sizes.sum()
            means, half = sums.sum(1) / sizes.sum(), t_quantile(len(sizes) - 1, 0.05) * plain_se
            rates = (
                np.mean(abs(means) <= half),
                np.mean([each.interval().low <= 0 <= each.interval().high for each in found]),
            )
            worth = f"{len(sizes)}, worth {found[0].effective:.1f}", f"{found[0].df:.1f}"
            yield [str(n_windows or "all"), *worth, name, *map(percent, rates)]


def show(title: str, header: Sequence[str], rows: Iterator[list[str]]) -> None:
    print(f"\n{title}\n")
    for row in (header, ["---"] * len(header)):
        print("| " + " | ".join(row) + " |", flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main(path: str, n: int) -> None:
    before, rates = load_before(path), ["before, 5 %", "now, 5 %", f"now, {FIRST_ALPHA:.0%} (stage 1)"]
    show("Falsely called better or worse, % of sweeps", ["sweep", "seeds", *rates], errors(before, n))
    show("Power, % of sweeps", ["arms", "seeds", "difference, seed sd", *rates], powers(before, n))
    header = ["windows", "documents", "degrees of freedom", "targets of a document", "CR1, G - 1", "CR2 (now)"]
    show("Coverage of 95 % intervals of a mean over documents, %", header, clustered_means(4 * n))
    header = ["windows", "sd between documents, nats", "seeds", "before", "now"]
    show("Coverage of 95 % intervals, 2 arms, %", header, coverages(before, n))
    header = ["arms", "difference, seed sd", "version", "false verdict in some stage, %", "found, %", "seeds used"]
    show("Proposals followed, from 3 seeds, up to 4 stages", header, sequences(before, n // 4))
    header = ["arms", "seeds", "true difference = margin: called equal, %", "no difference: called equal, %"]
    show("Equality, margin of 4 seed sd", header, equalities(n))
    show("Smallest detectable difference", ["arms", "seeds", "stated, seed sd", "found, %"], detectables(n))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
