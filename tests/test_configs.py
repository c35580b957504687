"""The shipped configs: options, presets and experiments are valid, and the comments of the ablations are true."""

import functools
import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.runs import train_typed, typed
from tril.data.config import SOURCES
from tril.model.gpt import GPT
from tril.scripts.cli.command_line import Typed
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import CONFIGS, RunConfig

GROUPS = ("model", "optim", "trainer", "data", "callbacks", "logger", "debug")
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
GRIDS = {  # ablation -> the values of its runs, and the fields of the model that differ
    "ffn": ("relu2 relu gelu swiglu", "mlp"),
    "head_dim": ("24 48 96 192", "head_dim"),
    "heads": ("1 2 4 8", "n_heads"),
    "kv_heads": ("1 2 4", "n_heads n_kv_heads"),
    "parts": ("full no_attention no_ffn no_residual_dropout", "n_heads mlp resid_dropout"),
    "positions": ("rope learned alibi none", "pos"),
    "width_depth": ("1x384 2x272 4x192 8x136 16x96", "n_layers dim"),
    "window": ("null 128 64 32 16 8", "window"),
}
SLOW = pytest.mark.slow


def composed(*settings: str):
    return compose("train", Typed.of(settings))


def checked(*settings: str) -> RunConfig:
    return RunConfig.of(composed(*settings).settings)


def model(config: RunConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config.fitted(config.likely_vocabulary()).model)


def test_every_option_of_a_group_is_valid(text):
    needed = {"data=files": [f"data.path={text}"], "data=mixture": [f"data.sources={{stdlib: 1, {text}: 1}}"]}
    options = [[f"{group}={path.stem}" for path in sorted((CONFIGS / group).glob("*.yaml"))] for group in GROUPS]
    for row in itertools.zip_longest(*options):  # an option of each group
        chosen = [option for option in row if option is not None]
        settings = composed(*chosen, *(word for option in chosen for word in needed.get(option, ()))).settings
        assert isinstance(RunConfig.of(settings).data.source, SOURCES[settings["data"]["source"]]), chosen


def test_presets_have_the_sizes_they_claim():
    def sizes(choice, vocab_size):
        return model(checked(choice, f"model.vocab_size={vocab_size}"))

    assert sizes("model=nano", 4096).n_parameters() == 3_345_604
    assert sizes("model=small", 4096).n_parameters(embeddings=False) == pytest.approx(10.6e6, rel=0.01)
    assert sizes("model=base", 4096).n_parameters(embeddings=False) == pytest.approx(12 * 12 * 768**2, rel=0.001)
    assert sizes("model=gpt2", 50257).n_parameters() == 124_439_808  # as published
    for name, table, printed in (("cpu", 64 * 128, 0.80e6), ("gpu", 256 * 384, 10.65e6)):  # nanoGPT counts no table
        count = sizes(f"experiment=shakespeare_nanogpt_{name}", 65).n_parameters()
        assert count - table == pytest.approx(printed, abs=0.005e6)


@pytest.mark.parametrize("name", [EXPERIMENTS[0], *(pytest.param(name, marks=SLOW) for name in EXPERIMENTS[1:])])
def test_every_experiment_runs_a_step(name, text, trained, tmp_path):
    """With its model, optimizer, schedule and callbacks, but smaller and on a local text."""
    given = {"experiment": name, "data.batch_size": 2, "callbacks.samples.max_new_tokens": 4}
    given |= {"model.n_layers": 2, "model.dim": 32, "model.n_heads": 2, "model.context_length": 32}
    given |= {"model.vocab_size": "null", "trainer.max_steps": 1, "trainer.accumulate_grad_batches": 1}
    given |= {"trainer.accelerator": "cpu", "optim.schedule.warmup_steps": 0, "compile": "false"}
    given |= {"data": "files", "data.path": text, "data.cache_dir": tmp_path / "cache"}
    byte = {"data.tokenizer.kind": "byte", "data.tokenizer.vocab_size": "null"}
    given |= {"init_from": trained, "model.vocab_size": 300} if name == "finetune" else byte
    words = [f"{key}={value}" for key, value in given.items()]
    run = train_typed(typed(*words, f"hydra.run.dir={tmp_path / 'run'}", base=[]))
    uniform = math.log(257)
    assert run.summary["steps"] == 1 and 0.5 * uniform < run.summary["final_val_loss"] < 1.5 * uniform


