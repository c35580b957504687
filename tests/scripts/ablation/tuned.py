"""Adds to a written sweep what `+tune=lr` leaves: trials, the choice of each variant, and its multiplier."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.scripts.experiments.synthetic import write_run

CURVES = {1: {0.5: 3.4, 1.0: 3.2, 2.0: 3.3}, 4: {0.5: 3.1, 1.0: 3.15, 2.0: None}}  # heads -> multiplier -> loss
SECONDS, FLOPS = 40.0, 6e9  # of the trials of one variant


def tune(folder: Path, curves: Mapping[int, Mapping[float, float | None]] = CURVES) -> Path:
    """Tunes a sweep over model.n_heads that `write_sweep` wrote; a loss of None: the trial failed."""
    index = json.loads((folder / "sweep.json").read_text())
    for cell in index["cells"]:
        heads, cell["tuning"] = cell["values"]["model.n_heads"], f"tune/model.n_heads={cell['values']['model.n_heads']}"
        chosen = best(curves[heads])
        if (config := folder / cell["folder"] / "config.yaml").is_file():
            settings = yaml.safe_load(config.read_text())
            config.write_text(yaml.safe_dump(settings | {"optim": {"lr_scale": chosen}}, sort_keys=False))
    for heads, curve in curves.items():
        arm = folder / f"tune/model.n_heads={heads}"
        for multiplier, loss in curve.items():
            trial = arm / f"lr_scale={multiplier:g},seed=1000"
            write_run(trial, "failed" if loss is None else loss, config={"model.n_heads": heads}, seed=1000)
        (arm / "chosen.json").write_text(json.dumps(choice(curve)))
    (folder / "sweep.json").write_text(json.dumps(index | {"tune": {"multipliers": [0.5, 1.0, 2.0], "seeds": [1000]}}))
    return folder


def best(curve: Mapping[float, float | None]) -> float:
    finite = {multiplier: loss for multiplier, loss in curve.items() if loss is not None}
    return min(finite, key=finite.__getitem__)


def choice(curve: Mapping[float, float | None]) -> dict:
    """The content of chosen.json."""
    return {
        "lr_scale": best(curve),
        "curve": [list(row) for row in sorted(curve.items())],
        "at_edge": best(curve) in (min(curve), max(curve)),
        "trials": len(curve),
        "failed": sum(loss is None for loss in curve.values()),
        "seconds": SECONDS,
        "training_flops": FLOPS,
    }
