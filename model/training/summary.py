"""The end of a run: its losses in one picture, its figures in one file and on the screen."""

import math
import resource
import subprocess
import sys
from pathlib import Path

import torch

from tril.model.files import write_json
from tril.model.gpt import GPT
from tril.model.runs import SUMMARY
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import CUDA_GRAPHS, Hardware
from tril.model.training.run_estimate import sizes


def describe(
    model: GPT,
    meta: dict,
    hardware: Hardware,
    steps: int,
    tokens_per_step: int,
    folder: Path,
    kernels: dict[str, float] | None = None,
) -> str:
    """What is about to run, in four lines; `meta` is that of the prepared data, `kernels` are `model.training.kernels.measure`'s."""
    train, val, total = meta["counts"]["train"]["tokens"], meta["counts"]["val"]["tokens"], steps * tokens_per_step
    threads = f", {torch.get_num_threads()} threads" if hardware.accelerator == "cpu" else ""
    graphs = " with CUDA graphs" if hardware.compile == CUDA_GRAPHS else ""
    compiled = f", compiled{graphs} (the first step takes a while)" if hardware.compile else ""
    attention = ", attention by " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in kernels.items()) if kernels else ""
    return "\n".join(
        [
            f"model   {model.n_parameters():,} parameters, {model.n_parameters(embeddings=False):,} without embeddings; "
            f"{model.flops_per_token() / 1e6:,.1f} MFLOP per token",
            f"data    {meta['source']['kind']}: {train:,} tokens to train on, {val:,} to validate, vocabulary {meta['vocab_size']:,}",
            f"run     {steps:,} steps of {tokens_per_step:,} tokens = {total / 1e6:,.2f} M ({total / train:.2f} epochs) "
            f"on {hardware.device_name} ({hardware.accelerator}{threads}), {hardware.precision}{compiled}{attention}",
            f"folder  {folder}",
        ]
    )


def finish(
    metrics: Metrics,
    model: GPT,
    folder: Path,
    *,
    hardware: Hardware,
    seed: int,
    data: dict,
    seconds: float,
    causality: dict | None,
) -> dict[str, float]:
    """Writes loss.png and then summary.json, which says that the run is finished; shows it; returns the metrics that a caller compares.

    data       what meta.json says of the text, with val_bytes_per_token
    causality  the summary of the run's certificate; None where it had none
    """
    last, best = metrics.val[-1], metrics.best()
    summary = {
        "final_val_loss": last["loss"],
        "final_val_bpb": last["bpb"],
        "best_val_loss": best["loss"],
        "best_val_bpb": best["bpb"],
        "best_step": best["step"],
        "train_loss": metrics.train[-1]["loss"]
        if metrics.train
        else None,  # max_time may end a run before the first row
        "steps": last["step"],
        "tokens": last["step"] * metrics.tokens_per_step,
        "tokens_per_second": metrics.tokens_per_second(),
        "mfu": metrics.mfu(),
        "seconds": seconds,
        "peak_memory_gb": peak_memory_bytes(hardware.accelerator) / 1e9,
        **sizes(model),
        "context_length": model.config.context_length,
        "val_bytes_per_token": data["val_bytes_per_token"],
        "data_fingerprint": data["fingerprint"],
        "seed": seed,
        "device": f"{hardware.device_name} ({hardware.accelerator})",
        "precision": hardware.precision,
        "threads": torch.get_num_threads() if hardware.accelerator == "cpu" else None,
        "causality": "not certified"
        if causality is None
        else "certified"
        if causality["passed"]
        else "LEAKS, losses are false",
        "code": code_version(),
        "folder": str(folder),
        "sample_with": f"python scripts/sample.py ckpt={folder}",
    }
    plot_losses(folder / "loss.png", metrics.train, metrics.val, metrics.tokens_per_step)
    write_json(folder / SUMMARY, summary)
    print(f"\n{show(summary)}", flush=True)
    return {
        "val/loss": last["loss"],
        "val/bpb": last["bpb"],
        "best/val/loss": best["loss"],
        "best/val/bpb": best["bpb"],
    }


def code_version() -> str | None:
    """The commit of this checkout, with + where files differ from it; None outside of git."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", "-C", here, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


def peak_memory_bytes(accelerator: str) -> int:
    """Of this process so far: on CUDA the most that tensors took, elsewhere its largest resident size, Python and torch included."""
    if accelerator == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # Linux: getrusage would begin with what the parent process had when it forked
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def show(summary: dict) -> str:
    """The figures as an aligned table."""
    shown = {name.replace("_", " "): _format(value) for name, value in summary.items() if value is not None}
    width = max(map(len, shown))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in shown.items())


def _format(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return str(value)


def plot_losses(path: Path, train: list[dict], val: list[dict], tokens_per_step: int) -> None:
    """Training and validation loss against tokens, as a PNG. Rows as kept by `Metrics`."""
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [row["step"] * tokens_per_step for row in train],
        [row["loss"] for row in train],
        lw=1,
        color="tab:blue",
        label="training",
    )
    axes.plot(
        [row["step"] * tokens_per_step for row in val],
        [row["loss"] for row in val],
        "o-",
        color="tab:orange",
        label="validation",
    )
    if val:
        best = min(val, key=lambda row: row["loss"])
        axes.set_title(
            f"best validation loss {best['loss']:.4f} nats per token, {best['bpb']:.4f} bits per byte", fontsize=10
        )
    losses = [row["loss"] for row in train + val if math.isfinite(row["loss"])]
    if losses:  # the first steps fall from ln V: keep the later part readable
        axes.set_ylim(min(losses) - 0.1, min(max(losses), 2.5 * min(losses)) + 0.1)
    axes.set_xlabel("tokens")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
