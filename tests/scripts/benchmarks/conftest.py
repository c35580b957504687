"""What the tests of the benchmark share: composed settings, and a `Bench` of a tiny model."""

import copy
import functools

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from tril.scripts.bench import parse_run
from tril.scripts.benchmarks.bench_config import parse
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import CONFIGS, plain

TINY = [
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "model.context_length=16",
    "data.batch_size=2",
    "data.tokenizer.vocab_size=300",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
]


@functools.cache
def _composed(config_name, overrides, options):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(config_name, list(overrides), **dict(options))


def composed(*overrides, config_name="bench", **options):
    """The composed settings; a copy, since the same overrides are composed once."""
    return copy.deepcopy(_composed(config_name, overrides, tuple(options.items())))


@pytest.fixture
def make_bench(tmp_path):
    """`make_bench("key=value", ...)`: one repetition of one step of a tiny model on the CPU, after one of warm-up."""

    def make_bench(*overrides, typed=()):
        cfg = composed("repeats=1", "warmup=1", "steps=1", *TINY, *overrides)
        cfg.output_dir = str(tmp_path)
        return Bench(parse(cfg), parse_run(cfg), plain(cfg), list(typed), tmp_path)

    return make_bench
