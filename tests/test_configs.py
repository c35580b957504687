"""Every shipped config composes and is valid, presets have the sizes that they claim, and every experiment runs."""

import inspect
import shutil

import pytest
import torch

from tests.conftest import tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.runs import train_typed, typed
from tril.data.config import SOURCES
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT
from tril.model.training.settings import TrainerConfig
from tril.scripts.cli.command_line import Typed, compose
from tril.scripts.cli.config import CONFIGS, RunConfig

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
GROUPS = ("model", "optim", "trainer", "data", "callbacks", "logger", "debug", "experiment")
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def checked(*settings: str) -> RunConfig:
    return RunConfig.of(compose("train", Typed.of(settings)).settings)


def sizes(choice: str, vocab_size: int) -> GPT:
    with torch.device("meta"):
        return GPT(checked(choice, f"model.vocab_size={vocab_size}").model)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_group_is_valid(option, text, tmp_path):
    needed = {"data=files": f"data.path={text}", "data=mixture": f"data.sources={{stdlib: 1, {text}: 1}}"}
    config = checked(option, *filter(None, [needed.get(option)]))
    group, _, name = option.partition("=")
    if group == "data":
        values = compose("train", Typed.of([option, *filter(None, [needed.get(option)])])).settings["data"]
        assert isinstance(config.data.source, SOURCES[values["source"]])


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_the_settings_of_every_program_compose(name):
    assert compose(name, Typed()).settings


def test_presets_have_the_sizes_they_claim():
    assert sizes("model=nano", 4096).n_parameters() == 2_558_016
    assert sizes("model=small", 4096).n_parameters(embeddings=False) == pytest.approx(10.6e6, rel=0.01)
    assert sizes("model=base", 4096).n_parameters(embeddings=False) == pytest.approx(12 * 12 * 768**2, rel=0.001)
    assert sizes("model=gpt2", 50257).n_parameters() == 124_439_808  # as published


def test_experiments_of_nanogpt_have_its_parameter_count():
    """nanoGPT prints 0.80 M and 10.65 M, without its position table (context * width)."""
    for name, table, printed in (("cpu", 64 * 128, 0.80e6), ("gpu", 256 * 384, 10.65e6)):
        count = sizes(f"experiment=shakespeare_nanogpt_{name}", 65).n_parameters()
        assert count - table == pytest.approx(printed, abs=0.005e6)


def test_trainer_keys_are_lightnings():
    from lightning import Trainer

    ours = {"max_flops"}
    assert set(TrainerConfig.__pydantic_fields__) - ours <= set(inspect.signature(Trainer.__init__).parameters)


def source_of(name, folder):
    """The settings of an experiment that starts from another model."""
    if name != "finetune":
        return []
    model = tiny_gpt(vocab_size=264, context_length=32)
    save(folder / "source.ckpt", LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    keys = ("n_layers", "dim", "n_heads", "context_length", "vocab_size")
    return [f"init_from={folder / 'source.ckpt'}", *(f"model.{key}={getattr(model.config, key)}" for key in keys)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ["compile=false"]) for name in EXPERIMENTS),
        pytest.param("shakespeare_long", [], marks=[pytest.mark.slow, NEEDS_COMPILER], id="shakespeare_long-compiled"),
    ],
)
def test_every_experiment_runs_a_step(name, options, tmp_path, text):
    """With its model, optimizer, schedule and callbacks, but smaller and on a local text."""
    shrunk = {"n_layers": 2, "dim": 32, "n_heads": 2, "context_length": 32, "vocab_size": "null"}
    of_source = source_of(name, tmp_path)
    run = train_typed(
        typed(
            f"experiment={name}",
            "data=files",
            f"data.path={text}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.batch_size=2",
            *(["data.tokenizer.vocab_size=300"] if not of_source else []),
            *(f"model.{key}={value}" for key, value in shrunk.items()),
            "trainer.max_steps=1",
            "trainer.accumulate_grad_batches=1",
            "trainer.accelerator=cpu",
            "optim.schedule.warmup_steps=0",
            "callbacks.samples.max_new_tokens=4",
            f"hydra.run.dir={tmp_path / 'run'}",
            *options,
            *of_source,
            base=[],
        )
    )
    assert run.summary["steps"] == 1 and run.summary["final_val_loss"] > 0
