"""The control of the causal mask: one run with it and one without, side by side as a table, a page and a picture.

A side is what is known about one of the two: {"parameters": int, "curves": see `read_curves`, "one_pass", "honest", "gap": Estimates of
the loss in nats per token, "samples": [[prompt, continuation], ...]}.
"""

import csv
import math
import textwrap
from pathlib import Path

from tril.model.causality.prefix_loss import Estimate

SIDES = ("masked", "unmasked")
COLOURS = {"masked": "tab:blue", "unmasked": "tab:orange"}

Curve = list[tuple[int, float]]  # (step, nats per token)


def read_curves(folder: str | Path) -> dict[str, Curve]:
    """{"train": ..., "val": ...} as a run's CSV logger wrote them; where a run was resumed, the newer rows count.

    Raises FileNotFoundError for a run without that log, ValueError for one without a training or validation loss.
    """
    files = sorted(
        Path(folder).glob("csv/version_*/metrics.csv"), key=lambda file: int(file.parent.name.partition("_")[2])
    )
    if not files:
        raise FileNotFoundError(f"{folder} holds no csv/version_*/metrics.csv; train with logger=csv, the default")
    curves = {"train": {}, "val": {}}
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                for name, curve in curves.items():
                    if row.get(f"{name}/loss"):
                        curve[int(row["step"])] = float(row[f"{name}/loss"])
    for name, curve in curves.items():
        if not curve:
            raise ValueError(
                f"{files[-1]} has no {name}/loss; let the run reach its first logged step and its first validation"
            )
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def table(sides: dict[str, dict], bytes_per_token: float) -> str:
    """The two sides as a Markdown table that can also be read as it is."""

    def both(estimate: Estimate) -> str:
        return f"{estimate.mean:z.4f} ± {estimate.standard_error:.4f}"

    def bits(estimate: Estimate) -> str:
        return f"{estimate.mean / math.log(2) / bytes_per_token:.4f}"

    rows = {
        "parameters": lambda side: f"{side['parameters']:,}",
        "training loss, last logged": lambda side: f"{side['curves']['train'][-1][1]:.4f}",
        "validation loss, as the run logged it": lambda side: f"{side['curves']['val'][-1][1]:.4f}",
        "loss in one pass": lambda side: both(side["one_pass"]),
        "loss from the prefix alone (honest)": lambda side: both(side["honest"]),
        "honest minus one pass": lambda side: both(side["gap"]),
        "bits per byte in one pass": lambda side: bits(side["one_pass"]),
        "bits per byte, honest": lambda side: bits(side["honest"]),
    }
    cells = [["nats per token", *SIDES], *([name, *(row(sides[side]) for side in SIDES)] for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |" for line in cells
    ]
    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([lines[0], rule, *lines[1:]])


def page(sides: dict[str, dict], shown: str, remark: str) -> str:
    """The control as Markdown: a remark on how it came about, the table `shown`, the picture, what both models write."""
    parts = ["# With and without the causal mask", remark, shown, "![Losses of both runs](control.png)"]
    for number, (prompt, _) in enumerate(sides[SIDES[0]]["samples"]):
        parts.append(f"## Continuations of `{prompt!r}`")
        for name in SIDES:
            text = "".join(sides[name]["samples"][number])
            parts += [f"{name}:", textwrap.indent(text, "    ", lambda line: True)]
    return "\n\n".join(parts) + "\n"


def plot(path: str | Path, sides: dict[str, dict], uniform: float) -> None:
    """PNG. Left the training loss by steps, right the loss that is claimed and the honest one; `uniform` = ln V is drawn into both."""
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in SIDES:
        left.plot(*zip(*sides[name]["curves"]["train"]), lw=1.4, color=COLOURS[name], label=name)
    left.set(title="what training reports", xlabel="step", ylabel="training loss, nats per token")
    bars = [(name, key) for name in SIDES for key in ("one_pass", "honest")]
    estimates = [sides[name][key] for name, key in bars]
    right.bar_label(
        right.bar(
            [0, 1, 2.4, 3.4],
            [estimate.mean for estimate in estimates],
            yerr=[estimate.standard_error for estimate in estimates],
            color=[(COLOURS[name], 0.4 if key == "one_pass" else 1.0) for name, key in bars],
            tick_label=[f"{name},\n{'one pass' if key == 'one_pass' else 'prefix alone'}" for name, key in bars],
        ),
        [f"{estimate.mean:.2f}" for estimate in estimates],
        padding=3,
    )
    right.set(title="the same models on text that they have not seen", ylabel="loss, nats per token")
    for axes in (left, right):
        axes.axhline(uniform, color="grey", ls="--", lw=1, label=f"ln V = {uniform:.2f}: a uniform guess")
        axes.set_ylim(0, 1.18 * max(axes.get_ylim()[1], uniform))
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    left.legend()
    right.legend(*([entries[-1]] for entries in left.get_legend_handles_labels()), loc="upper left")
    figure.savefig(path, dpi=130)
