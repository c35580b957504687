"""The description at the start of a run, and at its end the loss plot, summary.json and the table on the screen."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tril.model.atomic_files import write_json
from tril.model.gpt import GPT
from tril.model.runs import SUMMARY
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.end_of_run import show
from tril.model.training.errors import NonFiniteError
from tril.model.training.hardware import CUDA_GRAPHS, Hardware
from tril.model.training.loss_plot import plot_losses
from tril.model.training.module import val_names
from tril.model.training.run_estimate import sizes

PACKAGE = Path(__file__).resolve().parents[2]
SPECIAL_TOKENS = {"bpe": 1, "byte": 1, "char": 2}  # end of text; of characters also the unknown one


def describe(
    model: GPT, meta: dict[str, Any], hardware: Hardware, steps: int, tokens_per_step: int, folder: Path
) -> str:
    """The four lines printed before a run, and one for each source of a mixture.

    Args:
        meta: meta.json of the prepared data, or what `data.mixture.PreparedMixture` has of several.
        steps: optimizer steps of the run.
    """
    train, val, total = meta["counts"]["train"]["tokens"], meta["counts"]["val"]["tokens"], steps * tokens_per_step
    answers = f" ({sum(meta['targets'].values()):,} of them in answers)" if "targets" in meta else ""
    threads = f", {torch.get_num_threads()} threads" if hardware.accelerator == "cpu" else ""
    graphs = " with CUDA graphs" if hardware.compile == CUDA_GRAPHS else ""
    compiled = f", compiled{graphs} (the first step takes a while)" if hardware.compile else ""
    mixed = "".join(f"        {name}: {text}\n" for name, text in source_texts(meta, total).items())
    return (
        f"model   {model.n_parameters():,} parameters, {model.n_parameters(embeddings=False):,} without embeddings; "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP per token\n"
        f"data    {meta['source']['kind']}: {train:,} training tokens, {val:,} validation tokens{answers}, "
        f"vocabulary {vocabulary(meta)}\n{mixed}"
        f"run     {steps:,} steps of {tokens_per_step:,} tokens = {total / 1e6:,.2f} M "
        f"{'' if mixed else f'({total / train:.2f} epochs) '}"
        f"on {hardware.device_name} ({hardware.accelerator}{threads}), {hardware.precision}{compiled}\n"
        f"folder  {folder}"
    )


def vocabulary(meta: dict[str, Any]) -> str:
    """The number of tokens, such as "65 + 2 special" of a tokenizer of Tril."""
    special = SPECIAL_TOKENS.get(meta["tokenizer"].get("kind"), 0)
    return f"{meta['vocab_size'] - special:,}" + (f" + {special} special" if special else "")


def source_texts(meta: dict[str, Any], tokens: int) -> dict[str, str]:
    """For each source of a mixture its share, its size, and how often a run of `tokens` training tokens reads it."""
    texts = {}
    for name, source in meta.get("sources", {}).items():
        train, val = (source["counts"][split]["tokens"] for split in ("train", "val"))
        epochs = source["share"] * tokens / train
        share = f"{source['share']:.1%} of the tokens"
        texts[name] = f"{share}, {train:,} training tokens ({epochs:.2f} epochs), {val:,} validation tokens"
    return texts


def source_figures(meta: dict[str, Any], tokens: int, last: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """For each source of a mixture its entry of summary.json.

    Args:
        tokens: training tokens of the run.
        last: row of `Metrics`, as `best`; a run that diverged has no sources in the last one.
    """
    figures = {}
    for name, source in meta.get("sources", {}).items():
        train = source["counts"]["train"]["tokens"]
        entry = {"share": source["share"], "training_tokens": train, "epochs": source["share"] * tokens / train}
        for prefix, row in (("final", last), ("best", best)):
            losses = row.get("sources", {}).get(name, {"loss": math.nan, "bpb": math.nan})
            entry |= {f"{prefix}_val_{key}": value for key, value in losses.items()}
        figures[name] = entry
    return figures


def finish(
    metrics: Metrics,
    model: GPT,
    folder: Path,
    *,
    hardware: Hardware,
    seed: int,
    data: dict[str, Any],
    seconds: float,
    certificate: dict[str, Any] | None,
    gradients: GradientNorms | None = None,
    diverged: NonFiniteError | None = None,
    stopped_early: str | None = None,
    lineage: dict[str, Any] | None = None,
    old_after: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Writes loss.png, then summary.json, which marks the run as finished, and prints the summary.

    Args:
        data: meta.json of the prepared data, and val_bytes_per_token.
        seconds: duration of the run.
        certificate: summary of the run's causality certificate; None: the run has none.
        gradients: the run's gradient norms; None: not measured.
        diverged: why the run ended early. Its final losses are NaN, and no table is printed.
        stopped_early: why the run made fewer steps than planned; None: it did not.
        lineage: "source", "weights" and "step" of the model that the run started from, and "old_text", its scores on
            the old text; None: from random weights.
        old_after: the scores on that text after training, "loss" and "bpb".

    Returns:
        Last and best validation metrics.
    """
    nowhere: dict[str, Any] = {"step": 0, "loss": math.nan, "bpb": math.nan}
    best = metrics.best() if metrics.val else nowhere
    last: dict[str, Any] = metrics.val[-1] if diverged is None else nowhere | {"step": diverged.step}
    summary = {
        "final_val_loss": last["loss"],
        "final_val_bpb": last["bpb"],
        "best_val_loss": best["loss"],
        "best_val_bpb": best["bpb"],
        "best_step": best["step"],
        "val_windows": metrics.val_windows,
        "train_loss": metrics.train[-1]["loss"] if metrics.train else None,  # max_time can stop before the first row
        "steps": last["step"],
        "tokens": last["step"] * metrics.tokens_per_step,
        "tokens_per_second": metrics.tokens_per_second(),
        "mfu": metrics.mfu(),
        "seconds": seconds,
        "peak_memory_gb": peak_memory_bytes(hardware.accelerator) / 1e9,
        **sizes(model),
        "context_length": model.config.context_length,
        "training_text_tokens": data["counts"]["train"]["tokens"],
        "val_bytes_per_token": data["val_bytes_per_token"],
        "data_fingerprint": data["fingerprint"],
        "sources": source_figures(data, last["step"] * metrics.tokens_per_step, last, best) or None,
        "seed": seed,
        "device": f"{hardware.device_name} ({hardware.accelerator})",
        "precision": hardware.precision,
        "threads": torch.get_num_threads() if hardware.accelerator == "cpu" else None,
        "skipped_steps": None if gradients is None else counted(gradients.skipped),
        "diverged": None if diverged is None else str(diverged),
        "stopped_early": stopped_early,
        "profile": next((str(path) for path in sorted(folder.glob("*profile.txt"))), None),
        "causality": causality_label(certificate),
        "init_from": None if lineage is None else lineage["source"],
        "init_from_weights": None if lineage is None else lineage["weights"],
        "init_from_step": None if lineage is None else lineage["step"],
        **old_losses((lineage or {}).get("old_text"), old_after),
        "code": code_version(),
        "folder": str(folder),
        "sample_with": f"python scripts/sample.py ckpt={folder}",
    }
    title = run_title(model, data, folder)
    initial = math.log(model.config.vocab_size) if lineage is None else None
    plot_losses(folder / "loss.png", metrics, title=title, initial=initial, gradients=gradients)
    write_json(folder / SUMMARY, summary)
    if diverged is None:
        print(f"\n{show(summary)}", flush=True)
    return results_of(summary)


