"""Simulated comparisons with a known truth. The tables of docs/referee.md: python -m tests.scripts.trials.simulation

Losses are in units of the standard deviation of a pair's difference on a fixed text.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import mean_interval, t_quantile
from tril.scripts.cli.formats import markdown_table
from tril.scripts.trials.paired_losses import text_half_width
from tril.scripts.trials.sequential import ALPHA, MAX_PAIRS, Look, half_width

DOCUMENTS = 43  # as in the standard library's validation text, whose documents are worth 18 of equal size
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def heavy(rng: np.random.Generator, n: int) -> np.ndarray:
    """Student's t with 3 degrees of freedom, with variance 1."""
    return rng.standard_t(3, n) / math.sqrt(3)


def one_sided(rng: np.random.Generator, n: int) -> np.ndarray:
    """One run in ten of the candidate is 4 standard deviations of the others worse; mean 0 and variance 1."""
    values = rng.standard_normal(n) + 4 * (rng.random(n) < 0.1)
    return (values - 0.4) / math.sqrt(1 + 16 * 0.1 * 0.9)


def outliers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Such outliers in both arms."""
    return (one_sided(rng, n) - one_sided(rng, n)) / math.sqrt(2)


NOISES: dict[str, Draw] = {
    "normal": normal,
    "heavy tails": heavy,
    "outliers": outliers,
    "outliers of the candidate": one_sided,
}


@dataclass(frozen=True)
class World:
    """How differences arise.

    Attributes:
        effect: the true mean difference.
        noise: of the seeds.
        text: standard deviation of the mean difference over texts of the same kind; None: the text is fixed, and the
            differences of documents are not simulated.
        interaction: standard deviation of the mean over documents of what differs from pair to pair and document to
            document, part of the variance 1 of a pair.
    """

    effect: float = 0.0
    noise: Draw = normal
    text: float | None = None
    interaction: float = 0.5

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Differences (n,), and sums (n, G) and targets (G,) of documents."""
        seeds = self.noise(rng, n)
        if self.text is None:
            return self.effect + seeds, None
        sizes = np.exp(rng.standard_normal(DOCUMENTS))  # long and short documents
        share = sizes / sizes.sum()
        of_mean = math.sqrt(float(share @ share))  # sd of the weighted mean of independent values with sd 1
        of_documents = self.text / of_mean * heavy(rng, DOCUMENTS)
        rest = self.interaction / of_mean * rng.standard_normal((n, DOCUMENTS))
        means = self.effect + math.sqrt(1 - self.interaction**2) * seeds[:, None] + of_documents + rest  # (n, G)
        return means @ share, (means * share, share)


def looks(world: World, rng: np.random.Generator, max_pairs: int) -> Iterator[Look]:
    """The looks of one comparison."""
    differences, clusters = world.draw(rng, max_pairs)
    for n in range(1, max_pairs + 1):
        text = text_half_width((clusters[0][:n], clusters[1])) if clusters and n > 2 else 0.0
        yield Look.at(differences[:n], text)


def referee(world: World, rng: np.random.Generator, margin: float, max_pairs: int) -> tuple[str, int]:
    """Verdict and number of pairs of one comparison."""
    look = None
    for look in looks(world, rng, max_pairs):
        if verdict := look.verdict(margin):
            return verdict, look.n
        if look.settled_by_text(margin):
            break
    assert look is not None
    return "undecided", look.n


def misses(world: World, rng: np.random.Generator, max_pairs: int) -> bool:
    """Whether any interval of one comparison misses the true difference."""
    return any(not look.low <= world.effect <= look.high for look in looks(world, rng, max_pairs))


def fixed_design(world: World, rng: np.random.Generator, n: int = 8) -> bool:
    """Whether Student's t test of n pairs, all trained, finds the candidate better."""
    interval = mean_interval(world.draw(rng, n)[0].tolist())
    return interval.high is not None and interval.high < 0


def verdicts(world: World, trials: int, margin: float, max_pairs: int, seed: int = 0) -> tuple[Counter, float, float]:
    """Counts of verdicts, and mean and median number of pairs."""
    rng = np.random.default_rng(seed)
    found = [referee(world, rng, margin, max_pairs) for _ in range(trials)]
    pairs = [n for _, n in found]
    return Counter(verdict for verdict, _ in found), float(np.mean(pairs)), float(np.median(pairs))


