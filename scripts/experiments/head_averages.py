"""Removes the heads of every run of a sweep and averages over the seeds of each variant.

Heads have no identity across seeds, so what is averaged does not depend on their numbers: the rise of the loss summed
over the heads of a layer, each removed alone, and the sorted rises. Both are losses of documents like any others, the
baseline being the whole model, so `compare` gives their intervals over seeds and text.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tril.model.atomic_files import write_text
from tril.model.comparison import Comparison, compare
from tril.model.runs import find_checkpoint
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens
from tril.scripts.cli.formats import csv_text, markdown_table, plural
from tril.scripts.experiments.losses import spread
from tril.scripts.experiments.sweep import Run, Sweep, Variant, read_sweep

if TYPE_CHECKING:
    from tril.model.heads.ablation import Ablation

FILES = ("heads.csv", "averages.csv", "ranks.png")
EXPLAINED = (
    "Change of the loss in nats per token without a head: the sum over the heads of a layer, each removed alone, and "
    "the largest (rank 1), second largest, ... of a model; noise raises the first ranks and lowers the last ones. "
    "Means over seeds, with intervals over seeds and text that hold together in 95 % for the rows of a variant. They "
    "do not test whether two variants differ."
)

Measured = dict[str, list[tuple[int, "Ablation"]]]  # label of a variant -> seed and ablation of its runs


def describe_sweep(path: Path, windows: int, out: str | None, device: str, log: Callable[[str], None]) -> None:
    """Writes heads.csv, averages.csv and ranks.png, and prints the averages.

    Args:
        path: of the sweep.
        windows: of the validation part, to measure losses on.
        out: the folder for the files; None: heads/ in the sweep's folder.
        log: prints a line of progress.
    """
    with user_errors():
        sweep = read_sweep(path)
        runs, remarks = finished_runs(sweep, windows)
        folder = writable(out or path / "heads", "out")
    measured: Measured = {}
    for number, (variant, seed, run) in enumerate(runs, 1):
        log(f"{number} of {len(runs)}: {variant.label}, seed {seed}, on {device}")
        ablation = measure(run, windows, device)
        if isinstance(ablation, str):
            remarks.append(f"{variant.label}, seed {seed}, {ablation}: left out.")
        else:
            measured.setdefault(variant.label, []).append((seed, ablation))
    with user_errors():
        if not measured:
            raise ValueError(f"{path} has no run whose heads can be removed. {' '.join(remarks)}")
    averages = {label: average([ablation for _, ablation in group]) for label, group in measured.items()}
    values = {variant.label: variant.values for variant in sweep.variants}
    write_text(folder / "heads.csv", csv_text(head_rows(measured, values)))
    write_text(folder / "averages.csv", csv_text(average_rows(averages, values)))
    plot_ranks(folder / "ranks.png", averages)
    n_runs = sum(map(len, measured.values()))
    head = f"{plural(n_runs, 'run')} of {plural(len(averages), 'variant')}, {windows} windows each.\n{EXPLAINED}"
    print("\n\n".join([head, markdown_table(table(averages), (0, 1)), *["\n".join(remarks)] * bool(remarks)]))
    print(f"\n{folder}: {', '.join(FILES)}", flush=True)


def finished_runs(sweep: Sweep, windows: int) -> tuple[list[tuple[Variant, int, TrainedRun]], list[str]]:
    """The finished runs, and remarks on the others. Each is checked, so that no error comes after hours of measuring.

    Raises:
        OSError: a run has no checkpoint.
        ValueError: no run is finished, the text has changed, or it has fewer windows.
    """
    runs, remarks = [], []
    for variant in sweep.variants:
        for planned in variant.runs:
            if (problem := missing(planned)) is not None:
                remarks.append(f"{variant.label}, seed {planned.seed}, {problem}: left out.")
                continue
            run = read_run(find_checkpoint(planned.folder))
            sample_windows(run, validation_tokens(run), windows)
            runs.append((variant, planned.seed, run))
    if not runs:
        raise ValueError(f"{sweep.folder} has no finished run; let one finish. {' '.join(remarks)}")
    return runs, remarks


def missing(run: Run) -> str | None:
    """Why a run has no heads to remove, if that is known without its checkpoint."""
    if run.state != "finished":
        return f"is {run.state}"
    return "diverged" if run.diverged else None


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


def average(ablations: "Sequence[Ablation]") -> dict[str, Comparison]:
    """What is comparable over seeds, such as "layer 0" or "rank 1" -> compared with the whole model."""
    first, losses = ablations[0], []
    kept = first.clusters.targets.numpy() > 0
    sizes = first.clusters.targets.numpy()[kept]
    n_layers, n_heads, _ = first.single.shape
    for ablation in ablations:  # losses of documents: of the whole model, by layer, by rank
        whole, single = ablation.whole.numpy()[kept], ablation.single.numpy()[..., kept]  # (G,), (L, H, G)
        layers = whole + (single - whole).sum(1)  # (L, G)
        ranked = [single[head] for head in reversed(ablation.order)]
        losses.append(np.stack([whole, *layers, *ranked]) / sizes)
    names = [*(f"layer {layer}" for layer in range(n_layers)), *(f"rank {n}" for n in range(1, n_layers * n_heads + 1))]
    return dict(zip(names, compare(np.stack(losses, 1), sizes), strict=True))


def head_rows(measured: Measured, values: dict[str, dict]) -> Iterator[dict[str, Any]]:
    """One row for each head of each run."""
    for label, group in measured.items():
        for seed, ablation in group:
            name = {"variant": label, **values[label], "seed": seed, "loss": ablation.loss}
            yield from (name | row | ablation.clusters.counts() for row in ablation.head_rows())


def average_rows(averages: dict[str, dict[str, Comparison]], values: dict[str, dict]) -> Iterator[dict[str, Any]]:
    """One row for each average of each variant."""
    for label, of_variant in averages.items():
        for name, each in of_variant.items():
            row = {"variant": label, **values[label], "quantity": name, "change": each.difference.mean}
            row |= {"low": each.difference.low, "high": each.difference.high}
            yield row | {"verdict": each.verdict, "seeds": each.seeds}


def table(averages: dict[str, dict[str, Comparison]]) -> list[list[str]]:
    """A row for each average of each variant."""
    rows = [["variant", "without", "change of the loss", "the model is then"]]
    for label, of_variant in averages.items():
        rows += [[label, name, spread(each.difference, "+"), each.verdict] for name, each in of_variant.items()]
    return rows


def plot_ranks(path: Path, averages: dict[str, dict[str, Comparison]]) -> None:
    """PNG: the rises of single heads from the largest to the smallest, a line with its intervals for each variant."""
    from tril.scripts.experiments.plots import COLORS, DPI, add_legend, new_axes

    axes, styles = new_axes(3.6), {}
    for i, (label, of_variant) in enumerate(averages.items()):
        ranks = [each.difference for name, each in of_variant.items() if name.startswith("rank")]
        styles[label] = {"color": COLORS[i % len(COLORS)], "marker": "o"}
        bars = [0.0 if interval.low is None else interval.half_width for interval in ranks]
        means = [interval.mean for interval in ranks]
        axes.errorbar(range(1, len(ranks) + 1), means, bars, ms=3, lw=1.2, capsize=2, **styles[label])
    axes.axhline(0, color="0.6", lw=0.8, zorder=0)
    axes.set(xlabel="rank of the head", ylabel="rise of the loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    add_legend(axes.figure, styles)
    axes.figure.savefig(path, dpi=DPI)  # pyright: ignore[reportAttributeAccessIssue] a Figure
