"""Writes the folders of sweeps and runs as training leaves them, without training."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from tril.scripts.experiments.sweep import Sweep, read_sweep

BYTES_PER_TOKEN = 3.0
TOKENS_PER_STEP = 64
STEPS, EVERY = 100, 25  # length of a run and steps between two validations

Losses = np.ndarray | float | str  # of each window (n,), of all windows, or the state of an unfinished run


SEEDS = (0, 1, 2)
ONE, FOUR = (3.10, 3.16, 3.12), (3.00, 3.02, 3.07)
HEADS = {(1,): dict(zip(SEEDS, ONE, strict=True)), (4,): dict(zip(SEEDS, FOUR, strict=True))}


def sweep_of(folder, losses=HEADS, keys=("model.n_heads",), baseline=(4,), **options) -> Sweep:
    """A sweep that is written and read again, by default of two variants with three seeds."""
    return read_sweep(write_sweep(folder / "sweep", keys, losses, baseline=baseline, **options))


def write_sweep(
    folder: Path,
    keys: Sequence[str],
    losses: Mapping[tuple, Mapping[int, Losses]],
    *,
    baseline: tuple | None = None,
    context_length: int | Mapping[tuple, int] = 32,
    summary: Mapping[tuple, Mapping[str, object]] | None = None,
) -> Path:
    """Writes sweep.json and one folder for each run, and returns `folder`.

    For example write_sweep(path, ["model.n_heads"], {(1,): {0: 3.1}, (4,): {0: 3.0, 1: "failed"}}, baseline=(4,))

    Args:
        folder: of the sweep.
        keys: the swept keys, dotted, such as ("model.n_heads",).
        losses: values of the keys -> seed -> final losses in nats per token: (n,) one for each validation window, a
            number for all of them (8 windows), or "failed", "unfinished", "not started".
        baseline: values of the keys; None: the first.
        context_length: of all, or by values; each window has that many targets.
        summary: values -> more entries of summary.json, such as parameters and tokens_per_second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for values, seeds in losses.items():
        named = dict(zip(keys, values, strict=True))
        length = context_length if isinstance(context_length, int) else context_length[values]
        for seed, loss in seeds.items():
            overrides = [f"{key}={value}" for key, value in (named | {"seed": seed}).items()]
            name = ",".join(overrides)
            more = {
                "parameters": 1000,
                "parameters_without_embeddings": 800,
                "active_parameters": 900,
                "flops_per_token": 6000,
            }
            planned = more | {"estimated_seconds": 10.0}
            entries.append({"folder": name, "values": named, "seed": seed, "overrides": overrides, **planned})
            if not isinstance(loss, str) or loss != "not started":
                more |= (summary or {}).get(values, {})
                write_run(folder / name, loss, config=named, seed=seed, context_length=length, summary=more)
    defaults = dict(zip(keys, next(iter(losses)) if baseline is None else baseline, strict=True))
    (folder / "sweep.json").write_text(json.dumps({"swept": list(keys), "baseline": defaults, "runs": entries}))
    return folder


def write_run(
    folder: Path,
    loss: Losses,
    *,
    config: Mapping[str, object],
    seed: int,
    context_length: int = 32,
    summary: Mapping[str, object] | None = None,
) -> Path:
    """Writes one run's folder. The best validation is the one before the last; its loss is 0.01 lower.

    Args:
        folder: of the run.
        loss: of the windows at the last step.
        config: dotted keys, in addition to those that all runs have.
        seed: of the run.
        context_length: targets of each window.
        summary: more entries of summary.json.
    """
    folder.mkdir(parents=True)
    defaults = {
        "seed": seed,
        "output_dir": str(folder),
        "model.context_length": context_length,
        "callbacks.samples.seed": seed,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(nested(defaults | dict(config)), sort_keys=False))
    if isinstance(loss, str):
        write_curve(folder, [(EVERY, 5.0)])
        if loss == "failed":
            (folder / "failed.json").write_text(json.dumps({"status": 1, "message": "RuntimeError: out of memory"}))
        return folder
    nll = np.broadcast_to(np.asarray(loss, float), np.shape(loss) or (8,))
    targets = np.full(len(nll), context_length)
    final = float(np.sum(nll * targets) / np.sum(targets))
    write_curve(folder, [(EVERY, final + 1.0), (2 * EVERY, final + 0.3), (3 * EVERY, final - 0.01), (STEPS, final)])
    write_windows(folder / "windows_last.npz", nll, targets, STEPS, context_length)
    write_windows(folder / "windows_best.npz", nll - 0.01, targets, 3 * EVERY, context_length)
    figures = {
        "final_val_loss": final,
        "final_val_bpb": bpb(final),
        "best_val_loss": final - 0.01,
        "best_val_bpb": bpb(final - 0.01),
        "best_step": 3 * EVERY,
        "steps": STEPS,
        "tokens": STEPS * TOKENS_PER_STEP,
        "tokens_per_second": 1000.0,
        "seconds": 8.0,
        "peak_memory_gb": 0.5,
        "seed": seed,
        "context_length": context_length,
        "val_bytes_per_token": BYTES_PER_TOKEN,
        "data_fingerprint": "0123456789ab",
        "folder": str(folder),
    }
    (folder / "summary.json").write_text(json.dumps(figures | dict(summary or {})))
    return folder


def write_windows(path: Path, losses: np.ndarray, targets: np.ndarray, step: int, context_length: int) -> None:
    """losses (n,) in nats per token, targets (n,)."""
    np.savez(path, step=step, context_length=context_length, nll=losses * targets, targets=targets.astype(np.int64))


def write_curve(folder: Path, rows: Sequence[tuple[int, float]]) -> None:
    """Writes validation rows (step, loss) of a log, each after a training row."""
    path = folder / "csv" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as file:
        log = csv.DictWriter(
            file, ["lr/muon", "step", "train/loss", "train/tokens", "train/seconds", "val/bpb", "val/loss"]
        )
        log.writeheader()
        for step, loss in rows:
            tokens = {"train/tokens": float(step * TOKENS_PER_STEP), "train/seconds": step * 0.064}
            log.writerow({"lr/muon": 0.01, "step": step, "train/loss": loss + 0.1} | tokens)
            log.writerow({"step": step, "val/loss": loss, "val/bpb": bpb(loss)} | tokens)


def bpb(loss: float) -> float:
    """A loss in nats per token as bits per byte."""
    return loss / math.log(2) / BYTES_PER_TOKEN


def nested(flat: Mapping[str, object]) -> dict:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return tree