@functools.cache
def grid(name: str) -> dict[str, RunConfig]:
    """The checked settings of each run of an ablation, by its values joined with commas."""
    params = composed(f"+ablation={name}").grid
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    swept = {override.key_or_group: list(override.sweep_string_iterator()) for override in parsed}
    runs = {}
    for values in itertools.product(*swept.values()):
        settings = (f"{key}={value}" for key, value in zip(swept, values, strict=True))
        runs[",".join(values)] = checked(f"+ablation={name}", *settings)
    return runs


@pytest.mark.parametrize("name", ["heads", *(pytest.param(name, marks=SLOW) for name in GRIDS if name != "heads")])
def test_the_runs_of_an_ablation_are_valid_and_differ_in_its_question_alone(name):
    found = {path.stem for path in (CONFIGS / "ablation").glob("*.yaml")}
    assert found - GRIDS.keys() == {"scaling", "equal_flops", "emergence"}  # more than one setting differs
    values, differ = map(str.split, GRIDS[name])
    runs, default, seen = grid(name), checked(), set()
    assert list(runs) == values
    for config in runs.values():
        names = [each.name for each in fields(config.model) if each.name != "vocab_size"]
        seen |= {key for key in names if getattr(config.model, key) != getattr(default.model, key)}
        # The last point of the curve is the end of the run, and there are as many in every run.
        assert config.steps == default.steps == 1000 and -(-1000 // config.trainer.val_check_interval) == 5
        assert (config.data, config.causality, config.top) == (default.data, default.causality, default.top)
        assert config.optim.scale_with_width == (name == "width_depth")
    assert seen == set(differ) and len({config.model.canonical() for config in runs.values()}) == len(runs) > 2


def test_the_runs_of_the_study_of_emergence_differ_in_their_heads_alone_and_record_them_often():
    runs = grid("emergence")
    assert [config.model.n_heads for config in runs.values()] == [1, 2, 4, 8]
    rest = {(replace(run.model, n_heads=1).canonical(), run.optim, run.data, run.steps) for run in runs.values()}
    assert len(rest) == 1
    assert all(run.steps / run.trainer.val_check_interval >= 10 and run.callbacks.heads for run in runs.values())


@pytest.mark.slow
def test_sizes_of_the_runs_of_ablations_are_as_their_files_say():
    def ratios(name, size, to):
        sizes = {run: size(model(config)) for run, config in grid(name).items()}
        return {run: value / sizes[to] for run, value in sizes.items()}

    bodies = {"width_depth": "4x192", "positions": "rope"}  # of these, the tables of ids and positions differ
    for name, base in {"ffn": "relu2", "heads": "2", "window": "null", **bodies}.items():
        size = ratios(name, lambda gpt: gpt.n_parameters(embeddings=name not in bodies), to=base)  # noqa: B023
        assert all(ratio == pytest.approx(1, abs=0.02) for ratio in size.values()), (name, size)
    for name, base in (("ffn", "relu2"), ("heads", "2")):
        assert all(x == pytest.approx(1, abs=0.02) for x in ratios(name, GPT.flops_per_token, to=base).values())
    for size, largest, smallest in ((GPT.n_parameters, 1.47, 0.77), (GPT.flops_per_token, 1.25, 0.93)):
        whole = ratios("width_depth", size, to="4x192")
        assert whole["1x384"] == max(whole.values()) == pytest.approx(largest, abs=0.01)
        assert whole["16x96"] == min(whole.values()) == pytest.approx(smallest, abs=0.01)
    caches = ratios("kv_heads", lambda gpt: gpt.new_cache(1).keys[0].numel(), to="4")
    assert (caches["1"], caches["2"]) == (1 / 4, 1 / 2)
