"""What a planned sweep will detect, from the noise of earlier sweeps."""

import json
import math
import os
import time

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import write_sweep
from tril.scripts.ablation.detection import Design, smallest_detectable
from tril.scripts.ablation.power import detectable_difference, detectable_line, earlier_noise

KEYS = ["model.n_heads"]
LOSSES = np.random.default_rng(0).normal(3.0, 0.01, size=(4, 3))


def write(folder, losses=LOSSES, *, age: float = 0.0, **options):
    """A sweep of losses (A, S), written `age` seconds ago."""
    arms = {(n,): dict(enumerate(row)) for n, row in enumerate(losses)}
    path = write_sweep(folder, KEYS, arms, **options) / "sweep.json"
    os.utime(path, (time.time() - age,) * 2)
    return folder


def test_noise_between_seeds_is_the_residual_of_arm_and_seed(tmp_path):
    write(tmp_path / "day" / "time")
    residuals = LOSSES - LOSSES.mean(0) - LOSSES.mean(1, keepdims=True) + LOSSES.mean()
    noise = earlier_noise(tmp_path)
    assert noise.folder == tmp_path / "day" / "time" and noise.seed_df == 6
    assert noise.seed_sd == pytest.approx(math.sqrt(np.sum(residuals**2) / 6)) and noise.text_se == 0


def test_noise_of_the_text_is_the_median_of_the_differences(tmp_path):
    """Windows differ by 0, 0.2 and 0.4 between the arms and the baseline, equally with all seeds."""
    windows, arms = np.random.default_rng(1).normal(size=8), {}
    for arm in range(4):
        arms[arm,] = {seed: LOSSES[arm, seed] + 0.2 * arm * windows for seed in range(3)}
    write_sweep(tmp_path / "day" / "time", KEYS, arms)
    noise = earlier_noise(tmp_path)
    assert noise.text_se == pytest.approx(
        0.4 * np.std(windows, ddof=1) / math.sqrt(8)
    ) and noise.text_df == pytest.approx(7)


def test_the_newest_finished_sweep_with_two_seeds_counts(tmp_path):
    write(tmp_path / "day" / "old", age=500)
    expected = write(tmp_path / "day" / "newer", 2 * LOSSES, age=400)
    write(tmp_path / "day" / "one seed", LOSSES[:, :1], age=300)
    write(tmp_path / "day" / "one arm", LOSSES[:1], age=250)
    write_sweep(tmp_path / "day" / "unfinished", KEYS, {(1,): {0: 3.0, 1: 3.1}, (2,): {0: 3.0, 1: "unfinished"}})
    write(tmp_path / "day" / "diverged", np.where(LOSSES == LOSSES[0, 0], math.nan, LOSSES), age=200)
    write(tmp_path / "day" / "equal", np.full((2, 2), 3.0), age=150)
    damaged = write(tmp_path / "day" / "damaged", age=100)
    (damaged / "sweep.json").write_text("{")
    other = write(tmp_path / "day" / "other", age=50)
    (other / "sweep.json").write_text(json.dumps({"cells": [{"folder": "x"}]}))
    assert earlier_noise(tmp_path).folder == expected


def test_no_earlier_sweep(tmp_path):
    assert earlier_noise(tmp_path) is None and earlier_noise(tmp_path / "nowhere") is None


def test_detectable_difference_in_nats_and_in_standard_deviations(tmp_path):
    write(tmp_path / "day" / "time")
    noise = earlier_noise(tmp_path)
    in_sd, in_nats = detectable_difference(6, 3, None), detectable_difference(6, 3, noise)
    assert in_nats == pytest.approx(in_sd * noise.seed_sd, rel=1e-4)
    assert in_sd == smallest_detectable(Design(3, 5, 5, 2.0), 0.04)
    assert (
        3 < in_sd < 5
    )  # 0.8 = P(T > 3.12) for Dunnett's critical value at 4 %: about 3.1 + 0.85 standard errors, sqrt(2/3)


def test_line_of_a_plan(tmp_path):
    assert "in 80% of sweeps (no finished sweep below" in detectable_line(6, 3, tmp_path)
    write(tmp_path / "day" / "time")
    noise = earlier_noise(tmp_path)
    line = detectable_line(6, 3, tmp_path)
    assert (
        f"6 variants with 3 seeds find a difference from the baseline of {detectable_difference(6, 3, noise):.2g}"
        in line
    )
    assert f"{noise.seed_sd:.2g} between seeds" in line and str(noise.folder) in line and "\n" not in line
    later = f"{detectable_difference(6, 3, noise, stage=2):.2g} nats per token"
    assert later in detectable_line(6, 3, tmp_path, stage=2) and later not in line
    assert detectable_line(6, 1, tmp_path) == "one seed: no difference can be told from chance; add seed=0,1,2"
    assert detectable_line(1, 3, tmp_path) == "one variant: there is nothing to compare"
