"""The figures of an ablation, of attention maps and of scores: what they draw, and the labels of tokens."""

import pytest
import torch

from tests.conftest import tiny_gpt
from tests.model.heads.test_ablation import ablate, columns, some_text
from tril.model.comparison import UNCLEAR
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.heads.head_plots import plot_ablation, plot_maps, plot_removal, plot_scores, readable
from tril.model.heads.scores import text_scores


@pytest.fixture
def figures(monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **more: drawn.append(self))
    return drawn


def test_the_figures_of_an_ablation(figures, tmp_path):
    model = tiny_gpt()
    columns(model, (1, 2)).zero_()
    ablation = ablate(model, some_text(9))
    plot_ablation(tmp_path / "a.png", ablation)
    plot_removal(tmp_path / "b.png", ablation)
    axes, line, changes = figures[0].axes[0], figures[1].axes[0].lines[0], ablation.changes()
    numbers = [text.get_text().split("\n")[0] for text in axes.texts]
    assert numbers == [f"{change.difference.mean:+.3f}" for change in changes.values()]
    hatched = [(int(patch.get_y() + 0.5), int(patch.get_x() + 0.5)) for patch in axes.patches]
    assert hatched == [head for head in changes if changes[head].verdict == UNCLEAR]
    losses = ablation.removal.sum(1) / ablation.clusters.targets.sum()
    assert list(line.get_ydata()) == pytest.approx(losses.tolist())


def test_the_figure_of_the_maps(figures, tmp_path):
    maps = attention_maps(tiny_gpt(), torch.randint(31, (1, 5)))[:, 0]
    plot_maps(tmp_path / "a.png", maps, ["a", " b\n", "$\\x$", "日", "\x00"])  # not parsed as a formula
    panels = figures[0].axes[:8]
    assert [axes.get_title() for axes in panels] == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert panels[6].images[0].get_array()[3].tolist() == [*maps[1, 2, 3, :4].tolist(), None]
    assert [label.get_text() for label in panels[4].get_yticklabels()] == ["a", "␣b↵", "$\\x$", "日", "\ufffd"]
    plot_maps(tmp_path / "b.png", torch.ones(1, 1, 200, 200), ["word"] * 200)  # too many for labels
    assert "word" not in [label.get_text() for label in figures[1].axes[0].get_yticklabels()]


def test_the_figure_of_the_scores(figures, tmp_path):
    ids = torch.randint(31, (1, 9))
    heads, uniform = text_scores(tiny_gpt(), TokenWindows(ids, ids))
    plot_scores(tmp_path / "a.png", heads, uniform)
    panels = [axes for axes in figures[0].axes if axes.images and axes.get_xlabel() == "head"]
    assert [axes.get_title().split(":")[0] for axes in panels] == list(heads) and len(heads) == 6
    for axes, (name, values) in zip(panels, heads.items(), strict=True):
        [image] = axes.images
        assert image.get_array().tolist() == values.tolist() and image.norm.vcenter == uniform[name]
        assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in values.flatten()]


def test_labels():
    shown = {"\t a\r": "→␣a←", "<|endoftext|>": "<|endofte…", "é日": "é日", "\u200b": "\ufffd", "": ""}
    assert {text: readable(text) for text in shown} == shown
