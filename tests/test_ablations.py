"""Every grid of configs/ablation composes with each of its values, its runs are valid, and its comments are true."""

import functools
import itertools
import math

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tril.model.gpt import GPT, GPTConfig
from tril.scripts.common.cli import CONFIGS, plain
from tril.scripts.common.equal_flops import with_max_flops
from tril.scripts.common.run_config import check_config

NAMES = ("equal_flops", "ffn", "head_dim", "heads", "kv_heads", "parts", "positions", "width_depth", "window")
VOCABULARY = 4096  # of the default tokenizer
DEFAULT_STEPS = 900
PER_CENT = 0.01


@functools.cache
def composed(*overrides, hydra=False):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=hydra)


def swept(name: str) -> dict[str, list[str]]:
    """The values of each key, as Hydra's sweeper splits them."""
    params = composed(f"+ablation={name}", hydra=True).hydra.sweeper.params
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    return {override.key_or_group: list(override.sweep_string_iterator()) for override in parsed}


@functools.cache
def grid(name: str) -> dict:
    """The composed settings of each run, by its values joined with commas; with the steps that equal FLOPs give."""
    values = swept(name)
    runs = {
        ",".join(run): composed(
            f"+ablation={name}",
            *(f"{key}={value}" for key, value in zip(values, run, strict=True)),
            *([f"model.vocab_size={VOCABULARY}"] if name == "equal_flops" else []),  # without preparing the text
        )
        for run in itertools.product(*values.values())
    }
    return {run: with_max_flops(cfg, check_config(cfg))[0] for run, cfg in runs.items()}


def model_of(cfg) -> GPTConfig:
    return GPTConfig(**plain(cfg.model) | {"vocab_size": VOCABULARY})


def meta_model(cfg) -> GPT:
    with torch.device("meta"):
        return GPT(model_of(cfg))


def ratios(name: str, size, to: str) -> dict[str, float]:
    """`size` of each run of a grid, divided by that of the run `to`."""
    sizes = {run: size(cfg) for run, cfg in grid(name).items()}
    return {run: value / sizes[to] for run, value in sizes.items()}


def test_these_grids_exist():
    """scaling is not a comparison: its runs differ in two keys, see tests/scripts/test_scaling.py."""
    assert sorted(path.stem for path in (CONFIGS / "ablation").glob("*.yaml")) == sorted([*NAMES, "scaling"])


@pytest.mark.parametrize(
    "name, runs",
    [
        ("equal_flops", ["96", "128", "192", "256", "384"]),
        ("ffn", ["relu2", "relu", "gelu", "swiglu"]),
        ("head_dim", ["12", "24", "48", "96"]),
        ("heads", ["1", "2", "4", "8"]),
        ("kv_heads", ["1", "2", "4"]),
        ("parts", ["full", "no_attention", "no_ffn", "no_residual_dropout"]),
        ("positions", ["rope", "learned", "alibi", "none"]),
        ("width_depth", ["1x384", "2x272", "4x192", "8x136", "16x96"]),
        ("window", ["null", "128", "64", "32", "16", "8"]),
    ],
)
def test_grid_has_these_values(name, runs):
    assert list(grid(name)) == runs


