"""Removes the heads of every run of a sweep and averages over the seeds of each variant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.model.atomic_files import write_json, write_text
from tril.model.runs import find_checkpoint
from tril.scripts.ablation.head_average_plots import draw_averages
from tril.scripts.ablation.results import Sweep, Variant, read_sweep
from tril.scripts.cli.config import flatten
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens
from tril.scripts.cli.formats import csv_text, markdown_table, plural
from tril.scripts.experiments.losses import spread

if TYPE_CHECKING:
    from tril.model.heads.ablation import Ablation
    from tril.model.heads.seed_averages import Averages

INTERVALS = (
    "95 % over seeds, by Student's t, for one figure alone. All runs of a variant are measured on the same text, so "
    "the intervals say nothing about another text, and they do not test whether two variants differ."
)
COMPARABLE = (
    "Heads have no identity across seeds, so what is averaged does not depend on their numbers: sums over the heads of "
    "a layer, the sorted rises, how many heads raise the loss, and the loss without the k least important heads, in "
    "each model's own order."
)


@dataclass(frozen=True)
class Model:
    """A finished run of a variant, and its ablation."""

    variant: Variant
    seed: int
    run: TrainedRun
    ablation: "Ablation"


def describe_sweep(path: Path, windows: int, out: str | None, device: str, log: Callable[[str], None]) -> None:
    """Writes heads.csv, averages.csv, heads.json and the figures, and prints the main tables.

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
    models = []
    for number, (variant, seed, run) in enumerate(runs, 1):
        log(f"{number} of {len(runs)}: {variant.label}, seed {seed}, on {device}")
        ablation = measure(run, windows, device)
        if isinstance(ablation, str):
            remarks.append(f"{variant.label}, seed {seed}, {ablation}: left out.")
        else:
            models.append(Model(variant, seed, run, ablation))
    with user_errors():
        if not models:
            raise ValueError(f"{path} has no run whose heads can be removed. {' '.join(remarks)}")
    averages = averages_of(models)
    remarks += texts_remark(models)
    write_text(folder / "heads.csv", csv_text(head_table(models)))
    write_text(folder / "averages.csv", csv_text(average_table(models, averages)))
    write_json(folder / "heads.json", report(models, averages, windows, device, remarks))
    pictures = draw_averages(sweep, averages, folder)
    print(printed(models, averages, windows, remarks))
    print(f"\n{folder}: {', '.join(['heads.csv', 'averages.csv', 'heads.json', *pictures])}", flush=True)


def finished_runs(sweep: Sweep, windows: int) -> tuple[list[tuple[Variant, int, TrainedRun]], list[str]]:
    """The finished runs, and remarks on the others. Each is checked, so that no error comes after hours of measuring.

    Raises:
        OSError: a run has no checkpoint.
        ValueError: no run is finished, the text has changed, or it has fewer windows.
    """
    runs, remarks = [], []
    for variant in sweep.variants:
        for planned in variant.runs:
            if planned.state != "finished":
                remarks.append(f"{variant.label}, seed {planned.seed}, is {planned.state}: left out.")
                continue
            if planned.summary and planned.summary.get("diverged"):
                remarks.append(f"{variant.label}, seed {planned.seed}, diverged: left out.")
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


def by_variant(models: list[Model]) -> dict[str, list[Model]]:
    """Label -> the models of a variant."""
    groups: dict[str, list[Model]] = {}
    for model in models:
        groups.setdefault(model.variant.label, []).append(model)
    return groups


def averages_of(models: list[Model]) -> dict[str, "Averages"]:
    """Label of each variant -> its averages over seeds."""
    from tril.model.heads.seed_averages import average

    return {label: average([model.ablation for model in group]) for label, group in by_variant(models).items()}


def texts_remark(models: list[Model]) -> list[str]:
    """A remark if the models were not all measured on the same windows."""
    texts = {(m.run.checkpoint.data["fingerprint"], m.run.checkpoint.config.context_length) for m in models}
    if len(texts) == 1:
        return []
    return ["The runs differ in their text, tokenizer or window length, so their nats per token do not compare."]


def head_table(models: list[Model]) -> Iterator[dict[str, Any]]:
    """One row for each head of each run."""
    from tril.model.heads.ablation_rows import head_rows

    for model in models:
        name = {"variant": model.variant.label, **model.variant.values, "seed": model.seed}
        for row in head_rows(model.ablation):
            yield name | flatten(row, "_") | model.ablation.clusters.counts()


