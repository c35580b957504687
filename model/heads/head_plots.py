"""The pictures of a model's heads: what the loss loses with each, with one after another, and what they attend to in a text.

L layers, H heads, T tokens.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tril.model.heads.ablation import CONFIDENCE, WAYS, Ablation, half_width, head_name

COLOURS = {"zero": "tab:blue", "mean": "tab:orange"}
TITLES = {"zero": "output set to zero", "mean": "output set to its mean"}
DPI = 130
LONGEST_LABEL = 10  # characters of a token
MOST_NAMED = 24  # heads whose names fit along a curve
SMALLEST_FONT = 4.5  # points
WHITE = {" ": "␣", "\n": "↵", "\t": "→", "\r": "←"}  # in the font that comes with matplotlib


def plot_ablation(path: str | Path, ablation: Ablation) -> None:
    """PNG: layers x heads for both ways, each field with its change of the loss and its interval; hatched: not distinguishable from 0."""
    from matplotlib.colors import CenteredNorm
    from matplotlib.figure import Figure  # no pyplot: that would look for a display
    from matplotlib.patches import Rectangle

    n_layers, n_heads, _ = ablation.single[WAYS[0]].shape
    figure = Figure(
        figsize=(max(7.5, 2 * (0.95 * n_heads + 0.9) + 1), max(3.2, 0.62 * n_layers + 1.9)), layout="constrained"
    )
    changes = {way: ablation.changes(way) for way in WAYS}
    grids = {
        way: np.array([change.interval.mean for change in changes[way].values()]).reshape(n_layers, n_heads)
        for way in WAYS
    }
    furthest = max(np.abs(grid).max() for grid in grids.values()) or 1.0
    norm = CenteredNorm(0, furthest)
    panels = figure.subplots(1, len(WAYS), sharey=True)
    for axes, way in zip(panels, WAYS):
        image = axes.imshow(grids[way], cmap="RdBu_r", norm=norm, aspect="auto")
        for (layer, head), change in changes[way].items():
            dark = abs(change.interval.mean) > 0.6 * furthest
            unclear = change.verdict == "not distinguishable"
            text = f"{change.interval.mean:+.3f}\n± {half_width(change.interval):.3f}"
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1} if unclear else None
            axes.text(
                head,
                layer,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark and not unclear else "black",
                bbox=box,
            )
            if unclear:
                field = {"fill": False, "hatch": "///", "edgecolor": "0.75", "linewidth": 0, "zorder": 1.5}
                axes.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, **field))
        axes.set(title=TITLES[way], xlabel="head", xticks=range(n_heads), yticks=range(n_layers))
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="rise of the loss, nats per token", pad=0.02)
    note = "Hatched: not distinguishable from nothing, once corrected for the number of heads"
    figure.suptitle(f"Each head removed alone, with the {CONFIDENCE:.0%} interval over windows\n{note}", fontsize=11)
    figure.savefig(path, dpi=DPI)


def plot_removal(path: str | Path, ablation: Ablation) -> None:
    """PNG: the loss with one head after another removed, the least important first, with the band of the paired interval."""
    from matplotlib.figure import Figure

    whole, n_heads = ablation.whole.mean().item(), len(ablation.orders[WAYS[0]])
    figure = Figure(figsize=(max(8.0, 0.5 * min(n_heads, MOST_NAMED)), 4.8), layout="constrained")
    axes = figure.subplots()
    losses = {way: ablation.removal[way].mean(1).tolist() for way in WAYS}
    for way, other in zip(WAYS, reversed(WAYS)):
        curve, steps = ablation.curve(way), range(n_heads + 1)
        axes.plot(losses[way], color=COLOURS[way], lw=1.4, marker="o", ms=3, label=TITLES[way])
        low, high = ([whole + getattr(change, end) for change in curve] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=COLOURS[way], alpha=0.2, lw=0)
        for n, head in enumerate(ablation.orders[way] if n_heads <= MOST_NAMED else [], 1):
            above = (losses[way][n], way) > (losses[other][n], other)  # the names stand outside the two curves
            place = {
                "xytext": (0, 6 if above else -6),
                "textcoords": "offset points",
                "va": "bottom" if above else "top",
            }
            axes.annotate(
                head_name(head), (n, losses[way][n]), **place, ha="center", rotation=90, fontsize=7, color=COLOURS[way]
            )
    axes.axhline(whole, color="grey", ls="--", lw=1, label="the whole model")
    axes.margins(y=0.15)
    axes.set(
        title="Heads removed one after another, the least important first",
        xlabel="heads removed",
        ylabel="loss, nats per token",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.savefig(path, dpi=DPI)


def plot_maps(path: str | Path, maps: Tensor, tokens: Sequence[str]) -> None:
    """PNG: the weights (L, H, T, T) of every head as a grid, a query for each row; the tokens at the edges where they fit."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_layers, n_heads, n_tokens, _ = maps.shape
    side = min(max(0.075 * n_tokens, 2.0), 3.8, 30 / max(n_layers, n_heads))  # inches of a panel
    font = min(8.0, 72 * side / n_tokens / 1.15)  # points
    figure = Figure(figsize=(n_heads * side + 1.6, n_layers * side + 1.4), layout="constrained")
    panels = figure.subplots(n_layers, n_heads, squeeze=False, sharex=True, sharey=True)
    for layer, head in np.ndindex(n_layers, n_heads):
        axes = panels[layer, head]
        shown = np.ma.masked_equal(maps[layer, head].float().cpu().numpy(), 0)  # exactly 0: hidden
        axes.set_facecolor("0.88")
        image = axes.imshow(shown, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        axes.set_title(head_name((layer, head)), fontsize=9)
        if font >= SMALLEST_FONT:
            labels = [readable(token) for token in tokens]
            axes.set_xticks(range(n_tokens), labels, rotation=90, fontsize=font, parse_math=False)
            axes.set_yticks(range(n_tokens), labels, fontsize=font, parse_math=False)
            axes.tick_params(length=0, pad=1.5)
    figure.supxlabel("token attended to", fontsize=10)
    figure.supylabel("token that attends", fontsize=10)
    figure.colorbar(
        image, ax=panels, label="weight\n(grey: exactly 0)", shrink=min(1.0, 6 / (n_layers * side)), pad=0.02
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a script that the font lacks: shown as a box
        figure.savefig(path, dpi=DPI)


def readable(token: str) -> str:
    """A token as a label: white space visible, other control characters and what is beyond the length replaced."""
    text = "".join(WHITE.get(character, character if character.isprintable() else "\ufffd") for character in token)
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
