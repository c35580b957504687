"""The heads of a trained run, and of every run of a sweep with averages over the seeds of each variant."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tril.model.atomic_files import write_text
from tril.model.comparison import Comparison
from tril.model.formats import csv_text, markdown_table, plural
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens
from tril.scripts.experiments.losses import spread
from tril.scripts.experiments.sweep import Sweep, Variant, read_sweep

if TYPE_CHECKING:
    from tril.model.heads.ablation import Ablation

OF_A_MODEL = "heads.json heads.csv heads.png removal.csv removal.png attention.png attention.html".split()
OVER_TIME = "heads_over_time.png"  # of a run that has recorded its heads
OF_A_SWEEP = ("heads.csv", "averages.csv", "ranks.png")
SCOPE = (
    "This describes one trained model on one text, not its configuration: another seed gives other heads. "
    "python scripts/heads.py dir=SWEEP averages over the seeds of a sweep."
)
EXPLAINED = (
    "Change of the loss in nats per token without a head: the sum over the heads of a layer, each removed alone, and "
    "the largest (rank 1), second largest, ... of a model; noise raises the first ranks and lowers the last ones. "
    "Means over seeds, with intervals over seeds and text that hold together in 95 % for the rows of a variant. They "
    "do not test whether two variants differ."
)


def describe_model(path: Path, windows: int, prompt: str | None, seed: int, out: str | None, device: str) -> None:
    """Writes everything about the heads of one model, and prints its table.

    Args:
        path: of the checkpoint.
        windows: of the validation part, to measure on.
        prompt: the text whose attention maps are drawn; None: the start of the validation part.
        seed: of the repeated random sequences.
        out: the folder for the files; None: heads/ in the run's folder.
    """
    from tril.model.heads.ablation import obstacle
    from tril.model.heads.description import HeadDescription, prompt_ids
    from tril.model.heads.head_plots import plot_records
    from tril.model.heads.records import read_maps, read_records
    from tril.model.training.hardware import use_device

    with user_errors():
        device = use_device(device)
        run = read_run(path)
        lm = run.checkpoint.language_model(device)
        if (problem := obstacle(lm.model)) is not None:
            raise ValueError(f"{path} {problem}; name another run")
        tokens = validation_tokens(run)
        numbers, text, clusters = sample_windows(run, tokens, windows)
        shown = prompt_ids(lm, tokens, prompt)
        records, (recorded, maps) = read_records(run_folder(path)), read_maps(run_folder(path))
        folder = writable(out or run_folder(path) / "heads", "out")
    log(f"{path} on {device}: {len(text.ids)} windows of {text.ids.shape[1]} tokens without each head")
    heads = HeadDescription(lm, text, clusters, shown, seed)
    about = {
        "describes": SCOPE,
        "checkpoint": os.path.relpath(path),
        "steps": run.checkpoint.step,
        "data_fingerprint": run.checkpoint.data["fingerprint"],
        "document_mask": bool(run.data.get("document_mask")),
        "settings": {"windows": windows, "seed": seed, "prompt": prompt, "device": device},
        "windows": {"of": "the validation part", "length": lm.config.context_length, "numbers": numbers.tolist()},
    }
    heads.write(folder, str(path), about, maps if recorded == shown else None)
    files = OF_A_MODEL
    if records is not None:
        plot_records(folder / OVER_TIME, records)
        files = [*files, OVER_TIME]
    for name, rows in zip(("heads.csv", "removal.csv"), heads.csv_rows(), strict=True):
        write_text(folder / name, csv_text(rows))
    print(
        f"{SCOPE}\n\n"
        f"Loss of the whole model: {heads.ablation.loss:.4f} nats per token over {windows} windows.\n"
        f"Change of the loss without a head, the most important head first, with an interval over "
        f"{clusters.describe()};\nthe intervals of all {len(heads.ablation.order)} heads hold together in 95 %, and "
        "more windows make them narrower.\n"
        f"Then what the head attends to (induction: on {heads.scores.induction_length} random tokens, repeated):\n\n"
        f"{markdown_table(heads.table(), (0, 2))}\n\n{folder}: {', '.join(files)}",
        flush=True,
    )


def describe_sweep(path: Path, windows: int, out: str | None, device: str) -> None:
    """Removes the heads of every run of a sweep; writes heads.csv, averages.csv and ranks.png, prints the averages.

    Args:
        path: of the sweep.
        windows: of the validation part, to measure losses on.
        out: the folder for the files; None: heads/ in the sweep's folder.
    """
    from tril.model.heads.ablation import average
    from tril.model.heads.head_plots import plot_ranks
    from tril.model.training.hardware import use_device

    with user_errors():
        device = use_device(device)
        sweep = read_sweep(path)
        runs, remarks = finished_runs(sweep, windows)
        folder = writable(out or path / "heads", "out")
    rows, measured = [], {}
    for number, (variant, seed, run) in enumerate(runs, 1):
        log(f"{number} of {len(runs)}: {variant.label}, seed {seed}, on {device}")
        ablation = measure(run, windows, device)
        if isinstance(ablation, str):
            remarks.append(f"{variant.label}, seed {seed}, {ablation}: left out.")
            continue
        measured.setdefault(variant.label, []).append(ablation)
        name = {"variant": variant.label, **variant.values, "seed": seed, "loss": ablation.loss}
        rows += [name | row | ablation.clusters.counts() for row in ablation.head_rows()]
    if not measured:
        with user_errors():
            raise ValueError(f"{path} has no run whose heads can be removed. {' '.join(remarks)}")
    averages: dict[str, dict[str, Comparison]] = {label: average(group) for label, group in measured.items()}
    values = {variant.label: variant.values for variant in sweep.variants}
    lines, average_rows = [["variant", "without", "change of the loss", "the model is then"]], []
    for label, quantity, each in ((label, *item) for label, group in averages.items() for item in group.items()):
        change, (low, high) = each.difference, (each.difference.low, each.difference.high)
        row = {"variant": label, **values[label], "quantity": quantity, "change": change.mean, "low": low, "high": high}
        average_rows.append(row | {"verdict": each.verdict, "seeds": each.seeds})
        lines.append([label, quantity, spread(change, "+"), each.verdict])
    write_text(folder / "heads.csv", csv_text(rows))
    write_text(folder / "averages.csv", csv_text(average_rows))
    plot_ranks(folder / "ranks.png", averages)
    n_runs = plural(sum(map(len, measured.values())), "run")
    head = f"{n_runs} of {plural(len(averages), 'variant')}, {windows} windows each.\n{EXPLAINED}"
    print("\n\n".join([head, markdown_table(lines, (0, 1)), *["\n".join(remarks)] * bool(remarks)]))
    print(f"\n{folder}: {', '.join(OF_A_SWEEP)}", flush=True)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def finished_runs(sweep: Sweep, windows: int) -> tuple[list[tuple[Variant, int, TrainedRun]], list[str]]:
    """The finished runs, and remarks on the others. Each is checked, so that no error comes after hours of measuring.

    Raises:
        OSError: a run has no checkpoint.
        ValueError: no run is finished, the text has changed, or it has fewer windows.
    """
    runs, remarks = [], []
    for variant, planned in ((each, run) for each in sweep.variants for run in each.runs):
        if planned.state != "finished" or planned.diverged:
            problem = "diverged" if planned.state == "finished" else f"is {planned.state}"
            remarks.append(f"{variant.label}, seed {planned.seed}, {problem}: left out.")
            continue
        run = read_run(find_checkpoint(planned.folder))
        sample_windows(run, validation_tokens(run), windows)
        runs.append((variant, planned.seed, run))
    if not runs:
        raise ValueError(f"{sweep.folder} has no finished run; let one finish. {' '.join(remarks)}")
    return runs, remarks


def measure(run: TrainedRun, windows: int, device: str) -> "Ablation | str":
    """The ablation of a run's heads, or why it has none."""
    from tril.model.heads.ablation import ablate, obstacle

    with user_errors():
        lm = run.checkpoint.language_model(device)
        tokens = validation_tokens(run)
    if (problem := obstacle(lm.model)) is not None:
        return problem
    _, text, clusters = sample_windows(run, tokens, windows)
    return ablate(lm.model, text, clusters)
