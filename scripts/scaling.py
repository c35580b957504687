"""How the loss falls with parameters and tokens:  python scripts/scaling.py dir=multirun/DATE/TIME

Fits L(N, D) = E + A / N^alpha + B / D^beta to the finished cells of a sweep (python train.py -m +ablation=scaling), tests it on cells that
are left out, and says what it predicts for larger models. All keys: configs/scaling.yaml. Writes scaling.md, scaling.json and scaling.png.
"""

import json
import math
import os
import sys

from tril.model.runs import find_sweep
from tril.scripts.common.cli import entry, plain, user_errors, writable
from tril.scripts.common.tables import aligned

TEXTS = ("dir", "out")  # keys whose value is text as it was typed
SIZES = {
    "parameters_without_embeddings": "parameters without embeddings",
    "parameters": "all parameters",
}  # what may count as N
PREDICT = ("parameters", "tokens", "flops")
LAW = ("E", "A", "B", "alpha", "beta")
HELD_OUT = {  # of tril.scripts.ablation.scaling_law.held_out
    "one cell": "each cell, from all others",
    "largest size": "the largest size, from smaller ones alone",
    "longest runs": "the longest runs, from shorter ones alone",
}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
INTERVAL = "95 % interval"
CELLS = ["N", "D", "loss", "bits per byte", "law", "loss - law", "from the others"]
TESTS = ["left out", "cells", "mean error", "largest", "mean with sign", "mean, relative"]
LARGER = ["N", "D", "loss", INTERVAL, "bits per byte"]
OPTIMA = ["FLOPs", "N", INTERVAL, "D", "D / N", INTERVAL, "loss", INTERVAL]
COUNTED = [
    "N counts",
    "alpha",
    "beta",
    "E",
    "error, one cell",
    "error, largest size",
    "D / N at the largest run's FLOPs",
]
CAVEATS = (
    "All sizes have the same learning rates and batch: what suits some less bends the law. Text that is read more than once is worth less "
    "than new text, which the law does not know.",
    "6 N D leaves out the scores, and without embeddings the head too, which is most of the work of the smallest models: the two ways to "
    "count N can disagree about the best split.",
)


