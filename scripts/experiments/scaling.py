"""The loss as a function of parameters and tokens: L(N, D) = E + A / N^alpha + B / D^beta, fitted to a sweep.

N parameters without embeddings, D training tokens, L nats per token; n points. The form and the fit (Huber loss on
log L, from a grid of starts) are those of Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3 and
appendix D.3. Besiroglu et al. 2024, https://arxiv.org/abs/2404.10102, show two pitfalls: an optimizer that stops early,
and intervals that are too narrow.
"""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tril.model.formats import engineering, markdown_table
from tril.scripts.cli.errors import command
from tril.scripts.experiments.plots import COLORS, DPI, WIDTH, Picture
from tril.scripts.experiments.sweep import Sweep

SIZE = "parameters_without_embeddings"  # the entry of summary.json that counts as N
DELTA = 1e-3  # Hoffmann et al.: relative errors beyond it count linearly instead of quadratically
EXPONENTS = (0.01, 2.0)  # bounds of alpha and beta; Hoffmann et al. start from 0 to 2
TERMS = (1e-3, 100.0)  # bounds in nats of E, and of the other two terms in the middle of the data; the lower one is ~ 0
LIMITS = np.array([np.log(TERMS)] * 3 + [EXPONENTS] * 2)  # (5, 2) of theta, see `residuals`
STARTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2)  # of alpha and of beta, in all pairs
RESTARTS = 4  # how many of the starts are followed, the best ones
OPTIONS = {"loss": "huber", "f_scale": DELTA, "x_scale": "jac", "ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-15}
MAX_EVALUATIONS = 1000  # from each start; 100 are too few if E ends at its bound
PARAMETERS = ("E", "A", "B", "alpha", "beta")
LEAST = {"sizes": 4, "token counts": 3}  # five parameters, and points for the error
LEAST_HELD_OUT = 3  # sizes and token counts that remain: a curve with an offset needs three
RESAMPLES, CONFIDENCE = 200, 0.95
BUDGETS = (1, 10, 100)  # compute for the best split, in multiples of the largest run's
PICTURE = "scaling.png"


@dataclass(frozen=True)
class Points:
    """The finished variants of a sweep in the order of size and tokens: arrays (n,).

    Attributes:
        parameters: N.
        tokens: D.
        loss: mean final validation loss over the seeds.
        seeds: how many.
        spread: standard deviation of log L of a run between seeds; 0 if unknown.
    """

    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    seeds: np.ndarray
    spread: float

    def take(self, rows: np.ndarray) -> "Points":
        """The points of a mask (n,)."""
        arrays = (self.parameters[rows], self.tokens[rows], self.loss[rows], self.seeds[rows])
        return Points(*arrays, self.spread)

    @property
    def counts(self) -> dict[str, int]:
        return {"sizes": len(np.unique(self.parameters)), "token counts": len(np.unique(self.tokens))}


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token.

    Attributes:
        bounds: the parameters that ended at a bound of the fit: the data do not determine them.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    bounds: tuple[str, ...] = ()

    def loss(self, parameters, tokens):
        """Nats per token; arrays broadcast."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """N and D of the lowest loss at 6 N D = `flops`: Hoffmann et al., equation 4."""
        exponents, product = self.alpha + self.beta, flops / 6
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponents)
        return ratio * product ** (self.beta / exponents), product ** (self.alpha / exponents) / ratio


def points_of(sweep: Sweep) -> Points:
    """The finished variants as points.

    Raises:
        ValueError: several texts or tokenizers, two variants with the same N and D, or too few points.
    """
    usable = [each for each in sweep.variants if each.finished and not any(run.diverged for run in each.finished)]
    if len({run.summary.get("data_fingerprint") for each in usable for run in each.finished}) > 1:
        raise ValueError(f"fit=scaling: {sweep.folder} has runs of several texts or tokenizers; sweep each alone")
    rows = {}
    for variant in usable:
        at, losses = (variant.figures(SIZE)[0], variant.figures("tokens")[0]), np.log(variant.figures("final_val_loss"))
        if at in rows:
            raise ValueError(
                f"fit=scaling: {variant.label} has the size and tokens of another variant; sweep one of them"
            )
        rows[at] = math.exp(losses.mean()), len(losses), float(np.sum((losses - losses.mean()) ** 2))
    order = sorted(rows)
    sizes, tokens = np.array(order, float).reshape(-1, 2).T
    loss, seeds, squares = np.array([rows[at] for at in order], float).reshape(-1, 3).T
    df = float(np.sum(seeds - 1))
    points = Points(sizes, tokens, loss, seeds, math.sqrt(squares.sum() / df) if df else 0.0)
    if short := [f"{n} of at least {LEAST[name]} {name}" for name, n in points.counts.items() if n < LEAST[name]]:
        remedy = f"train more with {command('train')} -m +ablation=scaling"
        raise ValueError(f"fit=scaling: {sweep.folder} has too few finished runs, {', '.join(short)}; {remedy}")
    return points


def residuals(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """log L of the law minus that of the points, (n,).

    Args:
        theta: log E, the logarithms of the other two terms where n and d are 0, alpha, beta.
        n: (n,) logarithm of N, minus its mean.
        d: (n,) logarithm of D, minus its mean.
        log_loss: (n,) logarithm of the measured losses.
    """
    return np.logaddexp.reduce(log_terms(theta, n, d)) - log_loss


def jacobian(theta: np.ndarray, n: np.ndarray, d: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """The derivatives of `residuals` with respect to theta, (n, 5)."""
    logs = log_terms(theta, n, d)
    shares = np.exp(logs - np.logaddexp.reduce(logs))  # (3, n) of each term in the loss
    return np.stack([*shares, -shares[1] * n, -shares[2] * d], 1)


def log_terms(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The logarithms of E, A / N^alpha and B / D^beta: (3, n)."""
    return np.stack([np.full_like(n, theta[0]), theta[1] - theta[3] * n, theta[2] - theta[4] * d])


def fit(points: Points, restarts: int = RESTARTS) -> Law:
    """The law with the lowest Huber loss, from the best `restarts` of the starts."""
    from scipy.optimize import least_squares, nnls
    from scipy.special import huber

    log_n, log_d = np.log(points.parameters), np.log(points.tokens)
    n, d = log_n - log_n.mean(), log_d - log_d.mean()
    data, starts = (n, d, np.log(points.loss)), []
    for alpha, beta in itertools.product(STARTS, STARTS):  # for given exponents the law is linear in E, A and B
        terms, _ = nnls(np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], 1), points.loss)
        starts.append(np.array([*np.log(np.clip(terms, 2 * TERMS[0], TERMS[1] / 2)), alpha, beta]))
    starts.sort(key=lambda theta: huber(DELTA, residuals(theta, *data)).sum())
    more = {"bounds": LIMITS.T, "max_nfev": MAX_EVALUATIONS, "jac": jacobian, "args": data}
    ends = [least_squares(residuals, theta, **OPTIONS, **more) for theta in starts[:restarts]]
    theta = min(ends, key=lambda end: end.cost).x
    at_bound = [name for i, name in enumerate(PARAMETERS) if np.isclose(theta[i], LIMITS[i], atol=1e-4).any()]
    e, a, b, alpha, beta = theta.tolist()
    scales = math.exp(e), math.exp(a + alpha * log_n.mean()), math.exp(b + beta * log_d.mean())
    return Law(*scales, alpha, beta, tuple(at_bound))


