"""Every grid of configs/ablation composes with each of its values, its runs are valid, and its comments are true."""

import functools
import itertools
import math
from dataclasses import fields

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from tril.model.gpt import GPT
from tril.scripts.cli.command_line import Typed, compose
from tril.scripts.cli.config import CONFIGS, RunConfig

GRIDS = {  # name -> the values of its runs, and the fields of the model that differ
    "ffn": ("relu2 relu gelu swiglu", "mlp"),
    "head_dim": ("12 24 48 96", "head_dim"),
    "heads": ("1 2 4 8", "n_heads"),
    "kv_heads": ("1 2 4", "n_kv_heads"),
    "parts": ("full no_attention no_ffn no_residual_dropout", "n_heads mlp resid_dropout"),
    "positions": ("rope learned alibi none", "pos"),
    "width_depth": ("1x384 2x272 4x192 8x136 16x96", "n_layers dim"),
    "window": ("null 128 64 32 16 8", "window"),
}
ELSEWHERE = {"scaling", "equal_flops"}  # no comparisons with one setting that differs
PER_CENT = 0.01


def composed(*settings: str):
    return compose("train", Typed.of(settings))


@functools.cache
def grid(name: str) -> dict[str, RunConfig]:
    """The checked settings of each run, by its values joined with commas."""
    params = composed(f"+ablation={name}").grid
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    swept = {override.key_or_group: list(override.sweep_string_iterator()) for override in parsed}
    runs = {}
    for values in itertools.product(*swept.values()):
        settings = (f"{key}={value}" for key, value in zip(swept, values, strict=True))
        runs[",".join(values)] = RunConfig.of(composed(f"+ablation={name}", *settings).settings)
    return runs


def model(config: RunConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config.fitted(config.likely_vocabulary()).model)


def ratios(name: str, size, to: str) -> dict[str, float]:
    """`size` of the model of each run, divided by that of the run `to`."""
    sizes = {run: size(model(config)) for run, config in grid(name).items()}
    return {run: value / sizes[to] for run, value in sizes.items()}


def test_these_grids_exist():
    assert {path.stem for path in (CONFIGS / "ablation").glob("*.yaml")} == GRIDS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", GRIDS)
def test_the_runs_are_valid_and_differ_in_the_question_alone(name):
    values, differ = map(str.split, GRIDS[name])
    runs, default = grid(name), RunConfig.of(composed().settings)
    assert list(runs) == values
    seen = set()
    for config in runs.values():
        changed = [each.name for each in fields(config.model) if each.name != "vocab_size"]
        seen |= {key for key in changed if getattr(config.model, key) != getattr(default.model, key)}
        # The last point of the curve is the end of the run, and there are as many in every run.
        assert math.ceil(config.steps / config.trainer.val_check_interval) == 6
        assert config.steps == default.steps == 900
        assert (config.data, config.causality, config.top) == (default.data, default.causality, default.top)
        assert config.optim.scale_with_width == (name == "width_depth")
    assert seen == set(differ)
    assert len({config.model.canonical() for config in runs.values()}) == len(runs) > 2
    without_dropout = {"resid_dropout": 0.0} if name == "parts" else {}
    base = RunConfig.of(
        composed(f"+ablation={name}", *(f"model.{key}={x}" for key, x in without_dropout.items())).settings
    )
    assert base.model.canonical() == default.model.canonical()


@pytest.mark.parametrize("name", [*GRIDS, "equal_flops"])
def test_the_file_starts_with_its_question_and_command(name):
    package, question, start, *_ = (CONFIGS / "ablation" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    assert question.startswith("# ") and question.endswith("?") and not set(question[:-1]) & set(".?!:")
    assert start == f"#   python train.py -m +ablation={name} seed=0,1,2"


@pytest.mark.parametrize(
    "name, base",
    [("width_depth", "4x192"), ("ffn", "relu2"), ("heads", "4"), ("window", "null"), ("positions", "rope")],
)
def test_parameters_are_equal_as_stated(name, base):
    embeddings = name not in ("width_depth", "positions")  # there, without the tables
    for run, ratio in ratios(name, lambda gpt: gpt.n_parameters(embeddings=embeddings), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), run


@pytest.mark.parametrize("name, base", [("ffn", "relu2"), ("heads", "4")])
def test_flops_are_equal_as_stated(name, base):
    for run, ratio in ratios(name, lambda gpt: gpt.flops_per_token(), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), run


def test_sizes_of_the_whole_models_of_width_depth():
    total = ratios("width_depth", lambda gpt: gpt.n_parameters(), to="4x192")
    flops = ratios("width_depth", lambda gpt: gpt.flops_per_token(), to="4x192")
    assert total["1x384"] == max(total.values()) == pytest.approx(1.31, abs=PER_CENT)
    assert total["16x96"] == min(total.values()) == pytest.approx(0.85, abs=PER_CENT)
    assert flops["1x384"] == max(flops.values()) == pytest.approx(1.25, abs=PER_CENT)
    assert flops["16x96"] == min(flops.values()) == pytest.approx(0.93, abs=PER_CENT)


def test_shared_keys_and_values_are_smaller():
    sizes = ratios("kv_heads", lambda gpt: gpt.n_parameters(), to="4")
    caches = ratios("kv_heads", lambda gpt: gpt.new_cache(1).keys[0].numel(), to="4")
    assert sizes["1"] < sizes["2"] < 1 and (caches["1"], caches["2"]) == (1 / 4, 1 / 2)


def test_parts_are_left_out_one_at_a_time():
    full = grid("parts")["full"].model
    names = [each.name for each in fields(full)]
    differ = {
        run: {key: getattr(config.model, key) for key in names if getattr(config.model, key) != getattr(full, key)}
        for run, config in grid("parts").items()
    }
    assert full.resid_dropout == 0.1
    assert differ == {
        "full": {},
        "no_attention": {"n_heads": 0},
        "no_ffn": {"mlp": "none"},
        "no_residual_dropout": {"resid_dropout": 0.0},
    }