@entry("scaling", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        check(cfg)
        place = find_sweep(cfg["dir"])
    # OpenBLAS would share out matrices of five columns among threads, which wait for one another where a core is busy
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tril.scripts.ablation.results import read_sweep
    from tril.scripts.ablation.scaling_law import (  # importing numpy takes a moment: what is wrong above is said before
        cells_of,
        fit,
        resampled,
    )
    from tril.scripts.ablation.scaling_plots import plot

    with user_errors():
        sweep = read_sweep(place)
        cells = cells_of(sweep, cfg["size"])
        folder = writable(cfg["out"] or place, "out")
    print(f"fitting {len(cells)} cells, and {cfg['resamples']} copies of them with noise", file=sys.stderr, flush=True)
    law = fit(cells)
    resamples = resampled(cells, law, cfg["resamples"], cfg["seed"])
    found = findings(cfg, sweep, cells, law, resamples)
    text = write_up(found)
    (folder / "scaling.json").write_text(json.dumps(without_nan(found), indent=2) + "\n", encoding="utf-8")
    (folder / "scaling.md").write_text(text, encoding="utf-8")
    plot(folder / "scaling.png", cells, law, resamples)
    print(f"{text}\n{folder}: scaling.md, scaling.json, scaling.png", flush=True)


def check(cfg: dict) -> None:
    """Raises ValueError for values that no sweep could make right."""
    if cfg["dir"] is None:
        raise ValueError("dir is missing; give the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
    if cfg["size"] not in SIZES:
        raise ValueError(f"size={cfg['size']} must be one of {', '.join(SIZES)}")
    if not isinstance(cfg["resamples"], int) or cfg["resamples"] < 40:
        its = cfg["resamples"]
        raise ValueError(
            f"resamples={its} must be a whole number, at least 40: an interval leaves out one in forty at each end"
        )
    if not isinstance(cfg["seed"], int) or cfg["seed"] < 0:
        raise ValueError(f"seed={cfg['seed']} must be a whole number, 0 or above")
    for key in PREDICT:
        values = cfg["predict"][key] if isinstance(cfg["predict"], dict) else cfg["predict"]
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and 0 < value < math.inf for value in values
        ):
            raise ValueError(f"predict.{key}={values} must be a list of numbers above 0")


# ---------------------------------------------------------------- what is found, as it goes into scaling.json


def findings(cfg: dict, sweep, cells, law, resamples: list) -> dict:
    """All figures, unrounded. Losses in nats per token, intervals from the resamples."""
    from tril.scripts.ablation.scaling_law import errors, held_out, interval

    runs = [run for variant in sweep.variants for run in variant.runs]
    per_bpb = math.log(2) * next(run.summary["val_bytes_per_token"] for run in runs if run.summary)
    left_out, fitted = held_out(cells), law.loss(cells.parameters, cells.tokens)
    columns = {"parameters": cells.parameters, "tokens": cells.tokens, "loss": cells.loss, "bpb": cells.loss / per_bpb}
    columns |= {
        "seeds": cells.seeds,
        "spread": cells.spread,
        "fitted": fitted,
        "residual": cells.loss - fitted,
        **left_out,
    }
    rows = [
        {"cell": label, **dict(zip(columns, map(float, row)))}
        for label, row in zip(cells.labels, zip(*columns.values()))
    ]
    longest, flops = cells.tokens.max(), (6 * cells.parameters * cells.tokens).max()

    def predicted(of) -> dict:
        low, high = interval([of(each) for each in resamples])
        return {"value": float(of(law)), "low": low, "high": high}

    wanted = [(size, times * longest) for size in cfg["predict"]["parameters"] for times in cfg["predict"]["tokens"]]
    predictions = [
        {"parameters": n, "tokens": float(d), "loss": predicted(lambda each: each.loss(n, d))} for n, d in wanted
    ]
    return {
        "sweep": str(sweep.folder),
        "settings": {key: cfg[key] for key in ("size", "predict", "resamples", "seed")},
        "unfinished": [f"{run.folder.name} ({run.state})" for run in runs if run.state != "finished"],
        "diverged": [
            f"{v.label} (its loss is not finite)" for v in sweep.variants if v.finished and v.label not in cells.labels
        ],
        "nats_per_bpb": per_bpb,
        "cells": rows,
        "law": {name: predicted(lambda each: getattr(each, name)) for name in LAW},
        "bounds": list(law.bounds),
        "resamples_at_bounds": sum(bool(each.bounds) for each in resamples) / len(resamples),
        "errors": {name: errors(cells.loss, values) for name, values in left_out.items()},
        "predictions": predictions,
        "optima": [optimum(times * flops, predicted) for times in cfg["predict"]["flops"]],
        "counted_otherwise": {size: counted(sweep, size) for size in SIZES},
    }


def optimum(flops: float, predicted) -> dict:
    """The split of the compute that the law likes best."""
    found = {name: predicted(lambda each: each.optimum(flops)[i]) for i, name in enumerate(("parameters", "tokens"))}
    ratio = predicted(lambda each: each.optimum(flops)[1] / each.optimum(flops)[0])
    return {
        "flops": float(flops),
        **found,
        "tokens_per_parameter": ratio,
        "loss": predicted(lambda each: each.loss(*each.optimum(flops))),
    }


def counted(sweep, size: str) -> dict:
    """The law where `size` counts as N, without intervals."""
    from tril.scripts.ablation.scaling_law import cells_of, errors, fit, held_out

    cells = cells_of(sweep, size)
    law = fit(cells)
    n, d = law.optimum((6 * cells.parameters * cells.tokens).max())
    found = {name: errors(cells.loss, values) for name, values in held_out(cells).items()}
    return {"E": law.E, "alpha": law.alpha, "beta": law.beta, "tokens_per_parameter": d / n, "errors": found}


# ---------------------------------------------------------------- in words and tables


def write_up(found: dict) -> str:
    """scaling.md."""
    law = {name: its["value"] for name, its in found["law"].items()}
    parts = [
        f"# The loss against parameters and tokens: {found['sweep']}",
        f"L(N, D) = {law['E']:.3f} + {law['A']:.4g} / N^{law['alpha']:.3f} + {law['B']:.4g} / D^{law['beta']:.3f}, in nats per token; "
        f"N {SIZES[found['settings']['size']]}, D training tokens.",
        "![loss against tokens and against compute](scaling.png)",
        "Points are cells, lines the law, dotted where no run is as long. Dashed: the least loss that the law has for each compute.",
        "## Cells",
        table(CELLS, [row_of_cell(row) for row in found["cells"]]),
        "## The law",
        table(
            ["parameter of the law", "value", INTERVAL], [[name, *spread(found["law"][name], ".4g")] for name in LAW]
        ),
        "## Tested on what it has not seen",
        table(TESTS, [row_of_test(HELD_OUT[name], its) for name, its in found["errors"].items()]),
        "Errors are in nats per token; with a sign, above 0 where the law says more than was measured.",
        "## What it predicts",
        table(LARGER, [row_of_prediction(row, found["nats_per_bpb"]) for row in found["predictions"]]),
        "The split of a compute of 6 N D FLOPs that has the least loss by the law:",
        table(OPTIMA, [row_of_optimum(row) for row in found["optima"]]),
        "## Counted otherwise",
        table(COUNTED, [row_of_count(SIZES[name], its) for name, its in found["counted_otherwise"].items()]),
        "## What to make of it",
        "\n".join(f"- {line}" for line in caveats(found)),
    ]
    return "\n\n".join(parts) + "\n"


def row_of_cell(row: dict) -> list[str]:
    figures = [
        f"{row['loss']:.4f}",
        f"{row['bpb']:.4f}",
        f"{row['fitted']:.4f}",
        f"{row['residual']:+.4f}",
        number(row["one cell"], ".4f"),
    ]
    return [count(row["parameters"]), count(row["tokens"]), *figures]


def row_of_test(name: str, its: dict | None) -> list[str]:
    if its is None:
        return [name, "0", "too few kept", "", "", ""]
    return [
        name,
        str(its["cells"]),
        f"{its['mean']:.4f}",
        f"{its['largest']:.4f}",
        f"{its['bias']:+.4f}",
        f"{its['relative']:.2%}",
    ]


def row_of_prediction(row: dict, nats_per_bpb: float) -> list[str]:
    return [
        count(row["parameters"]),
        count(row["tokens"]),
        *spread(row["loss"], ".3f"),
        f"{row['loss']['value'] / nats_per_bpb:.3f}",
    ]


def row_of_optimum(row: dict) -> list[str]:
    split = [
        *spread(row["parameters"], count),
        count(row["tokens"]["value"]),
        *spread(row["tokens_per_parameter"], ".2g"),
    ]
    return [f"{row['flops']:.2g}", *split, *spread(row["loss"], ".3f")]


def row_of_count(name: str, its: dict) -> list[str]:
    mean = [
        number(its["errors"][kind]["mean"], ".4f") if its["errors"][kind] else ""
        for kind in ("one cell", "largest size")
    ]
    return [name, *(f"{its[key]:.3g}" for key in ("alpha", "beta", "E")), *mean, f"{its['tokens_per_parameter']:.2g}"]


def caveats(found: dict) -> list[str]:
    """What the figures do not say by themselves."""
    E, rows, test, resamples = (
        found["law"]["E"],
        found["cells"],
        found["errors"]["largest size"],
        found["settings"]["resamples"],
    )
    lines = []
    if found["bounds"]:
        edge = ", ".join(found["bounds"])
        lines.append(
            f"**The fit is degenerate**: {edge} ended at the edge of what is allowed, so the data do not determine it."
        )
    if found["resamples_at_bounds"]:
        lines.append(
            f"{found['resamples_at_bounds']:.0%} of the resamples have a parameter at the edge of what is allowed."
        )
    lines.append(
        f"Five parameters stand against {len(rows)} cells. E, which no size and no text would remove, is {E['value']:.3g}, with an "
        f"interval from {E['low']:.3g} to {E['high']:.3g}. A and alpha, B and beta move together: none of them means much alone."
    )
    if test:
        lines.append(
            f"The honest measure is the second test: the largest size, {factor(rows, 'parameters', by=-2)} times the next, was predicted "
            f"from smaller ones with a mean error of {test['mean']:.3f} nats per token."
        )
    lines += [reach(found), chance(rows)]
    lines.append(
        f"Intervals are the middle 95 % of the laws of {resamples} resamples: the losses of the law with noise of the size of the "
        f"residuals, which have {len(rows)} - {len(LAW)} degrees of freedom. They take the form of the law to be right, and the residuals "
        "to be chance."
    )
    lines += CAVEATS
    if left_out := found["unfinished"] + found["diverged"]:
        lines.append(f"Left out: {'; '.join(left_out)}.")
    return lines


def reach(found: dict) -> str:
    """How far it is from the cells to what is predicted."""
    rows, beyond = found["cells"], []
    for key, name in (("parameters", "N"), ("tokens", "D")):
        asked = [row[key] for row in found["predictions"]] + [row[key]["value"] for row in found["optima"]]
        beyond.append(f"{max(asked, default=0) / max(row[key] for row in rows):.3g} times the largest {name} of them")
    spans = f"a factor of {factor(rows, 'parameters')} in N and {factor(rows, 'tokens')} in D"
    return f"The cells span {spans}; what is predicted goes to {' and '.join(beyond)}. Nothing here says that the law holds so far."


def chance(rows: list[dict]) -> str:
    """What is known of the seeds."""
    spreads = [row["spread"] for row in rows if row["seeds"] > 1]
    if not spreads:
        return "One seed a cell: how much of a residual is chance is not known."
    return f"Losses are means over seeds, which differ by {sum(spreads) / len(spreads):.4f} in standard deviation."


def factor(rows: list[dict], key: str, *, by: int = 0) -> str:
    """The largest divided by the smallest, or by another of them in their order."""
    values = sorted({row[key] for row in rows})
    return f"{values[-1] / values[by]:.3g}"


def spread(its: dict, form) -> list[str]:
    """Value and interval; form: a format, or what makes words of a number."""
    show = form if callable(form) else lambda value: f"{value:{form}}"
    return [show(its["value"]), f"{show(its['low'])} to {show(its['high'])}"]


def count(value: float) -> str:
    """1540000 -> "1.54 M"."""
    limit, unit = next(((limit, unit) for limit, unit in UNITS if value >= limit), (1, ""))
    return f"{value / limit:.3g} {unit}".rstrip()


def number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else ""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown that can also be read as it is; all columns but the first to the right."""
    return aligned([header, *rows], words=(0,))


def without_nan(value):
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(its) for key, its in value.items()}
    if isinstance(value, list):
        return [without_nan(its) for its in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
