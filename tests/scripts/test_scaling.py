"""scripts/scaling.py: its files and tables, what it refuses, and configs/ablation/scaling.yaml."""

import itertools
import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.ablation.law_sweeps import PUBLISHED_INTERACTION, SIZES, STEPS, law_sweep, noisy, points_from
from tril.model.gpt import GPT
from tril.scripts.ablation.scaling_law import Law
from tril.scripts.cli.command_line import Typed, compose
from tril.scripts.cli.config import CONFIGS, RunConfig, flatten
from tril.scripts.cli.errors import message_of
from tril.scripts.scaling import main, read_settings

pytestmark = pytest.mark.xdist_group("scaling")  # one process of pytest-xdist has the costly fixture

LAW = Law(2.0, 50.0, 3000.0, 0.3, 0.55)
SETTINGS = {
    key: value
    for key, value in yaml.safe_load((CONFIGS / "scaling.yaml").read_text()).items()
    if key not in ("defaults", "hydra")
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a sweep of an exact law, of whose runs one failed and one diverged; the output; scaling.json."""
    folder = tmp_path_factory.mktemp("law")
    law_sweep(folder / "multirun" / "day" / "time", points_from(LAW), **{"4x160_160": "failed", "2x64_60": math.nan})
    more = "predict.parameters=[100000000]", "predict.tokens=[2]", "predict.flops=[10]"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        said = call(main, "dir=latest", "resamples=40", *more, "out=made/here", cwd=folder)
    assert said.returncode == 0, said.stderr
    return folder, said.stdout, json.loads((folder / "made" / "here" / "scaling.json").read_text())


def test_files_and_output(done):
    folder, said, _ = done
    written = folder / "made" / "here"
    assert {path.name for path in written.iterdir()} == {"scaling.md", "scaling.json", "scaling.png"}
    assert {path.name for path in (folder / "multirun" / "day" / "time").iterdir() if path.is_file()} == {"sweep.json"}
    text = (written / "scaling.md").read_text(encoding="utf-8")
    assert said == f"{text}\nmade/here: scaling.md, scaling.json, scaling.png\n"
    assert (written / "scaling.png").read_bytes()[1:4] == b"PNG" and "](scaling.png)" in text
    assert "L(N, D) = 2.000 + 50 / N^0.300 + 3000 / D^0.550, in nats per token; N parameters without embeddings" in text
    assert "3x96" not in text and "shape=4x160,steps=160,seed=0 (failed); shape=2x64, steps=60 (its loss" in text
    assert "**An illustration, not a law**: the sweep has 1 of at least 2 seeds at every point.\n" in text
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in lines.splitlines()}) == 1


def test_results_are_those_of_the_law(done):
    found = done[2]
    assert found["bounds"] == [] and len(found["points"]) == 18
    for name, estimate in found["law"].items():
        assert estimate["value"] == pytest.approx(getattr(LAW, name), rel=1e-4), name
        assert estimate["low"] == pytest.approx(estimate["high"], rel=0.02), name
    for name, points in (("one point", 18), ("largest size", 5), ("longest runs", 4)):
        assert found["errors"][name]["fit"]["largest"] < 1e-3 and found["errors"][name]["fit"]["points"] == points
    [row] = found["predictions"]
    assert (row["parameters"], row["tokens"]) == (1e8, 2 * max(STEPS.values()))
    assert row["loss"]["value"] == pytest.approx(LAW.loss(1e8, 2 * max(STEPS.values())), rel=1e-5)
    assert row["naive"]["nearest point"] == pytest.approx(LAW.loss(max(SIZES.values()), max(STEPS.values())))
    [split] = found["optima"]
    assert split["flops"] == 10 * 6 * max(SIZES.values()) * max(STEPS.values())
    assert split["parameters"]["value"] == pytest.approx(LAW.optimum(split["flops"])[0], rel=1e-3)
    assert split["tokens_per_parameter"]["value"] * split["parameters"]["value"] ** 2 * 6 == pytest.approx(
        split["flops"], rel=1e-6
    )
    by_bytes = found["points"][0]
    assert by_bytes["bpb"] == pytest.approx(
        by_bytes["loss"] / math.log(2) / 3
    )  # the synthetic runs have 3 bytes a token
    assert found["other_sizes"]["parameters"]["alpha"] == pytest.approx(
        LAW.alpha, rel=1e-3
    )  # twice as many of each size


def test_rejected_form_has_no_intervals(tmp_path):
    """Two seeds with the interaction that the page of 2026-11-22 had."""
    points = noisy(points_from(LAW), 0.003, seed=0, seeds=2, interaction=PUBLISHED_INTERACTION)
    law_sweep(tmp_path / "sweep", points)
    said = call(main, "dir=sweep", "predict.parameters=[1e8]", "predict.flops=[1]", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stderr == "fitting 20 points, without intervals: their form is rejected\n"
    assert re.search(r"\*\*An illustration, not a law\*\*: its residuals follow ln N x ln D \(p = \S+\)", said.stdout)
    assert "No intervals are given" in said.stdout and "**The interaction is not chance.**" in said.stdout
    found = json.loads((tmp_path / "sweep" / "scaling.json").read_text())
    estimates = [*found["law"].values(), *(row["loss"] for row in found["predictions"])]
    assert {(estimate["low"], estimate["high"]) for estimate in estimates} == {(None, None)}
    losses = [row["losses"] for row in found["points"]]
    assert losses == points.by_seed.tolist()  # the page can be computed again from them


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest"),
        (["dir=nowhere"], "nowhere is not a folder"),
        (["dir=latest"], "no sweep.json below multirun/"),
        (["dir=few"], "3 of at least 4 sizes; train more with python train.py -m +ablation=scaling"),
    ],
)
def test_wrong_folders_end_in_one_line(overrides, message, tmp_path):
    if overrides == ["dir=few"]:
        law_sweep(tmp_path / "few", **{f"5x224_{steps}": "unfinished" for steps in STEPS})
    assert_refused(call(main, *overrides, cwd=tmp_path), message)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"size": "active"}, "size=active must be 'parameters_without_embeddings' or 'parameters'"),
        ({"resamples": 39}, "resamples=39 must be greater than or equal to 40"),
        ({"seed": -1}, "seed=-1 must be greater than or equal to 0"),
        ({"predict": {"parameters": [1e8], "tokens": [0], "flops": [1]}}, "predict.tokens.0=0 must be greater than 0"),
        (
            {"predict": {"parameters": 1e8, "tokens": [1], "flops": [1]}},
            "predict.parameters=100000000.0 must be a valid list",
        ),
        ({"predict": None}, "predict.parameters is missing; predict.tokens is missing; predict.flops is missing"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    assert read_settings(SETTINGS | {"dir": "latest"}).predict.tokens == [1, 10]
    with pytest.raises(ValueError) as error:
        read_settings(SETTINGS | {"dir": "latest"} | wrong)
    assert message in message_of(error.value)


# ---------------------------------------------------------------- configs/ablation/scaling.yaml


def test_grid_starts_with_its_question_and_command():
    package, question, start, *_ = (CONFIGS / "ablation" / "scaling.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_" and question == "# How does the loss fall with parameters and with tokens?"
    assert start == "#   python train.py -m +ablation=scaling seed=0,1"


@pytest.fixture(scope="module")
def grid():
    """(shape, steps) -> the settings of each run, in the order of the grid."""
    params = yaml.safe_load((CONFIGS / "ablation" / "scaling.yaml").read_text())["hydra"]["sweeper"]["params"]
    values = itertools.product(params["shape"].split(","), params["steps"].split(","))
    return {
        (shape, int(steps)): compose(
            "train", Typed.of(["+ablation=scaling", f"shape={shape}", f"steps={steps}"])
        ).settings
        for shape, steps in values
    }


def test_grid_has_the_sizes_and_lengths_that_it_names(grid):
    assert list(grid) == list(itertools.product(SIZES, STEPS))
    for (shape, steps), settings in grid.items():
        config = RunConfig.of(settings)
        assert f"{config.model.n_layers}x{config.model.dim}" == shape
        assert config.steps == config.trainer.val_check_interval == steps
        assert config.tokens_per_step() * steps == STEPS[steps]
        with torch.device("meta"):
            model = GPT(replace(config.model, vocab_size=4096))
        assert model.n_parameters(embeddings=False) == pytest.approx(SIZES[shape], rel=0.01)  # except the norms' gains
        assert config.model.head_size == 32


def test_nothing_but_shape_and_length_differs_from_the_default_run(grid):
    default, differ = flatten(compose("train", Typed()).settings), set()
    for settings in grid.values():
        values = flatten({key: value for key, value in settings.items() if key not in ("shapes", "shape", "steps")})
        assert values.keys() == default.keys()
        differ |= {key for key, value in values.items() if value != default[key]}
    model, trainer = ("n_layers", "dim", "n_heads"), ("max_steps", "val_check_interval")
    assert differ == {
        "optim.scale_with_width", *(f"model.{key}" for key in model), *(f"trainer.{key}" for key in trainer)
    }  # fmt: skip


PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "scaling"


@pytest.mark.slow
@pytest.mark.parametrize("source", [PUBLISHED, PUBLISHED / "runs.tar.xz"], ids=["folder", "archive"])
def test_published_page_can_be_computed_again(source, tmp_path):
    """If the text changes, `python scripts/scaling.py dir=docs/scaling publish=docs/scaling` publishes it again."""
    said = call(main, f"dir={source}", "out=again", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    again, published = ((folder / "scaling.md").read_text() for folder in (tmp_path / "again", PUBLISHED))
    number = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
    assert number.sub("", again) == number.sub("", published)
    for one, other in zip(number.findall(again), number.findall(published), strict=True):
        assert float(one) == pytest.approx(float(other), rel=0, abs=last_digit(other)), (one, other)


def last_digit(number):
    """One unit of the last digit: the fit differs by roundings between processors."""
    digits, _, power = number.partition("e")
    return 1.001 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def test_a_published_page_is_computed_from_its_archive(tmp_path):
    """With the settings of the archive; typed ones replace them."""
    law_sweep(tmp_path / "sweep", points_from(LAW))
    options = "predict.flops=[10]", "size=parameters", "resamples=40"
    said = call(main, "dir=sweep", "publish=page", *options, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    page = tmp_path / "page"
    assert {path.name for path in page.iterdir()} == {"scaling.md", "scaling.png", "runs.tar.xz"}
    text = (page / "scaling.md").read_text()
    assert str(tmp_path) not in text and "N all parameters" in text
    said = call(main, "dir=page", "out=again", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "again" / "scaling.md").read_text() == text
    said = call(main, "dir=page", "size=parameters_without_embeddings", "out=other", cwd=tmp_path)
    assert said.returncode == 0 and "N parameters without" in (tmp_path / "other" / "scaling.md").read_text()
    assert_refused(call(main, "dir=page", "out=a", "publish=b", cwd=tmp_path), "out=a excludes publish=b; use one")
