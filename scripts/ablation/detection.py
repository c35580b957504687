"""What differences a sweep detects: how probable a verdict is, the smallest detectable difference, how many more seeds.

A verdict depends on estimated variances, so the probability is an integral over their distributions as well.
"""

import bisect
import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from tril.model.intervals import t_quantile
from tril.scripts.ablation.dunnett import critical_value
from tril.scripts.ablation.stages import stage_alpha
from tril.scripts.ablation.variances import EQUAL_VARIANCES_LEVEL

POWER = 0.8  # probability of a verdict for which differences and seeds are proposed
MAX_SEEDS = 100  # in total; more are not proposed
NODES = 24  # equally probable values of each estimated variance
TOO_MANY = f"More than {MAX_SEEDS} seeds would be needed."
MORE_TEXT = "No number of seeds would settle it: so small a difference needs more validation text."


@dataclass(frozen=True)
class Design:
    """A sweep, and its noise.

    Attributes:
        n_seeds: of each arm.
        n_comparisons: arms without the baseline.
        df_per_seed: degrees of freedom of the pooled variance are (n_seeds - 1) times this: A - 1 for A arms. 1: the
            variances are not pooled.
        seeds: variance of the difference of one pair of runs with a common seed.
        text: contribution of the choice of the text to the variance of the mean difference.
        text_df: degrees of freedom of its estimate.
    """

    n_seeds: int
    n_comparisons: int
    df_per_seed: float
    seeds: float
    text: float = 0.0
    text_df: float = math.inf

    def power(self, difference: float, alpha: float) -> float:
        """Probability that a true difference >= 0 is found at level alpha."""
        separate = self._power_with(
            difference, t_quantile(self.n_seeds - 1, alpha / self.n_comparisons), _scaled(self.n_seeds - 1), alpha
        )
        if self.df_per_seed <= 1:
            return separate
        own, others = _scaled(self.n_seeds - 1)[:, None], _scaled((self.df_per_seed - 1) * (self.n_seeds - 1))
        pooled = (own + (self.df_per_seed - 1) * others) / self.df_per_seed
        critical = critical_value(alpha, self.n_comparisons, self.df_per_seed * (self.n_seeds - 1))
        together = self._power_with(difference, critical, np.maximum(own, pooled).ravel(), alpha)
        # Bartlett's test rejects equal variances at this rate, although they are equal
        return (1 - EQUAL_VARIANCES_LEVEL) * together + EQUAL_VARIANCES_LEVEL * separate

    def _power_with(self, difference: float, critical: float, ratios: np.ndarray, alpha: float) -> float:
        """ratios: equally probable values of the estimated variance between seeds divided by the true one."""
        from scipy.special import ndtr

        by_seeds = critical**2 * self.seeds / self.n_seeds * ratios
        by_text = t_quantile(self.text_df, alpha / self.n_comparisons) ** 2 * self.text * _scaled(self.text_df)
        variance = self.seeds / self.n_seeds + self.text
        margins = difference - np.sqrt(by_seeds[:, None] + by_text)
        return float(ndtr(margins / math.sqrt(variance)).mean()) if variance else float(difference > 0)


def smallest_detectable(design: Design, alpha: float = stage_alpha(1), power: float = POWER) -> float:
    """The true difference that is found with this probability; infinite with one seed."""
    from scipy.optimize import brentq

    if design.n_seeds < 2 or design.n_comparisons < 1:
        return math.inf
    scale = math.sqrt(design.seeds / design.n_seeds + design.text)
    if scale == 0:
        return 0.0
    high = scale
    while design.power(high, alpha) < power:
        high *= 2
    found = brentq(lambda difference: design.power(difference, alpha) - power, 0.0, high, xtol=1e-6 * scale)
    return float(found)  # pyright: ignore[reportArgumentType] a float, since full_output is False


def more_seeds(design: Design, difference: float, alpha: float) -> tuple[int | None, str]:
    """How many more seeds find a difference >= 0 at level alpha with probability POWER; or why no number does."""
    from scipy.special import ndtri

    quantile = t_quantile(design.text_df, alpha / design.n_comparisons)
    if difference < (quantile + ndtri(POWER)) * math.sqrt(design.text):
        return None, MORE_TEXT
    if difference == 0 or design.seeds + design.text == 0:
        return None, TOO_MANY

    def power(n: int) -> float:
        return replace(design, n_seeds=n).power(difference, alpha)

    enough = bisect.bisect_left(range(MAX_SEEDS + 1), POWER, lo=design.n_seeds + 1, key=power)
    return (enough - design.n_seeds, "") if enough <= MAX_SEEDS else (None, TOO_MANY)


@functools.lru_cache(maxsize=1000)
def _scaled(df: float) -> np.ndarray:
    """(NODES,) equally probable values of a variance's estimate with df degrees of freedom, if the variance is 1."""
    from scipy.special import gammaincinv

    if math.isinf(df):
        return np.ones(1)
    return gammaincinv(df / 2, (np.arange(NODES) + 0.5) / NODES) / (df / 2)