def resample(points: Points, law: Law, times: int = RESAMPLES) -> list[Law]:
    """Fits `times` copies of the points whose losses are those of the law with normal noise on their logarithms.

    The noise is what the law leaves (n - 5 degrees of freedom, a size that is drawn anew for each copy), so an interval
    holds if the form is right. Points drawn with replacement would often not determine a law.
    """
    chance, fitted = np.random.default_rng(0), law.loss(points.parameters, points.tokens)
    left, df, laws = np.log(points.loss / fitted), max(1, len(fitted) - len(PARAMETERS)), []
    for _ in range(times):
        scale = math.sqrt(float(left @ left) / chance.chisquare(df))
        noisy = fitted * np.exp(np.clip(scale * chance.normal(size=len(fitted)), -3, 3))  # 3: far beyond any interval
        laws.append(fit(replace(points, loss=noisy), restarts=1))
    return laws


def held_out_errors(points: Points) -> dict[str, float]:
    """Mean error in nats of what is predicted from the other points: of the largest size, and of the longest runs."""
    errors = {}
    for name, values in {"the largest size": points.parameters, "the longest runs": points.tokens}.items():
        out = values == values.max()
        others, held_out = points.take(np.logical_not(out)), points.take(out)
        if min(others.counts.values()) >= LEAST_HELD_OUT:
            predicted = fit(others).loss(held_out.parameters, held_out.tokens)
            errors[name] = float(np.abs(predicted - held_out.loss).mean())
    return errors


