"""The description at the start of a run, and at its end the loss plot, summary.json and the lines on the screen."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer

from tril.model.atomic_files import write_json
from tril.model.gpt import GPT
from tril.model.runs import SUMMARY, partial_validation
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.callbacks.stop_reason import stop_reason
from tril.model.training.errors import NonFiniteError
from tril.model.training.hardware import CUDA_GRAPHS, Hardware
from tril.model.training.loss_plot import plot_losses
from tril.model.training.module import TrainingModule, val_names
from tril.model.training.run_estimate import sizes
from tril.model.training.schedule import warmup_of
from tril.model.training.settings import EarlyStopConfig, ScheduleConfig

PACKAGE = Path(__file__).resolve().parents[2]
SPECIAL_TOKENS = {"bpe": 1, "byte": 1, "char": 2}  # end of text; of characters also the unknown one
MANY_PASSES = 10  # over its text, after which a model memorizes it
SHOWN_STEPS = 5  # of those that were skipped
NO_LOSS = {"step": 0, "loss": math.nan, "bpb": math.nan}


def describe(
    model: GPT,
    meta: dict[str, Any],
    hardware: Hardware,
    *,
    steps: int,
    tokens_per_step: int,
    schedule: ScheduleConfig,
    early_stop: EarlyStopConfig | None,
    folder: Path,
) -> str:
    """The lines printed before a run: four, one for each source of a mixture, and remarks.

    Args:
        meta: meta.json of the prepared data, or what `data.mixture.PreparedMixture` has of several.
        steps: optimizer steps of the run, each of `tokens_per_step` of all processes.
    """
    train, val, total = meta["counts"]["train"]["tokens"], meta["counts"]["val"]["tokens"], steps * tokens_per_step
    answers = f" ({sum(meta['targets'].values()):,} of them in answers)" if "targets" in meta else ""
    threads = f", {torch.get_num_threads()} threads" if hardware.accelerator == "cpu" else ""
    graphs = " with CUDA graphs" if hardware.compile == CUDA_GRAPHS else ""
    compiled = f", compiled{graphs} (the first step takes a while)" if hardware.compile else ""
    special = SPECIAL_TOKENS.get(meta["tokenizer"].get("kind"), 0)
    vocabulary = f"{meta['vocab_size'] - special:,}" + (f" + {special} special" if special else "")
    passes = 0 if "sources" in meta else total / train
    lines = [
        f"model   {model.n_parameters():,} parameters, {model.n_parameters(embeddings=False):,} without embeddings; "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP per token",
        f"data    {meta['source']['kind']}: {train:,} training tokens, {val:,} validation tokens{answers}, "
        f"vocabulary {vocabulary}",
    ]
    for name, source in meta.get("sources", {}).items():
        tokens, val = (source["counts"][split]["tokens"] for split in ("train", "val"))
        epochs = source["share"] * total / tokens
        share = f"{source['share']:.1%} of the tokens"
        lines.append(
            f"        {name}: {share}, {tokens:,} training tokens ({epochs:.2f} epochs), {val:,} validation tokens"
        )
    lines += [
        f"run     {steps:,} steps of {tokens_per_step:,} tokens = {total / 1e6:,.2f} M "
        f"{f'({passes:.2f} epochs) ' if passes else ''}"
        f"on {hardware.device_name} ({hardware.accelerator}{threads}), {hardware.precision}{compiled}",
        f"folder  {folder}",
    ]
    if (warmup := warmup_of(schedule, steps)) != schedule.warmup_steps:
        lines.append(
            f"note    optim.schedule.warmup_steps={schedule.warmup_steps} is longer than the run, so it is {warmup}"
        )
    if passes > MANY_PASSES:
        note = f"note    {passes:.0f} passes over the text: the model will memorize it; best.ckpt keeps the best"
        if early_stop is not None and early_stop.min_passes < passes:
            note += f", and {early_stop.patience} validations without a lower loss end the run (callbacks.early_stop)"
        lines.append(note)
    return "\n".join(lines)


def finish(
    trainer: Trainer,
    module: TrainingModule,
    data: dict[str, Any],
    folder: Path,
    *,
    hardware: Hardware,
    seed: int,
    sample: str,
    diverged: NonFiniteError | None = None,
    lineage: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Writes loss.png, then summary.json, which marks the run as finished, and prints the end of the run.

    Args:
        data: meta.json of the prepared data, and val_bytes_per_token.
        sample: the command that samples, such as "tril sample".
        diverged: why the run ended early. Its final losses are NaN, and nothing is printed.
        lineage: "source", "weights" and "step" of the model that the run started from; None: from random weights.
        more: further entries of summary.json.

    Returns:
        Last and best validation metrics.
    """
    metrics, gradients, model = Metrics.of(trainer), GradientNorms.of(trainer), module.model
    summary = {
        **losses(metrics, data, diverged),
        **work(metrics, hardware, diverged.step if diverged else trainer.global_step),
        **sizes(model),
        "context_length": model.config.context_length,
        "training_text_tokens": data["counts"]["train"]["tokens"],
        "val_bytes_per_token": data["val_bytes_per_token"],
        "data_fingerprint": data["fingerprint"],
        "seed": seed,
        "skipped_steps": gradients and {"count": len(gradients.skipped), "steps": gradients.skipped},
        "diverged": diverged and str(diverged),
        "stopped_early": None if diverged else stop_reason(trainer),
        "profile": next((str(path) for path in sorted(folder.glob("*profile.txt"))), None),
        "causality": causality_label(module.certificate),
        "init_from": lineage and lineage["source"],
        "init_from_weights": lineage and lineage["weights"],
        "init_from_step": lineage and lineage["step"],
        **(more or {}),
        "code": code_version(),
        "folder": str(folder),
        "sample_with": f"{sample} ckpt={folder}",
    }
    shape = f"({model.config.n_layers} layers, dim {model.config.dim}), {data['source']['kind']}"
    title = f"{model.n_parameters():,} parameters {shape}\nrun {'/'.join(folder.absolute().parts[-2:])}"
    initial = math.log(model.config.vocab_size) if lineage is None else None
    plot_losses(folder / "loss.png", metrics, title=title, initial=initial, gradients=gradients)
    write_json(folder / SUMMARY, summary)
    if diverged is None:
        print(f"\n{show(summary, sample)}", flush=True)
    return results_of(summary)


