"""Points and sweeps whose losses are those of a known law, with or without noise and an interaction."""

import math
from dataclasses import replace

import numpy as np

from tests.scripts.experiments.synthetic import write_sweep
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.scaling_law import Law, Points

SIZES = {"2x64": 98_304, "3x96": 331_776, "4x160": 1_228_800, "5x224": 3_010_560}  # of +ablation=scaling
STEPS = {60: 122_880, 100: 204_800, 160: 327_680, 250: 512_000, 400: 819_200}  # -> tokens
TOKENS = tuple(STEPS.values())
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # Hoffmann et al., equation 10
LAWS = [HOFFMANN, Law(2.0, 50.0, 3000.0, 0.3, 0.55), Law(0.5, 20.0, 900.0, 0.2, 0.4), Law(3.0, 1e4, 1e5, 0.7, 0.8)]

# docs/scaling.md of 2026-11-22: four sizes, three token counts, one seed
OLD_SIZES, OLD_TOKENS = (332_736, 997_008, 3_459_120, 10_622_400), (204_800, 460_800, 1_024_000)
PUBLISHED = [[4.5199, 3.9262, 3.4625], [4.4145, 3.8044, 3.3033], [4.3136, 3.6795, 3.1966], [4.2628, 3.5969, 3.0989]]
PUBLISHED_INTERACTION = -0.0044  # added to log L for each unit of ln N x ln D, centered: fitted to these losses


def points_at(sizes, tokens, by_seed) -> Points:
    """Every size with every token count; by_seed (sizes x tokens, S)."""
    n, d = (axis.ravel() for axis in np.meshgrid([*map(float, sizes)], [*map(float, tokens)], indexing="ij"))
    return Points(tuple(map(str, range(len(n)))), n, d, np.asarray(by_seed, float))


def published() -> Points:
    return points_at(OLD_SIZES, OLD_TOKENS, np.reshape(PUBLISHED, (12, 1)))


def points_from(law: Law, tokens=TOKENS) -> Points:
    """One seed, without noise."""
    points = points_at(SIZES.values(), tokens, np.ones((len(SIZES) * len(tokens), 1)))
    return points.with_loss(law.loss(points.parameters, points.tokens))


def noisy(
    points: Points, spread: float, seed: int, *, seeds: int = 1, interaction: float = 0.0, seed_effect: float = 1.0
) -> Points:
    """Normal noise on log L: `spread` for every run, and `seed_effect` times as much for all runs of a seed alike."""
    generator = np.random.default_rng(seed)
    n, d = (np.log(x) - np.log(x).mean() for x in (points.parameters, points.tokens))
    noise = spread * generator.normal(size=(len(points), seeds))
    noise += seed_effect * spread * generator.normal(size=seeds) * (seeds > 1)
    return replace(points, by_seed=points.loss[:, None] * np.exp(noise + interaction * (n * d)[:, None]))


def law_sweep(folder, points: Points | None = None, summary=None, **states):
    """The sweep of +ablation=scaling with the losses of `points`, by default of a law.

    Args:
        folder: of the sweep.
        points: of all sizes and token counts.
        summary: (shape, steps) -> more entries of summary.json.
        states: "3x96_100" -> loss or state of all its seeds.
    """
    points = points_from(HOFFMANN) if points is None else points
    losses, more, rows = {}, {}, iter(points.by_seed.tolist())
    for shape, n in SIZES.items():
        for steps, d in STEPS.items():
            seeds = dict(enumerate(next(rows)))
            name = f"{shape}_{steps}"
            losses[shape, steps] = dict.fromkeys(seeds, states[name]) if name in states else seeds
            own = (summary or {}).get((shape, steps), {})
            more[shape, steps] = {"parameters_without_embeddings": n, "parameters": 2 * n, "tokens": d} | own
    return read_sweep(write_sweep(folder, ["shape", "steps"], losses, summary=more))


def assert_same(law: Law, true: Law, rel: float) -> None:
    for name in ("E", "A", "B", "alpha", "beta"):
        value = getattr(law, name)
        assert math.isclose(value, getattr(true, name), rel_tol=rel), f"{name}={value}"
