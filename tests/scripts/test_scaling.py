"""scripts/scaling.py as it is typed, and the grid that it is made for."""

import json
import math
import re

import pytest
import yaml

from tests.conftest import assert_refused, run_python
from tests.scripts.ablation.test_scaling_law import SIZES, STEPS, sweep_of
from tests.test_ablations import composed, grid, on_paper
from tril.model.config import GPTConfig
from tril.scripts.ablation.scaling_law import Law
from tril.scripts.common.cli import CONFIGS, plain
from tril.scripts.common.run_config import check as check_run
from tril.scripts.scaling import caveats, check, count, find_sweep, reach, table, without_nan, write_up

SCRIPT = CONFIGS.parent / "scripts" / "scaling.py"
LAW = Law(2.0, 50.0, 3000.0, 0.3, 0.55)
SETTINGS = {
    key: its
    for key, its in yaml.safe_load((CONFIGS / "scaling.yaml").read_text()).items()
    if key not in ("defaults", "hydra")
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished sweep of an exact law but for one cell, what the script said of it, and what it wrote."""
    folder = tmp_path_factory.mktemp("law")
    sweep_of(folder / "multirun" / "day" / "time", LAW, **{"4x144_225": "failed"})
    more = "predict.parameters=[100000000]", "predict.tokens=[2]", "predict.flops=[10]"
    said = run_python(
        "-W", "error::UserWarning", SCRIPT, "dir=latest", "resamples=40", *more, "out=made/here", cwd=folder
    )
    assert said.returncode == 0, said.stderr
    return folder, said.stdout, json.loads((folder / "made" / "here" / "scaling.json").read_text())


def test_the_files_and_what_is_printed(done):
    folder, said, _ = done
    written = folder / "made" / "here"
    assert {path.name for path in written.iterdir()} == {"scaling.md", "scaling.json", "scaling.png"}
    assert {path.name for path in (folder / "multirun" / "day" / "time").iterdir() if path.is_file()} == {"sweep.json"}
    text = (written / "scaling.md").read_text(encoding="utf-8")
    assert said == f"{text}\nmade/here: scaling.md, scaling.json, scaling.png\n"
    assert (written / "scaling.png").read_bytes()[1:4] == b"PNG" and "](scaling.png)" in text
    assert "L(N, D) = 2.000 + 50 / N^0.300 + 3000 / D^0.550, in nats per token; N parameters without embeddings" in text
    assert "3x96" not in text and "shape=4x144,steps=225,seed=0 (failed)" in text
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in lines.splitlines()}) == 1


def test_the_figures_are_those_of_the_law(done):
    found = done[2]
    assert found["bounds"] == [] and len(found["cells"]) == 11
    for name, its in found["law"].items():
        assert its["value"] == pytest.approx(getattr(LAW, name), rel=1e-4), name
        assert its["low"] == pytest.approx(its["high"], rel=0.02), name
    assert found["errors"]["one cell"]["largest"] < 1e-3 and found["errors"]["longest runs"] is None
    [row] = found["predictions"]
    assert (row["parameters"], row["tokens"]) == (1e8, 2 * max(STEPS.values()))
    assert row["loss"]["value"] == pytest.approx(LAW.loss(1e8, 2 * max(STEPS.values())), rel=1e-5)
    [split] = found["optima"]
    assert split["flops"] == 10 * 6 * max(SIZES.values()) * max(STEPS.values())
    assert split["parameters"]["value"] == pytest.approx(LAW.optimum(split["flops"])[0], rel=1e-3)
    assert split["tokens_per_parameter"]["value"] * split["parameters"]["value"] ** 2 * 6 == pytest.approx(
        split["flops"], rel=1e-6
    )
    by_bytes = found["cells"][0]
    assert by_bytes["bpb"] == pytest.approx(
        by_bytes["loss"] / math.log(2) / 3
    )  # the synthetic runs have 3 bytes a token
    assert found["counted_otherwise"]["parameters"]["alpha"] == pytest.approx(
        LAW.alpha, rel=1e-3
    )  # twice as many of each size


def test_what_is_to_be_said_is_said(done):
    found = done[2]
    lines = caveats(found)
    assert not any("degenerate" in line for line in lines)
    assert any("Five parameters stand against 11 cells" in line for line in lines)
    assert any("the residuals, which have 11 - 5 degrees of freedom" in line for line in lines)
    assert any("3.07 times the next" in line for line in lines) and any("One seed a cell" in line for line in lines)
    assert "a factor of 32 in N and 5 in D" in reach(found) and "9.42 times the largest N" in reach(found)
    worse = found | {"bounds": ["alpha", "E"], "resamples_at_bounds": 0.25}
    assert caveats(worse)[0].startswith("**The fit is degenerate**: alpha, E ended") and caveats(worse)[1].startswith(
        "25% of the resamples"
    )
    seeds = [row | {"seeds": 2, "spread": 0.01} for row in found["cells"]]
    assert any("differ by 0.0100 in standard deviation" in line for line in caveats(found | {"cells": seeds}))
    assert "degenerate" in write_up(worse)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "dir is missing; give the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest"),
        (["dir=nowhere"], "nowhere is no folder"),
        (["dir=latest"], "no sweep.json below multirun/"),
        (["dir=few"], "3 sizes of at least 4; train more with python train.py -m +ablation=scaling"),
    ],
)
def test_wrong_folders_end_in_one_line(overrides, message, tmp_path):
    if overrides == ["dir=few"]:
        sweep_of(tmp_path / "few", **{f"6x384_{steps}": "unfinished" for steps in STEPS})
    assert_refused(run_python(SCRIPT, *overrides, cwd=tmp_path), message)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"size": "active"}, "size=active must be one of parameters_without_embeddings, parameters"),
        ({"resamples": 39}, "resamples=39 must be a whole number, at least 40"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or above"),
        (
            {"predict": {"parameters": [1e8], "tokens": [0], "flops": [1]}},
            r"predict.tokens=\[0\] must be a list of numbers above 0",
        ),
        (
            {"predict": {"parameters": 1e8, "tokens": [1], "flops": [1]}},
            "predict.parameters=100000000.0 must be a list",
        ),
        ({"predict": None}, "predict.parameters=None must be a list"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    check(SETTINGS | {"dir": "latest"})
    with pytest.raises(ValueError, match=message):
        check(SETTINGS | {"dir": "latest"} | wrong)


def test_a_folder_is_taken_as_it_is_typed():
    assert str(find_sweep("multirun/a b")) == "multirun/a b"


def test_numbers_and_tables():
    assert [count(value) for value in (331_776, 1_536_000, 10_616_832, 8.5e7, 3e9, 2.5e12, 12)] == [
        "332 k", "1.54 M", "10.6 M", "85 M", "3 G", "2.5 T", "12",
    ]  # fmt: skip
    assert table(["a", "b"], [["x", "1"]]) == "| a   |   b |\n|-----|----:|\n| x   |   1 |"
    assert without_nan({"a": [math.nan, 1.0], "b": math.inf}) == {"a": [None, 1.0], "b": None}


# ---------------------------------------------------------------- configs/ablation/scaling.yaml


def test_the_grid_begins_with_its_question_and_how_to_start_it():
    package, question, start, *_ = (CONFIGS / "ablation" / "scaling.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_" and question == "# How does the loss fall with parameters and with tokens?"
    assert start == "#   python train.py -m +ablation=scaling seed=0,1,2"


def test_the_grid_has_the_sizes_and_lengths_that_it_names():
    cells = grid("scaling")
    assert list(cells) == [f"{shape},{steps}" for shape in SIZES for steps in STEPS]
    for name, cfg in cells.items():
        shape, steps = name.split(",")
        assert "x".join(map(str, (cfg.model.n_layers, cfg.model.dim))) == shape
        assert check_run(cfg).steps == cfg.trainer.val_check_interval == int(steps)
        assert cfg.data.batch_size * cfg.model.context_length * int(steps) == STEPS[int(steps)]
        assert on_paper(cfg).n_parameters(embeddings=False) == pytest.approx(
            SIZES[shape], rel=0.01
        )  # but for the gains of the norms
        assert cfg.model.dim / cfg.model.n_heads == 48


def test_nothing_but_shape_and_length_differs_from_the_default_run():
    default = composed()
    for cfg in grid("scaling").values():
        assert {key for key in default.model if cfg.model[key] != default.model[key]} <= {"n_layers", "dim", "n_heads"}
        assert {key for key in default.trainer if cfg.trainer[key] != default.trainer[key]} <= {
            "max_steps",
            "val_check_interval",
        }
        assert all(cfg[key] == default[key] for key in ("optim", "data", "causality", "compile", "seed"))


def test_a_cells_own_settings_are_whole_without_the_grid():
    cfg = plain(composed("+ablation=scaling", "shape=6x384", "steps=100", "output_dir=."))
    assert GPTConfig(**cfg["model"] | {"vocab_size": 1}).n_heads == 8
    assert (cfg["trainer"]["max_steps"], cfg["trainer"]["val_check_interval"]) == (100, 100)
