"""The Markdown report of a scaling law, from the results in scaling.json."""

import math
from collections.abc import Callable

from tril.scripts.common.formats import engineering
from tril.scripts.common.tables import markdown_table

SIZES = {"parameters_without_embeddings": "parameters without embeddings", "parameters": "all parameters"}
HELD_OUT = {
    "one point": "each point, from all others",
    "largest size": "the largest size, from smaller ones alone",
    "longest runs": "the longest runs, from shorter ones alone",
}
INTERVAL = "95 % interval"
CAVEATS = (
    "All sizes have the same learning rates and batch; a size that they suit less bends the law. Repeated text is worth"
    " less than new text, which the law does not model.",
    "6 N D leaves out the attention scores, and without embeddings also the head, which is most of the work of the "
    "smallest models: the two ways to count N can disagree about the best split.",
)


def write_up(found: dict) -> str:
    """scaling.md from the results of `scripts.scaling.findings`."""
    law = {name: estimate["value"] for name, estimate in found["law"].items()}
    terms = f"{law['E']:.3f} + {law['A']:.4g} / N^{law['alpha']:.3f} + {law['B']:.4g} / D^{law['beta']:.3f}"
    parts = [
        f"# The loss against parameters and tokens: {found['sweep']}",
        f"L(N, D) = {terms}, in nats per token; N {SIZES[found['settings']['size']]}, D training tokens.",
        "![loss against tokens and against compute](scaling.png)",
        "Points are measured, lines are the law, dotted beyond the longest run. Dashed: the law's lowest loss at each "
        "compute.",
        "## Points",
        points_table(found),
        "## The law",
        law_table(found),
        "## Held-out points",
        held_out_table(found),
        "Errors are in nats per token; with sign, above 0 if the law predicts more than was measured.",
        "## Extrapolation",
        predictions_table(found),
        "The split of a compute of 6 N D FLOPs with the law's lowest loss:",
        optima_table(found),
        "## The other way to count N",
        sizes_table(found),
        "## How to read it",
        "\n".join(f"- {line}" for line in caveats(found)),
    ]
    return "\n\n".join(parts) + "\n"


def points_table(found: dict) -> str:
    header = ["N", "D", "loss", "bits per byte", "law", "loss - law", "from the others"]
    rows = [
        [engineering(point["parameters"]), engineering(point["tokens"])]
        + [f"{point[name]:.4f}" for name in ("loss", "bpb", "fitted")]
        + [f"{point['residual']:+.4f}", f"{point['one point']:.4f}" if math.isfinite(point["one point"]) else ""]
        for point in found["points"]
    ]
    return markdown_table([header, *rows])


def law_table(found: dict) -> str:
    rows = [[name, *spread(estimate, ".4g")] for name, estimate in found["law"].items()]
    return markdown_table([["parameter of the law", "value", INTERVAL], *rows])


def held_out_table(found: dict) -> str:
    header = ["held out", "points", "mean error", "largest", "mean with sign", "mean, relative"]
    rows = []
    for name, error in found["errors"].items():
        figures = ["0", "too few remain", "", "", ""]
        if error:
            figures = [str(error["points"]), f"{error['mean']:.4f}", f"{error['largest']:.4f}"]
            figures += [f"{error['bias']:+.4f}", f"{error['relative']:.2%}"]
        rows.append([HELD_OUT[name], *figures])
    return markdown_table([header, *rows])


def predictions_table(found: dict) -> str:
    header = ["N", "D", "loss", INTERVAL, "bits per byte"]
    rows = [
        [engineering(row["parameters"]), engineering(row["tokens"]), *spread(row["loss"], ".3f")]
        + [f"{row['loss']['value'] / found['nats_per_bpb']:.3f}"]
        for row in found["predictions"]
    ]
    return markdown_table([header, *rows])


