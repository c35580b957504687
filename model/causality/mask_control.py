"""Compares a run with the causal mask to the same run without it, as a Markdown page and a plot.

A side is what is known about one of the two runs: {"parameters": int, "curves": see `read_curves`, "one_pass",
"prefix_only", "gap": Intervals of the loss in nats per token, "samples": [[prompt, continuation], ...]}.
"""

import textwrap
from pathlib import Path

SIDES = ("masked", "unmasked")
COLORS = {"masked": "tab:blue", "unmasked": "tab:orange"}

Curve = list[tuple[int, float]]  # (step, nats per token)


def read_curves(folder: str | Path) -> dict[str, Curve]:
    """{"train": ..., "val": ...} from the log of a run's CSV logger; of a resumed run, the newer rows count.

    Raises:
        FileNotFoundError: the run has no such log.
        ValueError: the log has no training or no validation loss.
    """
    import pandas as pd

    files = sorted(Path(folder).glob("csv/version_*/metrics.csv"), key=lambda f: int(f.parent.name.split("_")[1]))
    if not files:
        raise FileNotFoundError(f"{folder} has no csv/version_*/metrics.csv; name the folder of a run of train.py")
    log = pd.concat(map(pd.read_csv, files))
    curves = {}
    for name in ("train", "val"):
        rows = log.reindex(columns=["step", f"{name}/loss"]).dropna().drop_duplicates("step", keep="last")
        if rows.empty:
            remedy = "let the run reach its first logged step and its first validation"
            raise ValueError(f"{files[-1]} has no {name}/loss; {remedy}")
        curves[name] = [(int(step), loss) for step, loss in rows.sort_values("step").itertuples(index=False)]
    return curves


def page(sides: dict[str, dict], table: str, remark: str) -> str:
    """Markdown: a remark on the measurement, the table, the plot, and the text that both models generate."""
    parts = ["# With and without the causal mask", remark, table, "![Losses of both runs](control.png)"]
    for number, (prompt, _) in enumerate(sides[SIDES[0]]["samples"]):
        parts.append(f"## Continuations of `{prompt!r}`")
        for name in SIDES:
            text = "".join(sides[name]["samples"][number])
            parts += [f"{name}:", textwrap.indent(text, "    ", lambda line: True)]
    return "\n\n".join(parts) + "\n"


def plot(path: str | Path, sides: dict[str, dict], uniform: float) -> None:
    """Writes a PNG: on the left the training loss, on the right the one-pass and the prefix-only loss.

    Args:
        uniform: ln V, the loss of a uniform guess, drawn into both.
    """
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in SIDES:
        left.plot(*zip(*sides[name]["curves"]["train"], strict=True), lw=1.4, color=COLORS[name], label=name)
    left.set(title="what training reports", xlabel="step", ylabel="training loss, nats per token")
    bars = [(name, key) for name in SIDES for key in ("one_pass", "prefix_only")]
    estimates = [sides[name][key] for name, key in bars]
    drawn = right.bar(
        [0, 1, 2.4, 3.4],
        [estimate.mean for estimate in estimates],
        yerr=[estimate.half_width for estimate in estimates],
        color=[(COLORS[name], 0.4 if key == "one_pass" else 1.0) for name, key in bars],
        tick_label=[f"{name},\n{key.replace('_', ' ')}" for name, key in bars],
    )
    right.bar_label(drawn, [f"{estimate.mean:.2f}" for estimate in estimates], padding=3)
    right.set(title="the same models on validation text, 95 % intervals", ylabel="loss, nats per token")
    for axes in (left, right):
        axes.axhline(uniform, color="gray", ls="--", lw=1, label=f"ln V = {uniform:.2f}: a uniform guess")
        axes.set_ylim(0, 1.18 * max(axes.get_ylim()[1], uniform))
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    left.legend()
    right.legend(*([entries[-1]] for entries in left.get_legend_handles_labels()), loc="upper left")
    figure.savefig(path, dpi=130)