def results_of(summary: dict[str, Any]) -> dict[str, float]:
    """Last and best validation metrics in a summary.json, by the names under which they are logged."""
    results = {}
    for source, figures in [("", summary), *(summary.get("sources") or {}).items()]:
        for prefix, key in (("", "final"), ("best/", "best")):
            loss, bpb = val_names(source)
            results |= {prefix + loss: figures[f"{key}_val_loss"], prefix + bpb: figures[f"{key}_val_bpb"]}
    return results


def old_losses(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, float | None]:
    """The entries of summary.json for the losses on the old text; all None if they were not measured."""
    named = {"before": before or {}, "after": after or {}}
    return {f"old_{key}_{when}": scores.get(key) for key in ("loss", "bpb") for when, scores in named.items()}


def run_title(model: GPT, data: dict[str, Any], folder: Path) -> str:
    """Model, data and name of a run, in two lines."""
    config, name = model.config, "/".join(folder.absolute().parts[-2:])
    sizes = f"{model.n_parameters():,} parameters ({config.n_layers} layers, dim {config.dim})"
    return f"{sizes}, {data['source']['kind']}\nrun {name}"


def counted(steps: list[int]) -> dict[str, Any]:
    """The entry of summary.json for a list of steps."""
    return {"count": len(steps), "steps": steps}


def causality_label(certificate: dict[str, Any] | None) -> str:
    """The causality check in words."""
    if certificate is None:
        return "not certified"
    return "certified" if certificate["passed"] else "LEAKS, losses are false"


def code_version(package: Path = PACKAGE) -> str | None:
    """The commit of this checkout, with "+" if files differ from it; None outside of git or in another repository."""

    def git(*command: str) -> str:
        arguments = ["git", "-C", str(package), *command]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.resolve():
            return None  # installed into a folder of somebody else's repository
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
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
