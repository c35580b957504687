"""Plot of a certificate: which outputs depend on which inputs."""

from pathlib import Path

import torch

from tril.model.causality.certificate import Certificate

DECADES = 6  # range of the color scale below the largest effect


def plot(path: str | Path, certificate: Certificate) -> None:
    """Writes a PNG with the gradient of each output with respect to each input, on a logarithmic scale.

    White: exactly 0. Gray: not tested. The red line is the edge of the visible inputs: color outside of it is a leak.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # pyplot would look for a display

    matrix, allowed = certificate.dependencies, certificate.allowed
    assert matrix is not None and allowed is not None
    largest = matrix.nan_to_num().max().item() or 1.0
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    white = torch.where(matrix.isnan(), torch.nan, 1.0).numpy()
    axes.imshow(white, cmap="Greys", vmin=1, vmax=2, interpolation="nearest")
    norm = LogNorm(largest / 10**DECADES, largest, clip=True)
    nonzero = matrix.masked_fill(matrix == 0, torch.nan).numpy()
    image = axes.imshow(nonzero, cmap="viridis_r", norm=norm, interpolation="nearest")
    axes.contour(allowed.float().numpy(), levels=[0.5], colors="crimson", linewidths=1.2)
    axes.set(title=certificate.verdict(), xlabel="input position", ylabel="output position")
    axes.title.set_wrap(True)
    figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=130)
