"""Every grid of configs/ablation: it composes with each of its values, its cells can be trained, and what it says of them is so."""

import functools
import itertools

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tril.model.gpt import GPT, GPTConfig
from tril.scripts.common.cli import CONFIGS, plain
from tril.scripts.common.run_config import check

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
    """The values of each key, as Hydra's sweeper would hand them out."""
    params = composed(f"+ablation={name}", hydra=True).hydra.sweeper.params
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    return {override.key_or_group: list(override.sweep_string_iterator()) for override in parsed}


def grid(name: str) -> dict:
    """The composed settings of each cell, by its values joined with commas."""
    values = swept(name)
    return {
        ",".join(cell): composed(f"+ablation={name}", *(f"{key}={value}" for key, value in zip(values, cell)))
        for cell in itertools.product(*values.values())
    }


def model_of(cfg) -> GPTConfig:
    return GPTConfig(**plain(cfg.model) | {"vocab_size": VOCABULARY})


def on_paper(cfg) -> GPT:
    with torch.device("meta"):
        return GPT(model_of(cfg))


def ratios(name: str, size, to: str) -> dict[str, float]:
    """`size` of each cell of a grid, divided by that of one of them."""
    sizes = {cell: size(cfg) for cell, cfg in grid(name).items()}
    return {cell: own / sizes[to] for cell, own in sizes.items()}


def test_these_grids_exist():
    """scaling is no comparison: its cells differ in two things and have no curves, see tests/scripts/test_scaling.py."""
    assert sorted(path.stem for path in (CONFIGS / "ablation").glob("*.yaml")) == sorted([*NAMES, "scaling"])


