"""Folders of runs and sweeps as training leaves them, and a stand-in for the processes that train."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml

from tests.contract.harness import TINY, run
from tril.model.atomic_files import write_json
from tril.scripts.experiments.sweep import Sweep, read_launches, read_sweep

BYTES = 3.0  # per token
STEPS, EVERY, TOKENS = 100, 25, 64  # steps of a run and between two validations, tokens of a step
HEADS = {(1,): dict(enumerate((3.10, 3.16, 3.12))), (4,): dict(enumerate((3.00, 3.02, 3.07)))}
SIZES = {"parameters": 1000, "parameters_without_embeddings": 800, "flops_per_token": 6000}


def bpb(loss: float) -> float:
    """Nats per token as bits per byte."""
    return loss / math.log(2) / BYTES


def finish_run(folder: Path, loss, *, length: int = 32, documents: tuple | None = None, **summary) -> None:
    """Writes the losses of the last validation, and summary.json. The best loss is 0.01 lower.

    Args:
        loss: nats per token of all eight windows, or of each.
        length: targets of a window.
        documents: nats per token and targets of each document; None: they were not kept.
        summary: further entries of summary.json.
    """
    each = np.broadcast_to(np.asarray(loss, float), np.shape(loss) or (8,))
    arrays = {"nll": each * length, "targets": np.full(len(each), length)}
    if documents is not None:
        arrays |= {"document_nll": np.multiply(*documents), "document_targets": documents[1]}
    np.savez(folder / "windows_last.npz", step=STEPS, context_length=length, **arrays)
    final = float(each.mean())
    figures = {"final_val_loss": final, "final_val_bpb": bpb(final), "best_step": STEPS - EVERY, "steps": STEPS}
    figures |= {"best_val_loss": final - 0.01, "best_val_bpb": bpb(final - 0.01), "tokens": STEPS * TOKENS}
    figures |= {"tokens_per_second": 1000.0, "seconds": 8.0, "val_bytes_per_token": BYTES, "data_fingerprint": "a"}
    entries = {key: None if value != value else value for key, value in (figures | summary).items()}
    write_json(folder / "summary.json", entries)  # atomic, as that of a run: others read it while it is written


def write_run(folder: Path, loss, config: Mapping[str, object] = {}, *, seed: int = 0, length=32, **more) -> Path:  # noqa: B006
    """Writes the folder of a run with dotted settings, whose loss may be "failed" or "unfinished"."""
    folder.mkdir(parents=True)
    settings: dict = {"seed": seed, "output_dir": str(folder), "model": {"context_length": length}}
    for key, value in config.items():
        group, name = key.split(".")
        settings.setdefault(group, {})[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    ended = not isinstance(loss, str)
    if ended:
        finish_run(folder, loss, length=length, **more)
    elif loss == "failed":
        (folder / "failed.json").write_text(json.dumps({"status": 1, "message": "RuntimeError: out of memory"}))
    final = np.mean(loss) if ended else 4.0
    (folder / "csv/version_0").mkdir(parents=True)
    with (folder / "csv/version_0/metrics.csv").open("w", newline="") as file:
        log = csv.DictWriter(file, ["heads/entropy/L0H0", "step", "train/loss", "train/tokens", "val/loss"])
        log.writeheader()
        for step, add in [(EVERY, 1.0), (2 * EVERY, 0.3), (3 * EVERY, -0.01), (STEPS, 0.0)][: 4 if ended else 1]:
            row = {"step": step, "train/tokens": step * TOKENS}
            log.writerows([row | {"train/loss": final + add + 0.1}, row | {"val/loss": final + add}])
    return folder


def write_sweep(folder: Path, losses, keys=("model.n_heads",), *, baseline=(4,), length=32, summary={}) -> Path:  # noqa: B006
    """Writes launches.jsonl and its runs; a run may be "not started" too.

    Args:
        losses: values of the keys -> seed -> loss.
        length: of all, or by values.
        summary: values -> further entries of summary.json.
    """
    entries = []
    for values, seeds in losses.items():
        named, n = dict(zip(keys, values, strict=True)), length[values] if isinstance(length, Mapping) else length
        for seed, loss in seeds.items():
            overrides = [f"{key}={value}" for key, value in (named | {"seed": seed}).items()]
            entry = {"folder": ",".join(overrides).replace("/", ""), "values": named, "seed": seed}
            entries.append(entry | {"arguments": overrides} | SIZES)
            if not isinstance(loss, str) or loss != "not started":
                more = SIZES | summary.get(values, {})
                write_run(folder / entries[-1]["folder"], loss, named, seed=seed, length=n, **more)
    launch = {"date": "2026-11-22", "command": "python train.py -m", "seeds": [0], "family": "a", "swept": list(keys)}
    launch |= {"baseline": dict(zip(keys, baseline, strict=True)), "runs": entries}
    (folder / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    return folder


def sweep_of(folder: Path, losses=HEADS, **options) -> Sweep:
    """A sweep that is written and read again."""
    return read_sweep(write_sweep(folder / "sweep", losses, **options))


def change(path: Path, **entries) -> None:
    """Sets entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def command(cwd: Path, *settings: str):
    """`train.py -m` in this process, on the text of the fixture `here`."""
    return run("train", "-m", *TINY, "data.path=text.txt", *settings, cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


def launches_of(cwd: Path) -> list[dict]:
    """Those of the only sweep."""
    [path] = cwd.glob("multirun/*/launches.jsonl")
    return read_launches(path.parent)


class Processes:
    """Takes the place of `launch.spawn`: each run ends at once.

    Attributes:
        outcome: settings as typed -> options of `finish_run`; or a status with the last line of the output.
        started: the settings of each run.
        commands: the words that started it.
    """

    def __init__(self, outcome: Callable[[dict], dict | tuple[int, str]]):
        self.outcome, self.started, self.commands = outcome, [], []

    def __call__(self, arguments, log) -> int:
        self.commands.append(arguments)
        settings, saved = dict(word.partition("=")[::2] for word in arguments), log.with_name("settings.json")
        if "resume" in settings:
            settings = json.loads(saved.read_text()) | settings
        saved.write_text(json.dumps(settings))
        (log.parent / "config.yaml").write_text("seed: 0\n")
        self.started.append(settings)
        outcome = self.outcome(settings)
        if isinstance(outcome, tuple):
            log.write_text(f"model ...\n{outcome[1]}\n")
            return outcome[0]
        finish_run(log.parent, **outcome)
        return 0
