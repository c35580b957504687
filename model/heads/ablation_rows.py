"""The figures of an ablation of heads as rows of CSV and JSON files."""

from typing import Any

from tril.model.heads.ablation import METHODS, Ablation, head_name


def head_rows(ablation: Ablation) -> list[dict[str, Any]]:
    """One row per head, by layer: its name, and the change of the loss without it for each of METHODS."""
    changes = {method: ablation.changes(method) for method in METHODS}
    rows = []
    for head in changes[METHODS[0]]:
        row: dict[str, Any] = {"head": head_name(head)}
        for method in METHODS:
            change = changes[method][head]
            interval, corrected = change.interval, change.corrected
            row[method] = {"change": interval.mean, "low": interval.low, "high": interval.high}
            row[method] |= {"corrected_low": corrected.low, "corrected_high": corrected.high, "verdict": change.verdict}
        rows.append(row)
    return rows


def removal_rows(ablation: Ablation, method: str) -> list[dict[str, Any]]:
    """One row per number of removed heads, from 0 on."""
    names = [None, *map(head_name, ablation.orders[method])]
    return [
        {"by": method, "n_removed": n, "removed_last": name, "loss": ablation.loss + change.mean}
        | {"change": change.mean, "low": change.low, "high": change.high}
        for n, (name, change) in enumerate(zip(names, ablation.curve(method), strict=True))
    ]