def optima_table(found: dict) -> str:
    header = ["FLOPs", "N", INTERVAL, "D", "D / N", INTERVAL, "loss", INTERVAL]
    rows = [
        [f"{row['flops']:.2g}", *spread(row["parameters"], engineering), engineering(row["tokens"]["value"])]
        + [*spread(row["tokens_per_parameter"], ".2g"), *spread(row["loss"], ".3f")]
        for row in found["optima"]
    ]
    return markdown_table([header, *rows])


def sizes_table(found: dict) -> str:
    header = ["N counts", "alpha", "beta", "E", "error, one point", "error, largest size"]
    rows = []
    for name, law in found["other_sizes"].items():
        errors = [law["errors"][kind] for kind in ("one point", "largest size")]
        figures = [f"{law[key]:.3g}" for key in ("alpha", "beta", "E")]
        figures += [f"{error['mean']:.4f}" if error else "" for error in errors]
        rows.append([SIZES[name], *figures, f"{law['tokens_per_parameter']:.2g}"])
    return markdown_table([[*header, "D / N at the largest run's FLOPs"], *rows])


def caveats(found: dict) -> list[str]:
    """The limits of the results, one sentence or two each."""
    E, points, test = found["law"]["E"], found["points"], found["errors"]["largest size"]
    lines = []
    if found["bounds"]:
        lines.append(
            f"**The fit is degenerate**: {', '.join(found['bounds'])} ended at a bound: the data do not determine it."
        )
    if found["resamples_at_bounds"]:
        lines.append(f"{found['resamples_at_bounds']:.0%} of the resamples have a parameter at a bound.")
    lines.append(
        f"{len(found['law'])} parameters are fitted to {len(points)} points. E, which no size and no text would remove,"
        f" is {E['value']:.3g}, with an interval from {E['low']:.3g} to {E['high']:.3g}. A and alpha, B and beta are "
        "correlated: none of them means much alone."
    )
    if test:
        lines.append(
            f"The strictest test is the second one: the largest size, {ratio(points, 'parameters', to=-2)} times the "
            f"next, was predicted from smaller ones with a mean error of {test['mean']:.3f} nats per token."
        )
    lines += [
        extrapolation(found),
        seed_noise(points),
        f"Intervals are the middle 95 % of the laws of {found['settings']['resamples']} resamples: the losses of the"
        f" law with noise of the size of the residuals, which have {len(points)} - {len(found['law'])} degrees of"
        " freedom. "
        "They assume that the form of the law is right and that the residuals are random.",
        *CAVEATS,
    ]
    if left_out := found["unfinished"] + found["diverged"]:
        lines.append(f"Left out: {'; '.join(left_out)}.")
    return lines


def extrapolation(found: dict) -> str:
    """How far the predictions are from the points."""
    points, beyond = found["points"], []
    for key, name in (("parameters", "N"), ("tokens", "D")):
        asked = [row[key] for row in found["predictions"]] + [row[key]["value"] for row in found["optima"]]
        beyond.append(f"{max(asked, default=0) / max(row[key] for row in points):.3g} times their largest {name}")
    spans = f"a factor of {ratio(points, 'parameters')} in N and {ratio(points, 'tokens')} in D"
    return f"The points span {spans}; predictions reach {' and '.join(beyond)}. Nothing shows that the law holds there."


def seed_noise(points: list[dict]) -> str:
    """What is known about the variation between seeds."""
    spreads = [point["spread"] for point in points if point["seeds"] > 1]
    if not spreads:
        return "There is one seed per point: how much of a residual is random is unknown."
    return f"Losses are means over seeds, whose standard deviation is {sum(spreads) / len(spreads):.4f} on average."


def ratio(points: list[dict], key: str, *, to: int = 0) -> str:
    """The largest value divided by the smallest, or by another one in their order."""
    values = sorted({point[key] for point in points})
    return f"{values[-1] / values[to]:.3g}"


def spread(estimate: dict, form: str | Callable[[float], str]) -> list[str]:
    """Value and interval, in a format or by a function that formats a number."""
    value, low, high = (
        form(estimate[k]) if callable(form) else f"{estimate[k]:{form}}" for k in ("value", "low", "high")
    )
    return [value, f"{low} to {high}"]
