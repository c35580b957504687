"""The tables about training: lengths, effective learning rates, tuning and its cost, against literal numbers."""

import json
import math

import pytest
import yaml

from tests.scripts.ablation.synthetic import HEADS, draw_all, sweep_of, write_sweep
from tests.scripts.ablation.tuned import tune
from tril.scripts.ablation import training_tables
from tril.scripts.ablation.report_tables import read_configs
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.tuning_results import read_tuning


def edit(path, **changes):
    """Changes top-level keys of a file; a mapping is merged into the present one."""
    content = yaml.safe_load(path.read_text())  # also reads JSON
    for key, value in changes.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


def test_length_of_training_and_multiplier_of_each_variant(tmp_path):
    folder = write_sweep(tmp_path / "sweep", ["model.n_heads"], HEADS | {(8,): {0: "unfinished", 1: "not started"}})
    one, four, eight = ([path for path in folder.glob(f"model.n_heads={n},*")] for n in (1, 4, 8))
    for run in one:
        edit(run / "summary.json", training_text_tokens=1600)
        edit(run / "config.yaml", optim={"lr_scale": 0.71, "schedule": {"warmup_steps": 5}})
    edit(sorted(four)[2] / "summary.json", steps=80, tokens=5120, training_text_tokens=64000)
    edit(eight[0] / "config.yaml", trainer={"max_steps": 1000}, optim={"schedule": {"warmup_steps": 20}})
    sweep = read_sweep(folder)
    table = training_tables.training(sweep, read_configs(sweep))
    assert table.rows == [
        ["n_heads=1", "100", "6,400", "4.00", "5.0 %", "0.71"],  # 6400 tokens of a text of 1600
        ["n_heads=4", "100, 80", "6,400, 5,120", "-, 0.08", "-", "1"],  # an older version did not write all of it
        ["n_heads=8", "1,000", "-", "-", "2.0 %", "1"],  # planned
    ]
    nothing = read_sweep(write_sweep(tmp_path / "none", ["model.n_heads"], {(1,): {0: "not started"}}))
    assert training_tables.training(nothing, {}).rows == [["n_heads=1", *["-"] * 5]]


def test_effective_rates_by_the_formula_of_muon(tmp_path):
    """Muon raises the rate of an (n, m) matrix by sqrt(n / m) if n > m: up has n / m = 4, o_proj C / (H D)."""
    config = {"model": {"dim": 96, "n_layers": 1, "n_heads": 4, "mlp": "relu2"}, "optim": {"muon_lr": 0.01, "lr": 0.02}}
    folder = write_sweep(tmp_path / "sweep", ["model.head_dim"], {(12,): {0: 3.0}, (24,): {0: 3.0}}, baseline=(24,))
    for size, scale in ((12, 0.5), (24, 1.0)):
        path = folder / f"model.head_dim={size},seed=0" / "config.yaml"
        edit(path, model=config["model"], optim=config["optim"] | {"lr_scale": scale})
    sweep = read_sweep(folder)
    table = training_tables.effective_rates(sweep, read_configs(sweep))
    columns = {kind: i for i, header in enumerate(table.header) for kind in header.split(", ")}
    assert [row[0] for row in table.rows] == ["head_dim=12", "head_dim=24"]
    for kind, rates in {
        "up": (0.005 * 2, 0.01 * 2),
        "down": (0.005, 0.01),
        "o_proj": (0.005 * math.sqrt(96 / 48), 0.01),
        "q_proj": (0.005, 0.01),
        "embed": (0.01, 0.02),
    }.items():
        assert [row[columns[kind]] for row in table.rows] == [f"{rate:.3g}" for rate in rates], kind
    assert columns["down"] == columns["q_proj"] != columns["up"]  # equal in every variant: one column


def test_no_rates_of_a_model_that_this_version_cannot_build(tmp_path):
    sweep = sweep_of(tmp_path, {("maxout",): {0: 3.1}, ("mish",): {0: 3.0}}, ("model.mlp",), ("mish",))
    assert training_tables.effective_rates(sweep, read_configs(sweep)).rows == []


@pytest.fixture
def tuned(tmp_path):
    return read_sweep(tune(write_sweep(tmp_path / "sweep", ["model.n_heads"], HEADS, baseline=(4,))))


def test_choices_and_curves(tuned):
    found = read_tuning(tuned)
    assert (found["n_heads=1"].lr_scale, found["n_heads=1"].at_edge, found["n_heads=1"].failed) == (1.0, False, 0)
    assert (found["n_heads=4"].lr_scale, found["n_heads=4"].at_edge, found["n_heads=4"].failed) == (0.5, True, 1)
    assert training_tables.tuning_losses(found).header == ["variant", "0.5", "1", "2"]
    assert training_tables.tuning_losses(found).rows == [
        ["n_heads=1", "3.4000", "3.2000 (chosen)", "3.3000"],
        ["n_heads=4", "3.1000 (chosen, an end of the range)", "3.1500", "failed or diverged"],
    ]


def test_multipliers_that_only_one_variant_tried(tuned):
    (tuned.folder / "tune/model.n_heads=4/chosen.json").unlink()  # its trials have not ended
    path = tuned.folder / "tune/model.n_heads=1/chosen.json"
    edit(path, curve=[[1.0, 3.2], [2.0, 3.1], [4.0, 3.3]], lr_scale=2.0)
    found = read_tuning(tuned)
    assert training_tables.tuning_losses(found).rows == [["n_heads=1", "3.2000", "3.1000 (chosen)", "3.3000"]]
    path.write_text(json.dumps({"lr_scale": 1}))
    with pytest.raises(ValueError, match=r"n_heads=1 has a damaged chosen.json \(KeyError\('curve'\)\)"):
        read_tuning(tuned)


def test_cost_of_the_trials_next_to_that_of_the_runs(tuned):
    rows = training_tables.tuning_costs(tuned, read_tuning(tuned)).rows
    flops = 6000 * 6400 * 3  # per token, tokens, runs
    assert f"{2 * flops:,}" == "230,400,000"
    assert rows == [
        ["n_heads=1", "3", "0", "40", "6,000,000,000", "3", "24", "115,200,000", "52.08"],
        ["n_heads=4", "3", "1", "40", "6,000,000,000", "3", "24", "115,200,000", "52.08"],
        ["all", "6", "1", "80", "1.200e+10", "6", "48", "230,400,000", "52.08"],
    ]


def test_curves_are_drawn_with_their_choices(tuned, tmp_path, drawn):
    picture = draw_all(tuned, tmp_path)[-1]
    assert picture.file == "tuning.png" and "or a square if it is an end of the range" in picture.caption
    axes = drawn["tuning.png"].axes[0]
    lines = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]
    assert lines == [([0.5, 1, 2], [3.4, 3.2, 3.3]), ([1], [3.2]), ([0.5, 1], [3.1, 3.15]), ([0.5], [3.1])]
    assert [line.get_marker() for line in axes.lines[1::2]] == ["o", "s"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1", "2"] and axes.get_xscale() == "log"


def test_a_sweep_without_tuning_has_none(tmp_path, drawn):
    sweep = sweep_of(tmp_path)
    assert read_tuning(sweep) == {} and "tuning.png" not in [picture.file for picture in draw_all(sweep, tmp_path)]
