"""Head ablation averaged over seeds: what the plots draw and the tables say, for averages with known numbers."""

from types import SimpleNamespace

import pytest

from tests.model.heads.test_seed_averages import SEEDS, ablation_of
from tests.scripts.experiments.synthetic import sweep_of
from tril.model.heads.seed_averages import average
from tril.scripts.ablation.head_average_plots import draw_averages
from tril.scripts.ablation.sweep_heads import layer_table, summary_table, texts_remark

AVERAGES = {"n_heads=1": average([ablation_of([[0.4], [0.2]])]), "n_heads=4": average(SEEDS)}


def test_the_plots(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))
    assert draw_averages(sweep_of(tmp_path), AVERAGES, tmp_path) == ["layers.png", "ranks.png", "removal.png"]
    drawn = [[[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes] for figure in figures]
    layers, ranks, removal = (panels[0] for panels in drawn)
    assert drawn[0][1] == layers and drawn[2][1] == removal  # the ablations of both methods are equal
    assert layers[0] == [[-0.15, pytest.approx(0.4)], [0.85, pytest.approx(0.2)]]  # side by side
    assert layers[1] == [[0.15, pytest.approx(0.8 / 3)], [1.15, pytest.approx(0.4)]]
    assert ranks[1] == [[i, pytest.approx(mean)] for i, mean in enumerate([0.4, 0.7 / 3, 0.2 / 3, -0.1 / 3], 1)]
    assert removal[0] == [[0, 0], [0.5, pytest.approx(0.2)], [1, pytest.approx(0.6)]]
    assert [x for x, _ in removal[1]] == [0, 0.25, 0.5, 0.75, 1]
    bars = figures[0].axes[0].collections[-1].get_segments()  # of layers 0 and 1
    interval = AVERAGES["n_heads=4"]["zero", "layer", 1]
    assert bars[1][:, 1].tolist() == [pytest.approx(interval.low), pytest.approx(interval.high)]
    assert [len(axes.collections) for axes in figures[1].axes] == [1, 1]  # one seed has no band


def test_the_tables():
    header, first, _, third, _ = summary_table(AVERAGES)
    assert header[3:6] == ["loss of the whole model", "heads", "heads that raise the loss"]
    assert header[6:] == ["largest rise", "smallest rise", "sum of all rises", "half removed", "all removed"]
    assert first[:6] == ["n_heads=1", "zero", "1", "4.0000", "2", "2.0"]
    assert first[6:] == ["+0.4000", "+0.2000", "+0.6000", "+0.2000", "+0.6000"]
    assert third[:6] == ["n_heads=4", "zero", "3", "4.1000 ± 0.2484", "4", "2.7 ± 1.4"]  # t = 4.303 times se
    assert third[6:8] == ["+0.4000 ± 0.2484", "-0.0333 ± 0.1434"]
    header, first, *_, last = layer_table(AVERAGES)
    assert header == ["variant", "removed by", "layer 0", "layer 1"]
    assert first == ["n_heads=1", "zero", "+0.4000", "+0.2000"]
    assert last == ["n_heads=4", "mean", "+0.2667 ± 0.6252", "+0.4000 ± 0.4303"]


@pytest.mark.parametrize(("fingerprint", "length", "comparable"), [("a", 8, True), ("b", 8, False), ("a", 9, False)])
def test_runs_on_different_windows_are_remarked(fingerprint, length, comparable):
    def model(fingerprint, length):
        config = SimpleNamespace(context_length=length)
        checkpoint = SimpleNamespace(data={"fingerprint": fingerprint}, config=config)
        return SimpleNamespace(run=SimpleNamespace(checkpoint=checkpoint))

    assert (texts_remark([model("a", 8), model(fingerprint, length)]) == []) == comparable