def losses(metrics: Metrics, data: dict[str, Any], diverged: NonFiniteError | None) -> dict[str, Any]:
    """The entries of summary.json for losses; "sources" has those of each source of a mixture."""
    best = metrics.best() if metrics.val else NO_LOSS
    last = NO_LOSS if diverged else metrics.val[-1]
    sources = {}
    for name, source in data.get("sources", {}).items():
        train = source["counts"]["train"]["tokens"]
        sources[name] = {"share": source["share"], "training_tokens": train}
        sources[name]["epochs"] = source["share"] * metrics.tokens / train
        for prefix, row in (("final", last), ("best", best)):
            figures = row.get("sources", {}).get(name, NO_LOSS)
            sources[name] |= {f"{prefix}_val_{key}": figures[key] for key in ("loss", "bpb")}
    return {
        "final_val_loss": last["loss"],
        "final_val_bpb": last["bpb"],
        "best_val_loss": best["loss"],
        "best_val_bpb": best["bpb"],
        "best_step": best["step"],
        "val_windows": metrics.val_windows,
        "train_loss": metrics.train[-1]["loss"] if metrics.train else None,  # max_time can stop before the first row
        "sources": sources or None,
    }


def work(metrics: Metrics, hardware: Hardware, steps: int) -> dict[str, Any]:
    """The entries of summary.json for what was done, and on which machine."""
    return {
        "steps": steps,
        "tokens": metrics.tokens,
        "tokens_per_second": metrics.tokens_per_second(),
        "mfu": metrics.mfu(),
        "seconds": metrics.wall_seconds(),
        "train_seconds": metrics.spent()["train/seconds"],
        "peak_memory_gb": peak_memory_bytes(hardware.accelerator) / 1e9,
        "device": f"{hardware.device_name} ({hardware.accelerator})",
        "precision": hardware.precision,
        "threads": torch.get_num_threads() if hardware.accelerator == "cpu" else None,
    }


