"""Plot of a certificate: which outputs depend on which inputs."""

from pathlib import Path

import torch

from tril.model.causality.certificate import Certificate

TITLES = {"gradient": "gradient of the logits", "perturbation": "change of the logits with one token"}
DECADES = 6  # range of the color scale below the largest effect


def plot(path: str | Path, certificate: Certificate) -> None:
    """Writes a PNG with one dependency matrix per method, on a logarithmic scale.

    White: exactly 0. Gray: not tested. The red line is the edge of the expected dependencies: color outside of it is a
    leak, white inside of it is a missing dependency.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # pyplot would look for a display

    assert certificate.allowed is not None
    shown = {name: certificate.dependencies[name] for name in TITLES if name in certificate.dependencies}
    figure = Figure(figsize=(5.6 * len(shown), 5), layout="constrained")
    for axes, (name, matrix) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        largest = matrix.nan_to_num().max().item() or 1.0
        axes.set_facecolor("0.85")
        white = torch.where(matrix.isnan(), torch.nan, 1.0).numpy()
        axes.imshow(white, cmap="Greys", vmin=1, vmax=2, interpolation="nearest")
        norm = LogNorm(largest / 10**DECADES, largest, clip=True)
        nonzero = matrix.masked_fill(matrix == 0, torch.nan).numpy()
        image = axes.imshow(nonzero, cmap="viridis_r", norm=norm, interpolation="nearest")
        for line in edges(certificate.allowed):
            axes.plot(*line, color="crimson", lw=1.2)
        axes.set(title=TITLES[name], xlabel="input position", ylabel="output position")
        figure.colorbar(image, ax=axes, shrink=0.8)
    verdict = "sees no future, and all of its past" if certificate.passed else "FAILS"
    gray = "; gray: not tested" if any(matrix.isnan().any() for matrix in shown.values()) else ""
    figure.suptitle(f"{certificate.subject}: {verdict}. Red: edge of the visible inputs; white: exactly 0{gray}")
    figure.savefig(path, dpi=130)


def edges(allowed: torch.Tensor) -> list[tuple[list[float], list[float]]]:
    """(x, y) of the steps at the right edge of the visible inputs and, with a window, at the left edge."""
    n = len(allowed)
    rows = [i + side for i in range(n) for side in (-0.5, 0.5)]
    last = [(n - 1 - row.flip(0).int().argmax()).item() + 0.5 for row in allowed for _ in (0, 1)]
    first = [row.int().argmax().item() - 0.5 for row in allowed for _ in (0, 1)]
    return [(last, rows)] + ([(first, rows)] if max(first) > 0 else [])