def average_table(models: list[Model], averages: dict[str, "Averages"]) -> Iterator[dict[str, Any]]:
    """One row for each average of each variant."""
    for label, group in by_variant(models).items():
        for (method, quantity, index), interval in averages[label].items():
            yield {
                **{"variant": label, **group[0].variant.values, "by": method, "quantity": quantity, "index": index},
                **{"mean": interval.mean, "low": interval.low, "high": interval.high, "seeds": interval.n},
            }


def report(
    models: list[Model], averages: dict[str, "Averages"], windows: int, device: str, remarks: list[str]
) -> dict[str, Any]:
    """The content of heads.json."""
    from tril.model.heads.ablation_rows import head_rows, removal_rows
    from tril.model.heads.seed_averages import QUANTITIES

    return {
        "describes": COMPARABLE,
        "quantities": QUANTITIES,
        "intervals": INTERVALS,
        "settings": {"windows": windows, "device": device},
        "remarks": remarks,
        "averages": list(average_table(models, averages)),
        "runs": [
            {
                **{"variant": model.variant.label, "seed": model.seed, "checkpoint": str(model.run.checkpoint.path)},
                **{"steps": model.run.checkpoint.step, "loss": model.ablation.loss},
                "observations": {"unit": model.ablation.clusters.unit} | model.ablation.clusters.counts(),
                "heads": head_rows(model.ablation),
                "removal": {method: removal_rows(model.ablation, method) for method in model.ablation.orders},
            }
            for model in models
        ],
    }


def printed(models: list[Model], averages: dict[str, "Averages"], windows: int, remarks: list[str]) -> str:
    """Both tables and their explanation."""
    measured = sorted({model.ablation.clusters.describe() for model in models})
    parts = [
        f"{plural(len(models), 'run')} of {plural(len(averages), 'variant')}, {windows} windows each.\n{COMPARABLE}",
        "Rise of the loss in nats per token when heads are removed, as the mean over seeds ± the half width of its "
        f"interval.\nIntervals: {INTERVALS}\nWhich heads raise the loss (corrected for the number of heads) is decided "
        f"in each run by its interval over {'; or '.join(measured)}.",
        markdown_table(summary_table(averages), text_columns=(0, 1)),
        "Sum over the heads of a layer, each removed alone:",
        markdown_table(layer_table(averages), text_columns=(0, 1)),
    ]
    return "\n\n".join(parts + ["\n".join(remarks)] * bool(remarks))


def summary_table(averages: dict[str, "Averages"]) -> list[list[str]]:
    """A row for each variant and method."""
    from tril.model.heads.ablation import METHODS
    from tril.model.heads.seed_averages import WHOLE

    header = ["variant", "removed by", "seeds", "loss of the whole model", "heads", "heads that raise the loss"]
    rows = [[*header, "largest rise", "smallest rise", "sum of all rises", "half removed", "all removed"]]
    for label, values in averages.items():
        for method in METHODS:
            n = max(index for by, quantity, index in values if (by, quantity) == (method, "rank"))
            loss = values[WHOLE, "loss", 0]
            rising = values[method, "rising", 0]
            keys = [("rank", 1), ("rank", n), ("sum", 0), ("removed", n // 2), ("removed", n)]
            rises = [spread(values[method, *key], sign="+") for key in keys]
            rows.append([label, method, str(loss.n), spread(loss), str(n), counted(rising), *rises])
    return rows


def counted(interval) -> str:
    """The mean of a count: 3.7 ± 1.4."""
    half = None if interval.high is None else interval.high - interval.mean
    return f"{interval.mean:.1f}" + ("" if half is None else f" ± {half:.1f}")


def layer_table(averages: dict[str, "Averages"]) -> list[list[str]]:
    """A row for each variant and method, a column for each layer."""
    from tril.model.heads.ablation import METHODS

    n_layers = 1 + max(index for values in averages.values() for _, quantity, index in values if quantity == "layer")
    rows = [["variant", "removed by", *(f"layer {layer}" for layer in range(n_layers))]]
    for label, values in averages.items():
        for method in METHODS:
            sums = [values.get((method, "layer", layer)) for layer in range(n_layers)]
            rows.append([label, method, *(spread(interval, sign="+") for interval in sums)])
    return rows
