"""The shipped configs: options, presets and experiments are valid, and the comments of the ablations are true."""

import functools
import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.contract.harness import train
from tril.data.sources import SOURCES, parse
from tril.data.tokenizer import AUTO_VOCAB_SIZE, TokenizerConfig
from tril.model.gpt import GPT
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import CONFIGS, RunConfig

GROUPS = ("model", "optim", "trainer", "data", "callbacks", "logger", "debug")
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
# Ablation -> the values of its runs, the fields of the model that differ, and sizes in those of the default run
GRIDS = {
    "ffn": ("relu2 relu gelu swiglu", "mlp", {"parameters": [1] * 4, "flops": [1] * 4}),
    "head_dim": ("24 48 96 192", "head_dim", {}),
    "heads": ("1 2 4 8", "n_heads", {"parameters": [1] * 4, "flops": [1] * 4}),
    "kv_heads": ("1 2 4", "n_heads n_kv_heads", {"cache": [1 / 4, 1 / 2, 1]}),
    "parts": ("full no_attention no_ffn no_residual_dropout", "n_heads mlp resid_dropout", {}),
    "positions": ("rope learned alibi none", "pos", {"body": [1] * 4}),  # the tables of ids and positions differ
    "width_depth": (
        "1x384 2x272 4x192 8x136 16x96",
        "n_layers dim",
        {"body": [1] * 5, "parameters": [1.47, 1.2, 1, 0.87, 0.77], "flops": [1.24, 1.1, 1, 0.95, 0.94]},
    ),
    "window": ("null 256 128 64 32 16", "window", {"parameters": [1] * 6}),
}
MEASURES = {
    "parameters": GPT.n_parameters,
    "body": lambda gpt: gpt.n_parameters(embeddings=False),
    "flops": lambda gpt: gpt.flops_per_token(checked().data.window_lengths(512)),
    "cache": lambda gpt: gpt.new_cache(1).keys[0].numel(),
}
SLOW = pytest.mark.slow
NAMES = sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml"))
YAMLS = {name: compose("train", [f"data={name}"]).settings["data"] for name in NAMES}


def checked(*settings: str) -> RunConfig:
    return RunConfig.of(compose("train", settings).settings)


def model(config: RunConfig) -> GPT:
    with torch.device("meta"):
        return GPT(replace(config.model, vocab_size=config.model.vocab_size or AUTO_VOCAB_SIZE))


def test_every_option_of_a_group_is_valid(text):
    needed = {"data=files": [f"data.path={text}"]}
    options = [[f"{group}={path.stem}" for path in sorted((CONFIGS / group).glob("*.yaml"))] for group in GROUPS]
    for row in itertools.zip_longest(*options):  # an option of each group
        chosen = [option for option in row if option is not None]
        settings = compose("train", [*chosen, *(word for option in chosen for word in needed.get(option, ()))])
        assert isinstance(RunConfig.of(settings.settings).data, SOURCES[settings.settings["data"]["source"]])


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
def test_every_experiment_runs_a_step(name, text, request, tmp_path):
    """With its model, optimizer, schedule and callbacks, but smaller and on a local text."""
    given = {"experiment": name, "data.batch_size": 2, "callbacks.samples.max_new_tokens": 4}
    given |= {"trainer.max_steps": 1, "trainer.accumulate_grad_batches": 1, "trainer.accelerator": "cpu"}
    given |= {"optim.schedule.warmup_steps": 0, "compile": "false"}
    given |= {"data": "files", "data.path": text, "data.cache_dir": tmp_path / "cache"}
    if name == "finetune":  # takes over the model of the source
        given |= {"init_from": request.getfixturevalue("trained")}
    else:
        given |= {"model.n_layers": 2, "model.dim": 32, "model.n_heads": 2, "model.context_length": 32}
        given |= {"model.vocab_size": "null", "data.tokenizer.kind": "byte", "data.tokenizer.vocab_size": "null"}
    words = [f"{key}={value}" for key, value in given.items()]
    run = train(*words, f"hydra.run.dir={tmp_path / 'run'}", base=())
    uniform = math.log(257)
    assert run.summary["steps"] == 1 and 0.5 * uniform < run.summary["final_val_loss"] < 1.5 * uniform


@functools.cache
def grid(name: str) -> dict[str, RunConfig]:
    """The checked settings of each run of an ablation, by its values joined with commas."""
    params = compose("train", [f"+ablation={name}"]).grid
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    swept = {override.key_or_group: list(override.sweep_string_iterator()) for override in parsed}
    runs = {}
    for values in itertools.product(*swept.values()):
        settings = (f"{key}={value}" for key, value in zip(swept, values, strict=True))
        runs[",".join(values)] = checked(f"+ablation={name}", *settings)
    return runs


@pytest.mark.parametrize("name", ["heads", *(pytest.param(name, marks=SLOW) for name in GRIDS if name != "heads")])
def test_the_runs_of_an_ablation_differ_in_its_question_alone(name):
    assert {path.stem for path in (CONFIGS / "ablation").glob("*.yaml")} == GRIDS.keys()
    values, differ, sizes = GRIDS[name][0].split(), {*GRIDS[name][1].split()}, GRIDS[name][2]
    runs, first, seen = grid(name), checked(), set()
    assert list(runs) == values and len({config.model.canonical() for config in runs.values()}) == len(runs) > 2
    for config in runs.values():
        keys = {each.name for each in fields(config.model)} - {"vocab_size"}
        seen |= {key for key in keys if getattr(config.model, key) != getattr(first.model, key)}
        same = ("data", "causality", "top", "optim")
        assert all(getattr(config, group) == getattr(first, group) for group in same)
        steps, points = config.trainer.max_steps, config.trainer.max_steps / config.trainer.val_check_interval
        assert (steps, points) == (first.trainer.max_steps, 4)  # the last point of the curve is the end of the run
    assert seen == differ
    for measure, shares in sizes.items():
        found = [MEASURES[measure](model(config)) for config in runs.values()]
        assert [size / found[shares.index(1)] for size in found] == pytest.approx(shares, abs=0.01), measure


def test_shipped_yamls_have_every_key():
    """Without a key, Hydra would refuse an override of it."""
    for name, values in YAMLS.items():
        assert set(values) == {"source", *(field.name for field in fields(SOURCES[values["source"]]))}
        assert set(values["tokenizer"]) == {field.name for field in fields(TokenizerConfig)}
        assert name == "files" or parse(values).name  # files need a path
    line = compose("train", ["data=hub", "data.repo=owner/name"])  # a source without a yaml file
    assert (line.settings["data"]["source"], line.settings["data"]["repo"]) == ("hub", "owner/name")
