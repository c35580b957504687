"""The picture of a certificate: which input positions reach which outputs."""

from pathlib import Path

import torch

from tril.model.causality.certificate import Certificate

TITLES = {"gradient": "gradient of the logits", "perturbation": "change of the logits with one token"}
DECADES = 6  # below the largest effect, that the colours tell apart


def plot(path: str | Path, certificate: Certificate) -> None:
    """PNG: a matrix for each way of measuring, logarithmic, with the edge of what may be seen drawn on it.

    White: exactly 0. Grey: not tested. Colour beyond the edge is a leak; white within it is blindness.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # no pyplot: that would look for a display

    shown = {name: matrix for name, matrix in certificate.reach.items() if name in TITLES}
    figure = Figure(figsize=(5.6 * len(shown), 5), layout="constrained")
    for axes, (name, matrix) in zip(figure.subplots(1, len(shown), squeeze=False)[0], sorted(shown.items())):
        tested, largest = ~matrix.isnan(), matrix.nan_to_num().max().item() or 1.0
        axes.set_facecolor("0.85")
        axes.imshow(
            torch.where(tested, 1.0, torch.nan).numpy(), cmap="Greys", vmin=1, vmax=2, interpolation="nearest"
        )  # white
        colours = axes.imshow(
            matrix.masked_fill(matrix == 0, torch.nan).numpy(),
            cmap="viridis_r",
            norm=LogNorm(largest / 10**DECADES, largest, clip=True),
            interpolation="nearest",
        )
        for line in edges(certificate.allowed):
            axes.plot(*line, color="crimson", lw=1.2)
        axes.set(title=TITLES[name], xlabel="input position", ylabel="output position")
        figure.colorbar(colours, ax=axes, shrink=0.8)
    verdict = "sees no future, and all of its past" if certificate.passed else "FAILS"
    figure.suptitle(f"{certificate.subject}: {verdict}. Red: the edge of what may be seen; white: exactly 0")
    figure.savefig(path, dpi=130)


def edges(allowed: torch.Tensor) -> list[tuple[list[float], list[float]]]:
    """(x, y) of the stairs at the right and, with a window, at the left of what each row may see."""
    n = len(allowed)
    rows = [i + side for i in range(n) for side in (-0.5, 0.5)]
    last = [(n - 1 - row.flip(0).int().argmax()).item() + 0.5 for row in allowed for _ in (0, 1)]
    first = [row.int().argmax().item() - 0.5 for row in allowed for _ in (0, 1)]
    return [(last, rows)] + ([(first, rows)] if max(first) > 0 else [])
