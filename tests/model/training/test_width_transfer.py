"""The best learning rate of a small model is that of a wide one, with optim.scale_with_width."""

import functools
from statistics import fmean

import pytest

from tests.model.training.width_runs import loss, trained

MULTIPLIERS = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
STEPS = 30
SEEDS = (0, 1, 2)  # near the best rate, the curve of one seed is as rough as the bound below


@functools.cache
def curve(width: int, kind: str, *, scaled: bool) -> dict[float, float]:
    """The mean loss after a short training, by the multiplier of the learning rates; at a width of 64 scaled or not."""
    settings = {"scaled": scaled, "steps": STEPS, "decay": True, "mlp_ratio": 2.0}
    return {
        factor: fmean(loss(trained(width, kind, lr_scale=factor, seed=seed, **settings)) for seed in SEEDS)
        for factor in MULTIPLIERS
    }


def best(losses: dict[float, float]) -> float:
    return min(losses, key=losses.__getitem__)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_best_rate_at_64_is_nearly_the_best_at_256(kind):
    small, wide = curve(64, kind, scaled=False), curve(256, kind, scaled=True)
    chosen = best(small)
    assert MULTIPLIERS[0] < chosen < MULTIPLIERS[-1], small
    assert 0.5 <= best(wide) / chosen <= 2, (small, wide)
    assert wide[chosen] - min(wide.values()) < 0.03, wide
    assert wide[chosen] < small[chosen], "wider is better"


@pytest.mark.long
def test_without_the_option_the_best_rate_of_adamw_moves():
    small, wide = curve(64, "adamw", scaled=False), curve(256, "adamw", scaled=False)
    chosen = best(small)
    assert best(wide) <= chosen / 4, (small, wide)
    assert wide[chosen] - min(wide.values()) > 0.1, wide
