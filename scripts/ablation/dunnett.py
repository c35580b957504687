"""Dunnett's distribution: the largest of several t statistics that share a baseline and a variance.

m comparisons with one baseline give statistics whose numerators have the correlation 1/2 in a balanced sweep. Their
joint distribution gives a smaller critical value than Bonferroni's correction. scipy.stats.multivariate_t integrates it
by Monte Carlo, which takes seconds for one critical value; here the correlation is the same for all pairs, so that two
nested integrals suffice. Tests compare both.
"""

import functools
import math

import numpy as np

NODES = 64  # of each integral: both integrands are smooth, so that the trapezoidal rule is accurate to 1e-6
MANY_NODES = 128  # for less than 3 degrees of freedom, with which U varies over many orders of magnitude
Z = 9.0  # the standard normal distribution beyond is below 1e-18
TAIL = 1e-14  # of the chi-square distribution, left out at each side


def tail_probability(c: float, n_comparisons: int, df: float, correlation: float = 0.5) -> float:
    """Probability that the largest of |T_1|, ..., |T_m| exceeds c.

    T_i = (sqrt(r) Z_0 + sqrt(1 - r) Z_i) / U with independent standard normal Z and U^2 a chi-square of df degrees of
    freedom divided by df.

    Args:
        c: at least 0.
        n_comparisons: m.
        df: of the common variance; math.inf: the variance is known.
        correlation: r, from 0 to below 1, of the numerators of any two statistics.
    """
    from scipy.special import ndtr

    assert c >= 0 and n_comparisons >= 1 and df > 0 and 0 <= correlation < 1
    u, weights_u = _scale_nodes(df)
    z = np.linspace(0, Z, len(u) // 2 if len(u) > 1 else NODES)  # the integrand is symmetric in Z_0
    weights_z = np.exp(-(z**2) / 2) * np.where(z == 0, 0.5, 1.0)
    weights_z /= weights_z.sum()
    shift, scale = math.sqrt(correlation) * z, math.sqrt(1 - correlation)
    # 1 - P(all within)^m, with logarithms so that small probabilities keep their digits
    outside = ndtr((shift - c * u[:, None]) / scale) + ndtr((-shift - c * u[:, None]) / scale)  # (U, Z)
    all_within = n_comparisons * np.log1p(-np.minimum(outside, 1 - 1e-16))
    return float(weights_u @ -np.expm1(all_within) @ weights_z)


@functools.lru_cache(maxsize=1000)
def critical_value(alpha: float, n_comparisons: int, df: float, correlation: float = 0.5) -> float:
    """The c that the largest of |T_1|, ..., |T_m| exceeds with probability alpha, see `tail_probability`."""
    from scipy.optimize import brentq

    from tril.model.intervals import t_quantile

    low, high = t_quantile(df, alpha), t_quantile(df, alpha / n_comparisons)  # one comparison, and Bonferroni
    if n_comparisons == 1:
        return low
    return float(
        brentq(lambda c: tail_probability(c, n_comparisons, df, correlation) - alpha, low * 0.99, high * 1.01)  # pyright: ignore[reportArgumentType]
    )


@functools.lru_cache(maxsize=1000)
def _scale_nodes(df: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of U and their weights, equally spaced in log U."""
    from scipy.special import gammainccinv, gammaincinv

    if math.isinf(df):
        return np.ones(1), np.ones(1)
    low, high = (float(np.log(2 * inverse(df / 2, TAIL) / df)) / 2 for inverse in (gammaincinv, gammainccinv))
    log_u = np.linspace(low, high, NODES if df >= 3 else MANY_NODES)
    log_density = df * log_u - df * np.exp(2 * log_u) / 2
    weights = np.exp(log_density - log_density.max())
    return np.exp(log_u), weights / weights.sum()
