"""What the tests of the benchmark share: composed settings, and a `Bench` of a tiny model."""

import copy
import functools

import pytest

from tril.scripts.benchmarks.bench_config import KEYS, TEXTS, parse
from tril.scripts.benchmarks.section import Bench
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.typed import Typed

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
def _composed(overrides):
    return compose("bench", Typed.of(overrides, TEXTS)).settings


def composed(*overrides):
    """The composed settings; a copy, since the same overrides are composed once."""
    return copy.deepcopy(_composed(overrides))


def run_config(settings):
    """The settings of the run that is timed, before the hardware is chosen."""
    return RunConfig.of({key: value for key, value in settings.items() if key not in KEYS}).with_likely_vocabulary()


@pytest.fixture
def make_bench(tmp_path):
    """`make_bench("key=value", ...)`: one repetition of one step of a tiny model on the CPU, after one of warm-up."""

    def make_bench(*overrides, typed=()):
        settings = composed("repeats=1", "warmup=1", "steps=1", *TINY, *overrides)
        return Bench(parse(settings), run_config(settings).on_this_machine(), settings, list(typed), tmp_path)

    return make_bench
