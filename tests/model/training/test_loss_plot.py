"""loss.png of a run: what each panel shows."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import tiny_gpt
from tril.model.training.loss_plot import plot_losses
from tril.model.training.summary import run_title

LN_V = math.log(4096)
STEPS, LOSSES = [10, 20, 3000], [7.5, 4.0, 2.0]
RATES = {"muon": [0.01, 0.02, 0.0], "decay": [0.5, 1.0, 0.0], "no_decay": [0.5, 1.0, 0.0]}
TRAIN = [
    {"step": step, "loss": loss, "tokens_per_second": 1.0, "lr": {name: rates[i] for name, rates in RATES.items()}}
    for i, (step, loss) in enumerate(zip(STEPS, LOSSES, strict=True))
]
VAL = [{"step": 20, "loss": 4.5, "bpb": 2.25}, {"step": 3000, "loss": 2.5, "bpb": 1.25}]
GRADIENTS = SimpleNamespace(
    rows=[{"step": 10, "total": 5.0, "muon": 4.0, "decay": 3.0}, {"step": 20, "total": 50.0, "muon": 4.0, "decay": 3.0}]
)


@pytest.fixture
def figure(monkeypatch):
    """Draws the plot and returns its figure."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.append(figure))

    def plot(train=TRAIN, val=VAL, initial=LN_V, gradients=None):
        metrics = SimpleNamespace(train=train, val=val, tokens_per_step=1000)
        plot_losses(Path("loss.png"), metrics, title="a $title$", initial=initial, gradients=gradients)
        saved[-1].draw_without_rendering()
        return saved[-1]

    return plot


def lines(axes):
    """Label -> x and y of each line."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_losses_rates_and_norms_are_drawn_by_step(figure):
    figure = figure(gradients=GRADIENTS)
    loss, rates, norms = figure.axes
    assert figure.get_suptitle() == "a $title$" and loss.get_ylabel() == "loss, nats per token"
    assert lines(loss) == {
        "training": (STEPS, LOSSES),
        "validation, best 2.5000 (1.2500 bits per byte)": ([20, 3000], [4.5, 2.5]),
        "ln V = 8.32, the loss of a uniform guess": ([0, 1], [LN_V, LN_V]),  # the whole width
    }
    assert lines(rates) == {"muon": (STEPS, RATES["muon"]), "decay, no_decay": (STEPS, RATES["decay"])}
    assert lines(norms)["total"] == ([10, 20], [5.0, 50.0])
    low, high = loss.get_ylim()
    assert 1.5 < low < 2.0 and LN_V < high < LN_V + 0.5
    assert loss.get_position().height > 2 * rates.get_position().height


def test_axes_have_plain_numbers(figure):
    figure = figure(gradients=GRADIENTS)
    loss, _, norms = figure.axes
    (tokens,) = loss.child_axes

    def texts(axis):
        return [label.get_text() for label in axis.get_ticklabels()]

    assert norms.get_xlabel() == "step" and "1,000" in texts(norms.xaxis) and "10" in texts(norms.yaxis)
    assert tokens.get_xlabel() == "tokens" and {"0", "1 M", "3 M"} <= set(texts(tokens.xaxis))
    assert tokens.get_xlim() == pytest.approx([1000 * end for end in loss.get_xlim()])


def test_a_run_from_a_model_and_of_an_older_version_has_no_start_and_no_rates(figure):
    rows = [{name: value for name, value in row.items() if name != "lr"} for row in TRAIN]
    (loss,) = figure(train=rows, initial=None).axes
    assert list(lines(loss)) == ["training", "validation, best 2.5000 (1.2500 bits per byte)"]
    assert loss.get_ylim()[1] < 6  # 2.5 times the lowest loss


def test_a_run_without_rows_is_drawn(figure):
    (loss,) = figure(train=[], val=[]).axes
    assert loss.get_xlabel() == "step"


def test_title_names_model_data_and_run():
    model = tiny_gpt()
    first, second = run_title(model, {"source": {"kind": "stdlib"}}, Path("/a/outputs/2026-11-23/10-00-00")).split("\n")
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    assert first == f"{size} ({model.config.n_layers} layers, dim {model.config.dim}), stdlib"
    assert second == "run 2026-11-23/10-00-00"
