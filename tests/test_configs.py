"""Every shipped config composes and matches its constructor, and every experiment runs a step."""

import inspect
import shutil

import pytest
import torch
import yaml

from tests import runs
from tests.conftest import tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril import train as train_script
from tril.data.config import SOURCES, parse
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig
from tril.scripts.common.cli import CONFIGS, plain

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


def composed(*overrides):
    return runs.composed(*overrides, base=[])


@pytest.mark.parametrize("name", MODELS)
def test_model_presets_set_every_field_of_gptconfig(name):
    assert set(composed(f"model={name}").model) == set(GPTConfig.__dataclass_fields__)


def test_presets_have_the_sizes_they_claim():
    sizes = {}
    for name in MODELS:
        values = plain(composed(f"model={name}").model)
        with torch.device("meta"):
            sizes[name] = GPT(GPTConfig(**values | {"vocab_size": 50257 if name == "gpt2" else 4096}))
    assert sizes["nano"].n_parameters() == 2_558_016
    assert sizes["small"].n_parameters(embeddings=False) == pytest.approx(10.6e6, rel=0.01)
    assert sizes["base"].n_parameters(embeddings=False) == pytest.approx(12 * 12 * 768**2, rel=0.001)
    assert sizes["gpt2"].n_parameters() == 124_439_808  # as published


def test_experiments_of_nanogpt_have_its_parameter_count():
    counts = {}
    for name in ("shakespeare_nanogpt_cpu", "shakespeare_nanogpt_gpu"):
        values = plain(composed(f"experiment={name}").model)
        counts[name] = GPT(GPTConfig(**values | {"vocab_size": 65})).n_parameters()
    # nanoGPT prints 0.80 M and 10.65 M, without its position table (context * width).
    assert counts["shakespeare_nanogpt_cpu"] - 64 * 128 == pytest.approx(0.80e6, abs=0.005e6)
    assert counts["shakespeare_nanogpt_gpu"] - 256 * 384 == pytest.approx(10.65e6, abs=0.005e6)


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_data_configs_parse(path, tmp_path):
    (tmp_path / "text.txt").write_text("text")
    values = yaml.safe_load(path.read_text())
    if values["source"] == "files":
        values["path"] = str(tmp_path / "text.txt")
    if values["source"] == "mixture":
        values["sources"] = {"stdlib": 1, str(tmp_path / "text.txt"): 1}
    assert isinstance(parse(values).source, SOURCES[values["source"]])


def test_trainer_keys_are_lightnings():
    from lightning import Trainer

    assert set(composed().trainer) <= set(inspect.signature(Trainer.__init__).parameters)


def source_of(name, folder):
    """The keys of an experiment that starts from another model."""
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
def test_every_experiment_runs_a_step(name, options, tmp_path):
    """With its model, optimizer, schedule and callbacks, but smaller and on a local text."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(500)))
    shrunk = {"n_layers": 2, "dim": 32, "n_heads": 2, "context_length": 32, "vocab_size": None}
    cfg = composed(
        f"experiment={name}",
        "data=files",
        f"data.path={text}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.batch_size=2",
        "data.tokenizer.vocab_size=300",
        *(f"model.{key}={'null' if value is None else value}" for key, value in shrunk.items()),
        "trainer.max_steps=1",
        "trainer.accumulate_grad_batches=1",
        "trainer.accelerator=cpu",
        "optim.schedule.warmup_steps=0",
        "callbacks.samples.max_new_tokens=4",
        f"output_dir={tmp_path / 'run'}",
        *options,
        *source_of(name, tmp_path),
    )
    assert train_script.train(cfg)["val/loss"] > 0