@pytest.mark.parametrize(
    "name, cells",
    [
        ("equal_flops", ["96", "128", "192", "256", "384"]),
        ("ffn", ["relu2", "relu", "gelu", "swiglu"]),
        ("head_dim", ["12", "24", "48", "96"]),
        ("heads", ["1", "2", "4", "8"]),
        ("kv_heads", ["1", "2", "4"]),
        ("parts", ["full", "no_attention", "no_ffn", "no_residual_dropout"]),
        ("positions", ["rope", "learned", "none"]),
        ("width_depth", ["1x384", "2x272", "4x192", "8x136", "16x96"]),
        ("window", ["null", "128", "64", "32", "16", "8"]),
    ],
)
def test_hydra_reads_the_values_that_are_written(name, cells):
    assert list(grid(name)) == cells


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_its_question_and_how_to_start_it(name):
    package, question, start, *_ = (CONFIGS / "ablation" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    assert question.startswith("# ") and question.endswith("?") and not set(question[:-1]) & set(".?!:")
    assert start == f"#   python train.py -m +ablation={name} seed=0,1,2"


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_can_be_trained(name):
    for cell, cfg in grid(name).items():
        plan = check(cfg)
        assert plan.model == GPTConfig(**plain(cfg.model) | {"vocab_size": 1}), cell
        # The last point of the curve is the end of the run, and there are as many in every cell.
        assert plan.steps == 6 * cfg.trainer.val_check_interval, cell


@pytest.mark.parametrize("name", NAMES)
def test_no_two_cells_are_the_same_model(name):
    models = [model_of(cfg).canonical() for cfg in grid(name).values()]
    assert len(models) == len(set(models)) > 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_what_is_asked_about_differs(name):
    """From cell to cell, and (but for dropout where it is to be left out) from the default run."""
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
    default, trainer = composed(), {"val_check_interval"} | ({"max_steps"} if name == "equal_flops" else set())
    seen = set()
    for cfg in grid(name).values():
        seen |= {key for key in default.model if cfg.model[key] != default.model[key]}
        assert {key for key in default.trainer if cfg.trainer[key] != default.trainer[key]} <= trainer
        assert all(cfg[key] == default[key] for key in ("optim", "data", "causality", "compile", "seed"))
    assert seen == differ


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_one_of_the_cells_and_the_default_run(name):
    base, default = composed(f"+ablation={name}"), composed()
    key, values = next(iter(swept(name).items()))
    value = OmegaConf.select(base, key)
    own = grid(name)["null" if value is None else str(value)]
    assert own == base and len(swept(name)) == 1
    without_dropout = {"resid_dropout": 0.0} if name == "parts" else {}
    assert (
        GPTConfig(**plain(base.model) | {"vocab_size": 1} | without_dropout).canonical()
        == check(default).model.canonical()
    )
    assert base.trainer.max_steps == default.trainer.max_steps == DEFAULT_STEPS


@pytest.mark.parametrize(
    "name, base",
    [("width_depth", "4x192"), ("ffn", "relu2"), ("heads", "4"), ("window", "null"), ("positions", "rope")],
)
def test_parameters_are_equal_where_it_is_said(name, base):
    size = {"embeddings": name != "width_depth"}  # there, those of the blocks
    if name == "positions":  # but for the table, which is no part of them
        size = {"embeddings": False}
    for cell, ratio in ratios(name, lambda cfg: on_paper(cfg).n_parameters(**size), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), cell


@pytest.mark.parametrize("name, base", [("ffn", "relu2"), ("heads", "4")])
def test_flops_are_equal_where_it_is_said(name, base):
    for cell, ratio in ratios(name, lambda cfg: on_paper(cfg).flops_per_token(), to=base).items():
        assert ratio == pytest.approx(1, abs=2 * PER_CENT), cell


def test_what_is_said_of_the_whole_models_of_width_against_depth():
    total = ratios("width_depth", lambda cfg: on_paper(cfg).n_parameters(), to="4x192")
    flops = ratios("width_depth", lambda cfg: on_paper(cfg).flops_per_token(), to="4x192")
    assert total["1x384"] == max(total.values()) == pytest.approx(1.31, abs=PER_CENT)
    assert total["16x96"] == min(total.values()) == pytest.approx(0.85, abs=PER_CENT)
    assert flops["1x384"] == max(flops.values()) == pytest.approx(1.20, abs=PER_CENT)
    assert flops["8x136"] == min(flops.values()) == pytest.approx(0.98, abs=PER_CENT)


def test_training_flops_are_equal_by_hand():
    """6 FLOPs for every weight that is multiplied, and 12 L C T for the scores; 4 layers, 4 heads, a tied head, gains counted."""
    totals = {}
    for cell, cfg in grid("equal_flops").items():
        width = cfg.model.dim
        blocks = 4 * (4 * width**2 + 2 * 4 * width**2 + 2 * width + 2 * width // 4) + width
        flops = 6 * (blocks + VOCABULARY * width) + 12 * 4 * width * 256
        assert flops == on_paper(cfg).flops_per_token(), cell
        totals[cell] = flops * cfg.trainer.max_steps
    for cell, total in totals.items():
        assert total == pytest.approx(totals["192"], rel=2 * PER_CENT), cell


def test_heads_that_share_keys_and_values_cost_less():
    sizes = ratios("kv_heads", lambda cfg: on_paper(cfg).n_parameters(), to="4")
    caches = ratios("kv_heads", lambda cfg: on_paper(cfg).new_cache(1).keys[0].numel(), to="4")
    assert sizes["1"] < sizes["2"] < 1 and (caches["1"], caches["2"]) == (1 / 4, 1 / 2)


def test_parts_are_left_out_one_at_a_time():
    blocks = {cell: on_paper(cfg).blocks[0] for cell, cfg in grid("parts").items()}
    has = {cell: (block.attn is not None, block.mlp is not None) for cell, block in blocks.items()}
    assert has == {
        "full": (True, True),
        "no_attention": (False, True),
        "no_ffn": (True, False),
        "no_residual_dropout": (True, True),
    }
    full = dict(composed("+ablation=parts").model)
    differ = {
        cell: {key: value for key, value in cfg.model.items() if value != full[key]}
        for cell, cfg in grid("parts").items()
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
def test_a_cells_own_settings_are_whole_without_the_grid(name, override, tmp_path):
    """What train.py keeps in config.yaml, from which a run is resumed: no reference is left open."""
    cfg = composed(f"+ablation={name}", override, f"output_dir={tmp_path}")
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert "${" not in text
    saved = yaml.safe_load(text)
    assert saved["model"] == plain(cfg.model) and saved["trainer"] == plain(cfg.trainer)
    wanted = {"width_depth": (16, 96, 900, 4), "equal_flops": (4, 96, 2568, 4), "parts": (4, 192, 900, 0)}[name]
    assert (
        saved["model"]["n_layers"],
        saved["model"]["dim"],
        saved["trainer"]["max_steps"],
        saved["model"]["n_heads"],
    ) == wanted
