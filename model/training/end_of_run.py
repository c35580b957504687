"""The lines that a run prints at its end; summary.json has all of its figures."""

from typing import Any

from tril.model.runs import partial_validation

SHOWN_STEPS = 5


def show(summary: dict[str, Any]) -> str:
    """A dozen lines: losses, time, what was unusual, the folder, and the commands that come next."""
    steps, run = summary["steps"], summary["folder"]
    losses = f"{summary['final_val_bpb']:.4f} bits per byte, {summary['final_val_loss']:.4f} nats per token"
    if summary["best_step"] not in (steps, 0):
        losses += f"; best {summary['best_val_bpb']:.4f} at step {summary['best_step']:,}"
    if (part := partial_validation(summary["val_windows"])) is not None:
        losses += f"; on {part}, not comparable with other runs (trainer.limit_val_batches)"
    speed = summary["tokens_per_second"]
    rate = f", {speed:,.0f} tokens per second" if speed == speed else ""  # nan of a run without a logged step
    spent = (
        f"{steps:,} steps of {summary['tokens'] / max(1, steps):,.0f} tokens in {duration(summary['seconds'])}{rate}"
    )
    lines = [("validation", losses)]
    for name, source in (summary["sources"] or {}).items():
        part = f"{source['final_val_bpb']:.4f} bits per byte, {source['final_val_loss']:.4f} nats per token"
        lines.append(("", f"{part}; {source['epochs']:.2f} epochs: {name}"))
    if summary["old_loss_after"] is not None:
        before, after = summary["old_bpb_before"], summary["old_bpb_after"]
        change = f"{summary['old_loss_before']:.4f} before, {summary['old_loss_after']:.4f} after"
        lines.append(("old text", f"{before:.4f} bits per byte before, {after:.4f} after; nats per token {change}"))
    lines += [("training", spent), ("causality", summary["causality"])]
    if summary["init_from"] is not None:
        lines.append(("init from", summary["init_from"]))
    if summary["skipped_steps"] is not None and summary["skipped_steps"]["count"]:
        lines.append(("skipped", shown_steps(summary["skipped_steps"])))
    if summary["stopped_early"] is not None:
        lines.append(("stopped", summary["stopped_early"]))
    if summary["profile"] is not None:
        lines.append(("profile", summary["profile"]))
    lines.append(("folder", f"{run}: summary.json has all figures, loss.png the curve"))
    commands = (f'sample.py ckpt={run} prompt="..."', f"heads.py ckpt={run}", f"certify.py ckpt={run}")
    lines += [("next" if i == 0 else "", f"python scripts/{command}") for i, command in enumerate(commands)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)


def shown_steps(counted: dict[str, Any]) -> str:
    """Number of steps, and the first ones."""
    steps, more = counted["steps"][:SHOWN_STEPS], ", ..." if counted["count"] > SHOWN_STEPS else ""
    return f"{counted['count']:,} at step {', '.join(f'{step:,}' for step in steps)}{more}"


def duration(seconds: float) -> str:
    """Such as 58 s, 4 min 28 s, or 2 h 5 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
