"""The description at the start of a run, and at its end the loss plot, summary.json and the lines on the screen."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from tril.data.settings import printable
from tril.model.atomic_files import write_json, write_picture
from tril.model.checkpoint import code_sha256
from tril.model.formats import clock, engineering, figures, plural, shell_command
from tril.model.gpt import sizes
from tril.model.runs import ROOTS, SUMMARY, partial_validation
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule
from tril.model.training.optim import DECAYS, suitable_decay

MANY_PASSES = 2  # over a text, from which weight decay lowers the loss


def describe(trainer: Trainer, module: TrainingModule) -> str:
    """The lines printed before a run: four, and a warning."""
    data, model, hardware, steps = module.data, module.model, Metrics.of(trainer).hardware, trainer.max_steps
    meta = data.meta
    of_step = data.batch_size * data.context_length * trainer.accumulate_grad_batches * trainer.world_size
    train, val, total = meta["counts"]["train"]["tokens"], meta["counts"]["val"]["tokens"], steps * of_step
    threads = f", {plural(torch.get_num_threads(), 'thread')}" if hardware.accelerator == "cpu" else ""
    compiled = ", compiled (the first step takes a while)" if hardware.compile else ""
    lines = [
        f"model   {model.n_parameters():,} parameters, {model.n_parameters(embeddings=False):,} without embeddings; "
        f"{model.flops_per_token(data.lengths) / 1e6:,.1f} MFLOP per token",
        f"data    {meta['kind']}: {train:,} training tokens, {val:,} validation tokens, "
        f"vocabulary {meta['vocab_size']:,}",
        f"run     {plural(steps, 'step')} of {of_step:,} tokens = {engineering(total)} ({total / train:.2f} epochs) "
        f"on {hardware.device_name} ({hardware.accelerator}{threads}), {hardware.precision}{compiled}",
        f"folder  {trainer.default_root_dir}",
    ]
    if total / train > MANY_PASSES and module.optim.kind == "muon" and not module.optim.muon_weight_decay:
        decay = suitable_decay(module.optim, steps, total / train)
        advice = " ".join(f"optim.{name}={decay:g}" for name in DECAYS)
        lines.append(f"note    a text that is read so often is memorized; {advice} usually lowers the loss")
    return "\n".join(lines)


def summarize(
    trainer: Trainer, module: TrainingModule, *, diverged: str | None = None, stopped: str | None = None
) -> None:
    """Writes loss.png, then summary.json, which marks the run as finished, and prints the end of the run; on rank 0.

    Args:
        diverged: why the run ended early. Its final losses are NaN, and nothing is printed.
        stopped: why it made fewer steps than planned.
    """
    if not trainer.is_global_zero:
        return
    metrics, model, data, folder = Metrics.of(trainer), module.model, module.data, Path(trainer.default_root_dir)
    hardware, lineage = metrics.hardware, module.payload.get("lineage") or {}
    train, val = metrics.last("train/loss") or {}, metrics.last("val/loss") or {}  # max_time can stop before the first
    losses = {"final": {} if diverged else val, "best": metrics.best() if val else {"step": 0}}
    causality, n_targets = module.payload.get("certificate"), data.meta["counts"]["val"]["targets"]
    summary = {
        **{f"{name}_val_{x}": row.get(f"val/{x}", math.nan) for name, row in losses.items() for x in ("loss", "bpb")},
        "best_step": losses["best"]["step"],
        "val_windows": metrics.val_windows,
        "train_loss": train.get("train/loss"),
        "steps": trainer.global_step,
        "tokens": metrics.tokens,
        "tokens_per_second": metrics.tokens_per_second(),
        "mfu": metrics.mfu(trainer, metrics.tokens_per_second()),
        "seconds": metrics.wall_seconds(),
        "train_seconds": metrics.seconds(),
        "peak_memory_gb": peak_memory_bytes(hardware.accelerator) / 1e9,
        "device": f"{hardware.device_name} ({hardware.accelerator})",
        "precision": hardware.precision,
        "threads": torch.get_num_threads() if hardware.accelerator == "cpu" else None,
        **sizes(model, data.lengths),
        "context_length": model.config.context_length,
        "training_text_tokens": data.meta["counts"]["train"]["tokens"],
        "val_bytes_per_token": data.text.val_bytes(n_targets) / n_targets,
        "data_fingerprint": data.meta["fingerprint"],
        "seed": data.seed,
        "diverged": diverged,
        "stopped_early": stopped,
        "causality": "certified" if causality and causality["passed"] else "LEAKS" if causality else "not certified",
        "init_from": lineage.get("source"),
        "init_from_step": lineage.get("step"),
        "code": code_sha256()[:12],
        "folder": str(folder),
        "sample_with": shell_command("sample", f"ckpt={folder}"),
    }
    title = f"{model.n_parameters():,} parameters, {data.meta['kind']}\nrun {'/'.join(folder.absolute().parts[-2:])}"
    plot_losses(folder / "loss.png", metrics, title, initial=None if lineage else math.log(model.config.vocab_size))
    write_json(folder / SUMMARY, summary)
    if diverged is None:
        print(f"\n{show(summary)}", flush=True)


def show(summary: Mapping[str, Any]) -> str:
    """The lines at the end of a run: losses, time, what was unusual, the folder, and the commands that come next."""
    steps, seconds, folder = summary["steps"], summary["train_seconds"], Path(summary["folder"])
    is_latest = any(folder.absolute().is_relative_to(Path(root).absolute()) for root in ROOTS)
    sample, *others = (
        shell_command(name, f"ckpt={'latest' if is_latest else folder}") for name in ("sample", "heads", "play")
    )
    best = f"{figures(summary, 'best_val_')}, at step {summary['best_step']:,}, in best.ckpt"
    windows = partial_validation(summary["val_windows"])
    speed = f", {summary['tokens'] / seconds:,.0f} tokens/s" if seconds else ""
    spent = f"{plural(steps, 'step')}, {summary['tokens']:,} tokens in {clock(seconds)}{speed}"
    lines = {
        "validation": figures(summary, "final_val_"),
        "best": best if summary["best_step"] != steps else None,
        "note": windows and f"on {windows}, so do not compare with other runs (trainer.limit_val_batches)",
        "training": f"{spent}; {clock(summary['seconds'])} with validation and start",
        "causality": summary["causality"],
        "init from": summary["init_from"] and printable(summary["init_from"]),  # of somebody's checkpoint
        "stopped": summary["stopped_early"],
        "folder": f"{folder}: summary.json has all figures, loss.png the curve",
        "next": f"\n{' ' * 14}".join([f'{sample} prompt="..."', *others]),
    }
    return "\n".join(f"  {name:<10}  {text}" for name, text in lines.items() if text is not None)


def plot_losses(path: Path, metrics: Metrics, title: str, *, initial: float | None) -> None:
    """Plots the losses of training and validation.

    Args:
        path: of a PNG.
        initial: loss of uniform probabilities, where a run from random weights starts; None: it started from a model.
    """
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, size in (("train/loss", "training", 1), ("val/loss", "validation", 4)):
        if rows := metrics.rows(name):
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=label, marker="o", ms=size)
    if initial is not None:
        axes.axhline(initial, color="0.4", ls="--", lw=1, label=f"ln V = {initial:.2f}, the loss of a uniform guess")
    axes.set(xlabel="step", ylabel="loss, nats per token", xlim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=11, parse_math=False)
    figure.legend(fontsize=9, loc="outside lower center")  # never over a curve
    write_picture(path, figure, dpi=150)


def peak_memory_bytes(accelerator: str) -> float:
    """Peak memory of this process: tensors on CUDA, else the resident set with Python and torch; nan if unknown."""
    if accelerator == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # Linux: getrusage would include what the parent process had when it forked
    match = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.is_file() else None
    return int(match[1]) * 1024 if match else math.nan