def error_table(trials: int) -> str:
    """Identical arms: how often they are called better or worse, and how often any interval misses 0."""
    rows = [["noise", "text", "called better or worse", "any interval misses the truth"]]
    cases = [(name, None, MAX_PAIRS) for name in NOISES]
    cases += [(name, text, 30) for name in ("normal", "heavy tails") for text in (0.0, 0.3, 1.0, 3.0)]
    for name, text, pairs in cases:
        world = World(noise=NOISES[name], text=text)
        counts = verdicts(world, trials, 1e-9, pairs)[0]
        rng = np.random.default_rng(1)
        missed = np.mean([misses(world, rng, pairs) for _ in range(trials)])
        called = (counts["better"] + counts["worse"]) / trials
        rows.append([name, "fixed" if text is None else f"{text:g}", f"{called:.1%}", f"{missed:.1%}"])
    return markdown_table(rows, text_columns=(0, 1))


def power_table(trials: int, margin: float) -> str:
    """A true improvement: verdicts and pairs of the referee, and the power of a fixed design of 8 pairs."""
    rows = [["improvement", "better", "worse", "equal", "undecided", "pairs, mean", "median", "8 pairs, fixed: better"]]
    for effect in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 10.0):
        counts, mean, median = verdicts(World(-effect), trials, margin, MAX_PAIRS)
        rng = np.random.default_rng(1)
        power = np.mean([fixed_design(World(-effect), rng) for _ in range(trials)])
        shares = [f"{counts[name] / trials:.1%}" for name in ("better", "worse", "equal", "undecided")]
        rows.append([f"{effect:g} sd", *shares, f"{mean:.1f}", f"{median:.0f}", f"{power:.1%}"])
    return markdown_table(rows)


def paths(rng: np.random.Generator, n_paths: int, threshold: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Means and half widths (n_paths, looks with an interval) of normal differences with mean 0 on a fixed text."""
    n = np.arange(1, MAX_PAIRS + 1)
    x = rng.standard_normal((n_paths, MAX_PAIRS))
    mean = x.cumsum(1) / n
    sd = np.sqrt(np.maximum((x**2).cumsum(1) - n * mean**2, 0) / np.maximum(n - 1, 1))
    unit = np.array([half_width(i, 1.0, threshold) for i in n])
    known = np.isfinite(unit)
    return mean[:, known], sd[:, known] * unit[known]


def missed_with_text(
    rng: np.random.Generator, mean: np.ndarray, half: np.ndarray, text: float, df: int, power: float
) -> float:
    """Share of `paths` of which any interval, combined with that of a text, misses 0.

    Args:
        text: standard deviation of the error of the text, estimated with df degrees of freedom.
        power: of the half widths that are added.
    """
    error = text * rng.standard_normal((len(mean), 1))
    of_text = t_quantile(df, ALPHA) * text * np.sqrt(rng.chisquare(df, (len(mean), 1)) / df)
    combined = (half**power + of_text**power) ** (1 / power)
    return float((np.abs(mean + error) > combined).any(1).mean())


def combination_table(n_paths: int = 50_000) -> str:
    """The largest share of missed truths over ratios of text to seeds, for each way to combine their half widths."""
    rng = np.random.default_rng(0)
    mean, half = paths(rng, n_paths)
    rows = [["power", "missed at most"]]
    for power in (1.0, 1.1, 1.2, 1.5, 2.0):
        cases = [(text, df) for text in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0) for df in (4, 20)]
        worst = max(missed_with_text(rng, mean, half, text, df, power) for text, df in cases)
        rows.append([f"{power:g}", f"{worst:.2%}"])
    return markdown_table(rows)


def main(trials: int = 2000) -> None:
    mean, half = paths(np.random.default_rng(0), 50_000, math.log(1 / ALPHA))
    print(f"threshold {1 / ALPHA:g}: {(np.abs(mean) > half).any(1).mean():.2%} missed\n\n{combination_table()}\n")
    print(f"{trials} comparisons each, margin 0.5 sd\n\n{power_table(trials, 0.5)}\n")
    print(f"{trials} comparisons each\n\n{error_table(trials)}")


if __name__ == "__main__":
    main()