def scaling_section(points: Points, folder: Path) -> tuple[str, Picture]:
    """The section of a report on the law, as Markdown, and its picture, which is written to the folder."""
    law = fit(points)
    laws = resample(points, law)
    plot(folder / PICTURE, points, law)

    def interval(value_of) -> str:
        low, high = np.quantile([value_of(each) for each in laws], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return f"{low:.4g} to {high:.4g}"

    fitted = [["parameter", "value", f"{CONFIDENCE:.0%} interval"]]
    for name in PARAMETERS:
        mark = " (at a bound of the fit)" if name in law.bounds else ""
        fitted.append([name, f"{getattr(law, name):.4g}{mark}", interval(lambda each, name=name: getattr(each, name))])
    split = [["FLOPs", "N", "D", "loss", f"{CONFIDENCE:.0%} interval"]]
    largest = 6 * float((points.parameters * points.tokens).max())
    for flops in (factor * largest for factor in BUDGETS):
        n, d = law.optimum(flops)
        loss = interval(lambda each, flops=flops: each.loss(*each.optimum(flops)))
        split.append([f"{flops:.2g}", engineering(n), engineering(d), f"{law.loss(n, d):.3f}", loss])
    error = float(np.abs(law.loss(points.parameters, points.tokens) - points.loss).mean())
    held_out = [f"{name} from the others: {x:.4f}" for name, x in held_out_errors(points).items()]
    seeds = f"{points.spread * float(points.loss.mean()):.4f}" if points.spread else "unknown"
    text = f"""## Scaling law

L(N, D) = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.3g} + {law.B:.4g} / D^{law.beta:.3g}, in nats per token, for N
parameters without embeddings and D training tokens.

{markdown_table(fitted)}

- Mean error at the points: {error:.4f} nats; the standard deviation between seeds is {seeds}.
- Mean error of predictions, in nats: {"; ".join(held_out) or "too few points to hold some out"}.

An error far above that of the seeds says that the form is wrong here; the intervals, which assume it, are then too
narrow.

The split of a compute of 6 N D FLOPs with the lowest loss of the fit, from the largest run's on:

{markdown_table(split)}
"""
    return text, Picture(
        PICTURE, "The loss against tokens, and what the fit leaves", "Points are measured, lines are the fit."
    )


def plot(path: Path, points: Points, law: Law) -> None:
    """Loss against tokens for each size, above; measured minus fitted loss, below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    tokens = np.geomspace(points.tokens.min(), points.tokens.max(), 50)
    for i, size in enumerate(np.unique(points.parameters)):
        of_size, color = points.take(points.parameters == size), COLORS[i % len(COLORS)]
        above.plot(of_size.tokens, of_size.loss, "o", ms=4, color=color, label=f"N = {engineering(size)}")
        above.plot(tokens, law.loss(size, tokens), lw=1, color=color)
        below.plot(of_size.tokens, of_size.loss - law.loss(size, of_size.tokens), "o-", ms=4, lw=0.7, color=color)
    below.axhline(0, color="0.5", lw=0.8)
    above.set(xscale="log", ylabel="validation loss, nats per token")
    below.set(xlabel="training tokens", ylabel="measured - fitted")
    below.xaxis.set_major_formatter(EngFormatter(sep=" "))
    above.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