@pytest.mark.parametrize("name", NAMES)
def test_file_starts_with_its_question_and_command(name):
    package, question, start, *_ = (CONFIGS / "ablation" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    assert question.startswith("# ") and question.endswith("?") and not set(question[:-1]) & set(".?!:")
    assert start == f"#   python train.py -m +ablation={name} seed=0,1,2"


@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_valid(name):
    for run, cfg in grid(name).items():
        plan = check_config(cfg)
        assert plan.model == GPTConfig(**plain(cfg.model) | {"vocab_size": cfg.model.vocab_size or 1}), run
        # The last point of the curve is the end of the run, and there are as many in every run.
        assert math.ceil(plan.steps / cfg.trainer.val_check_interval) == 6, run


@pytest.mark.parametrize("name", NAMES)
def test_no_two_runs_have_the_same_model(name):
    models = [model_of(cfg).canonical() for cfg in grid(name).values()]
    assert len(models) == len(set(models)) > 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_question_differs(name):
    """From run to run, and from the default run (except dropout in parts)."""
    differ = {
        "equal_flops": {"dim"},
        "ffn": {"mlp"},
        "head_dim": {"head_dim"},
        "heads": {"n_heads"},
        "kv_heads": {"n_kv_heads"},
        "parts": {"n_heads", "mlp", "resid_dropout"},
        "positions": {"pos"},
        "width_depth": {"n_layers", "dim"},
        "window": {"window"},
    }[name]
    default, trainer = (
        composed(),
        {"val_check_interval"} | ({"max_steps", "max_flops"} if name == "equal_flops" else set()),
    )
    seen = set()
    for cfg in grid(name).values():
        seen |= {key for key in default.model if cfg.model[key] != default.model[key]} - {"vocab_size"}
        assert {key for key in default.trainer if cfg.trainer[key] != default.trainer[key]} <= trainer
        assert all(cfg[key] == default[key] for key in ("data", "causality", "compile", "seed"))
        scaled = {"scale_with_width": True} if name in ("equal_flops", "width_depth") else {}
        assert cfg.optim == {**default.optim, **scaled}
    assert seen == differ


@pytest.mark.parametrize("name", NAMES)
def test_base_is_one_of_the_runs_and_the_default_run(name):
    base, default = composed(f"+ablation={name}"), composed()
    key, values = next(iter(swept(name).items()))
    value = OmegaConf.select(base, key)
    run = grid(name)["null" if value is None else str(value)]
    assert OmegaConf.merge(run, {"model": {"vocab_size": None}}) == base and len(swept(name)) == 1
    without_dropout = {"resid_dropout": 0.0} if name == "parts" else {}
    assert (
        GPTConfig(**plain(base.model) | {"vocab_size": 1} | without_dropout).canonical()
        == check_config(default).model.canonical()
    )
    assert base.trainer.max_steps == default.trainer.max_steps == DEFAULT_STEPS


@pytest.mark.parametrize(
    "name, base",
    [("width_depth", "4x192"), ("ffn", "relu2"), ("heads", "4"), ("window", "null"), ("positions", "rope")],
)
def test_parameters_are_equal_as_stated(name, base):
    size = {"embeddings": name not in ("width_depth", "positions")}  # there, without the tables
    for run, ratio in ratios(name, lambda cfg: meta_model(cfg).n_parameters(**size), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), run


@pytest.mark.parametrize("name, base", [("ffn", "relu2"), ("heads", "4")])
def test_flops_are_equal_as_stated(name, base):
    for run, ratio in ratios(name, lambda cfg: meta_model(cfg).flops_per_token(), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), run


def test_sizes_of_the_whole_models_of_width_depth():
    total = ratios("width_depth", lambda cfg: meta_model(cfg).n_parameters(), to="4x192")
    flops = ratios("width_depth", lambda cfg: meta_model(cfg).flops_per_token(), to="4x192")
    assert total["1x384"] == max(total.values()) == pytest.approx(1.31, abs=PER_CENT)
    assert total["16x96"] == min(total.values()) == pytest.approx(0.85, abs=PER_CENT)
    assert flops["1x384"] == max(flops.values()) == pytest.approx(1.25, abs=PER_CENT)
    assert flops["16x96"] == min(flops.values()) == pytest.approx(0.93, abs=PER_CENT)


def test_training_flops_are_equal_by_hand():
    """6 FLOPs for every multiplied weight, 12 L C (T + 1) / 2 for the scores; 4 layers, 4 heads, a tied head."""
    totals = {}
    for run, cfg in grid("equal_flops").items():
        width = cfg.model.dim
        blocks = 4 * (4 * width**2 + 2 * 4 * width**2 + 2 * width + 2 * width // 4) + width
        flops = 6 * (blocks + VOCABULARY * width) + 12 * 4 * width * 257 // 2
        assert flops == meta_model(cfg).flops_per_token(), run
        totals[run] = flops * cfg.trainer.max_steps
    for run, total in totals.items():
        assert total == pytest.approx(3e13 / (composed().data.batch_size * 256), rel=2 * PER_CENT), run


def test_shared_keys_and_values_are_smaller():
    sizes = ratios("kv_heads", lambda cfg: meta_model(cfg).n_parameters(), to="4")
    caches = ratios("kv_heads", lambda cfg: meta_model(cfg).new_cache(1).keys[0].numel(), to="4")
    assert sizes["1"] < sizes["2"] < 1 and (caches["1"], caches["2"]) == (1 / 4, 1 / 2)


def test_parts_are_left_out_one_at_a_time():
    blocks = {run: meta_model(cfg).blocks[0] for run, cfg in grid("parts").items()}
    has = {run: (block.attn is not None, block.mlp is not None) for run, block in blocks.items()}
    assert has == {
        "full": (True, True),
        "no_attention": (False, True),
        "no_ffn": (True, False),
        "no_residual_dropout": (True, True),
    }
    full = dict(composed("+ablation=parts").model)
    differ = {
        run: {key: value for key, value in cfg.model.items() if value != full[key]}
        for run, cfg in grid("parts").items()
    }
    assert full["resid_dropout"] == 0.1
    assert differ == {
        "full": {},
        "no_attention": {"n_heads": 0},
        "no_ffn": {"mlp": "none"},
        "no_residual_dropout": {"resid_dropout": 0.0},
    }


@pytest.mark.parametrize(
    "name, override", [("width_depth", "shape=16x96"), ("equal_flops", "model.dim=96"), ("parts", "part=no_attention")]
)
def test_settings_of_a_run_are_complete_without_the_grid(name, override, tmp_path):
    """config.yaml, from which a run is resumed, contains no reference."""
    cfg = composed(f"+ablation={name}", override, f"output_dir={tmp_path}", f"model.vocab_size={VOCABULARY}")
    cfg, _ = with_max_flops(cfg, check_config(cfg))
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert "${" not in text
    saved = yaml.safe_load(text)
    assert saved["model"] == plain(cfg.model) and saved["trainer"] == plain(cfg.trainer)
    wanted = {"width_depth": (16, 96, 900, 4), "equal_flops": (4, 96, 2651, 4), "parts": (4, 192, 900, 0)}[name]
    assert (
        saved["model"]["n_layers"],
        saved["model"]["dim"],
        saved["trainer"]["max_steps"],
        saved["model"]["n_heads"],
    ) == wanted