def results_of(summary: dict[str, Any]) -> dict[str, float]:
    """Last and best validation metrics in a summary.json, by the names under which they are logged."""
    results = {}
    for source, figures in [("", summary), *(summary.get("sources") or {}).items()]:
        for prefix, key in (("", "final"), ("best/", "best")):
            loss, bpb = val_names(source)
            results |= {prefix + loss: figures[f"{key}_val_loss"], prefix + bpb: figures[f"{key}_val_bpb"]}
    return results


def show(summary: dict[str, Any], sample: str) -> str:
    """The lines at the end of a run: losses, time, what was unusual, the folder, and the command that comes next."""
    steps, skipped = summary["steps"], summary["skipped_steps"]
    losses = f"{summary['final_val_bpb']:.4f} bits per byte, {summary['final_val_loss']:.4f} nats per token"
    if summary["best_step"] not in (steps, 0):
        best = f"{summary['best_val_bpb']:.4f} bits per byte, {summary['best_val_loss']:.4f} nats per token"
        losses += f"; best {best} at step {summary['best_step']:,} (best.ckpt)"
    if (windows := partial_validation(summary["val_windows"])) is not None:
        losses += f"; on {windows}, not comparable with other runs (trainer.limit_val_batches)"
    lines = [("validation", losses)]
    for name, source in (summary["sources"] or {}).items():
        figures = f"{source['final_val_bpb']:.4f} bits per byte, {source['final_val_loss']:.4f} nats per token"
        lines.append(("", f"{figures}; {source['epochs']:.2f} epochs: {name}"))
    if summary.get("old_loss_after") is not None:
        before, after = summary["old_bpb_before"], summary["old_bpb_after"]
        change = f"{summary['old_loss_before']:.4f} before, {summary['old_loss_after']:.4f} after"
        lines.append(("old text", f"{before:.4f} bits per byte before, {after:.4f} after; nats per token {change}"))
    seconds = summary["train_seconds"]
    speed = f", {summary['tokens'] / seconds:,.0f} tokens per second" if seconds else ""
    spent = f"{steps:,} steps, {summary['tokens']:,} tokens in {duration(seconds)}{speed}"
    lines.append(("training", f"{spent}; {duration(summary['seconds'])} with validation and start"))
    lines.append(("causality", summary["causality"]))
    if skipped and skipped["count"]:
        first = ", ".join(f"{step:,}" for step in skipped["steps"][:SHOWN_STEPS])
        lines.append(("skipped", f"{skipped['count']:,} at step {first}" + ", ..." * (skipped["count"] > SHOWN_STEPS)))
    lines += [
        (name, summary[key])
        for name, key in (("init from", "init_from"), ("stopped", "stopped_early"), ("profile", "profile"))
        if summary[key] is not None
    ]
    lines.append(("folder", f"{summary['folder']}: summary.json has all figures, loss.png the curve"))
    lines.append(("next", f'{sample} ckpt=latest prompt="..."'))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)


def duration(seconds: float) -> str:
    """Such as 58 s, 4 min 28 s, or 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def causality_label(certificate: dict[str, Any] | None) -> str:
    """The causality check in words."""
    if certificate is None:
        return "not certified"
    return "certified" if certificate["passed"] else "LEAKS, losses are false"


def code_version(package: Path = PACKAGE) -> str | None:
    """The commit of this checkout, with "+" if tracked files differ from it; None outside of git or in another
    repository."""

    def git(*command: str) -> str:
        arguments = ["git", "-C", str(package), *command]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.resolve():
            return None  # installed into a folder of somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory_bytes(accelerator: str) -> float:
    """Peak memory of this process: tensors on CUDA, else the resident set with Python and torch; nan on Windows."""
    if accelerator == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # Linux: getrusage would include what the parent process had when it forked
    if status.is_file() and (match := re.search(r"VmHWM:\s*(\d+)", status.read_text())):
        return int(match[1]) * 1024
    if sys.platform == "win32":
        return math.nan
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
