"""init_from=: a new run from the weights, the config and the tokenizer of another model."""

import json
import re

import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer, folder_of
from tests.runs import in_process, typed
from tril.model.checkpoint import Checkpoint, digest, load, read_state, save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.hf import read_hf
from tril.scripts.cli.errors import UserError

RUN = [  # without keys of the model and the tokenizer, which are the source's
    "data=files",
    "data.batch_size=4",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "optim.schedule.warmup_steps=2",
    "callbacks.samples.max_new_tokens=8",
    "hydra.run.dir=run",
]


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a tokenizer of its own, biases, and rows that no token has."""
    path = tmp_path / "source.ckpt"
    model = tiny_gpt(vocab_size=264, context_length=32, n_kv_heads=2, bias=True, attn_dropout=0.1)
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    return path


@pytest.fixture
def hf(tmp_path):
    return folder_of("SmolLM", tmp_path / "hf")


def train(tmp_path, text, *arguments):
    return in_process(*RUN, f"data.path={text}", *arguments, cwd=tmp_path)


def weights_at_start(tmp_path, text, monkeypatch, *arguments):
    """The weights that the optimizer gets."""
    from tril.model.training.module import TrainingModule

    found = {}

    def keep(module):
        found.update({name: tensor.clone() for name, tensor in module.model.state_dict().items()})

    monkeypatch.setattr(TrainingModule, "on_train_start", keep, raising=False)
    done = train(tmp_path, text, *arguments)
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("kind", ["checkpoint", "hf"])
def test_the_run_starts_from_the_weights(tmp_path, text, source, hf, monkeypatch, kind):
    value, lm = (f"hf:{hf}", read_hf(hf).language_model()) if kind == "hf" else (source, load(source))
    found = weights_at_start(tmp_path, text, monkeypatch, f"init_from={value}", "model.attn_dropout=0.25")
    expected = lm.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    trained = load(tmp_path / "run")
    assert trained.config.to_dict() == lm.config.to_dict() | {"attn_dropout": 0.25}
    assert trained.tokenizer.to_str() == lm.tokenizer.to_str() and trained.eot == EOT


def test_lineage_settings_and_data(tmp_path, text, source):
    done = train(tmp_path, text, f"init_from={source}")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    weights = digest(Checkpoint.read(source).weights)
    lineage = {"source": str(source), "weights": weights, "step": None}
    entry = read_state(run / "checkpoints" / "last.ckpt")["tril"]
    assert entry["lineage"] == lineage and entry["certificate"]["passed"] is True
    summary = json.loads((run / "summary.json").read_text())
    assert [summary[f"init_from{suffix}"] for suffix in ("", "_weights", "_step")] == list(lineage.values())
    assert re.search(rf"\n  init from +{re.escape(str(source))}\n", done.stdout)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    [file] = (tmp_path / "cache" / "taken_over").glob("*.json")
    assert "init_from" not in settings and settings["data"]["tokenizer"]["path"] == str(file)
    assert settings["model"] == load(source).config.to_dict()
    # A byte is a token, and each document has an end.
    assert entry["data"]["vocab_size"] == 257 and entry["data"]["tokenizer"]["kind"] == "file"
    counts = entry["data"]["counts"]["train"]
    assert counts["tokens"] == counts["bytes"] + counts["documents"]


@pytest.mark.slow
def test_resuming_needs_no_source(tmp_path, text, source):
    """The run is stopped after two of four steps; the source is gone when it goes on."""
    first = train(tmp_path, text, f"init_from={source}", "trainer.max_steps=2")
    assert first.returncode == 0, first.stderr
    lineage = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt")["tril"]["lineage"]
    source.unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    done = in_process("resume=moved", "trainer.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = read_state(tmp_path / "moved" / "checkpoints" / "last.ckpt")
    assert content["global_step"] == 4 and content["tril"]["lineage"] == lineage
    assert json.loads((tmp_path / "moved" / "summary.json").read_text())["init_from_weights"] == lineage["weights"]


@pytest.mark.slow
def test_a_run_can_start_from_a_run_that_did(tmp_path, text, source):
    assert train(tmp_path, text, f"init_from={source}").returncode == 0
    done = train(tmp_path, text, "init_from=run/checkpoints/last.ckpt", "hydra.run.dir=second")
    assert done.returncode == 0, done.stderr
    content = read_state(tmp_path / "second" / "checkpoints" / "last.ckpt")
    first = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert content["tril"]["lineage"]["source"] == str(first) and content["tril"]["lineage"]["step"] == 4
    assert load(tmp_path / "second").tokenizer.to_str() == load(source).tokenizer.to_str()
    from tril.scripts.sample import main

    done = call(main, "ckpt=second", "prompt=line 1", "max_new_tokens=4", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("line 1")


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_gets_rows_of_the_mean(tmp_path, text, monkeypatch, tied):
    """The mean of the 257 rows of tokens, without those that no token has."""
    path = tmp_path / "source.ckpt"
    model = tiny_gpt(vocab_size=264, context_length=32, tie_embeddings=tied)
    with torch.no_grad():
        model.embed.weight[257:] = 50
        model.head.weight[257:] = 50
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = weights_at_start(tmp_path, text, monkeypatch, f"init_from={path}", "model.vocab_size=272")
    for name, before in expected.items():
        if name in ("embed.weight", "head.weight"):
            rows = [before[:, c][:257].double().mean().item() for c in range(before.shape[1])]
            for row in found[name][264:]:
                assert row.tolist() == pytest.approx(rows, abs=1e-6)
        assert torch.equal(found[name][: len(before)], before)
    assert found["embed.weight"].shape == (272, 32)
    lm = load(tmp_path / "run")
    assert lm.config.vocab_size == 272 and lm.n_ids == 257


def test_a_larger_vocabulary_is_named(tmp_path, text, source):
    done = train(tmp_path, text, f"init_from={source}", "model.vocab_size=272")
    assert "model.vocab_size=272 from 264: 8 new rows are the mean of the 257 rows of tokens" in done.stdout


REFUSED = [
    (["model.n_layers=3"], "has another model: model.n_layers=3 must be 2; leave them out"),
    (["model.n_layers=4"], "model.n_layers=4 must be 2"),  # typed, though it is the default
    (["model.dim=64", "model.pos=alibi"], "model.dim=64 must be 32; model.pos=alibi must be rope"),
    (["model=qwen3"], "model.mlp=swiglu must be relu2"),
    (["model.vocab_size=263"], "model.vocab_size=263 must be at least 264"),
    (["data.tokenizer.vocab_size=300"], "data.tokenizer.vocab_size=300 contradicts init_from="),
    (["trainer=fsdp"], "init_from needs whole weights in each process"),
    (["optim.scale_with_width=true"], "optim.scale_with_width=true scales initial values"),
    (["optim.lr=-1"], "optim.lr=-1"),
    (["init_from=nothing"], "nothing does not exist"),
    (["init_from=hf:nothing"], "nothing has no config.json"),
    (["init_from=text.txt"], "text.txt"),
    (["init_from="], "init_from="),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=str)
def test_refused_and_nothing_is_left(tmp_path, text, source, arguments, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert_refused(
        train(tmp_path, text, *([f"init_from={source}"] * ("init_from" not in arguments[0])), *arguments), message
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == before


def test_equal_values_in_another_form_are_accepted(source, text):
    from tril.scripts.cli.command_line import compose
    from tril.scripts.cli.start import find_start

    def found(*settings):
        return find_start(compose("train", typed(*settings, base=[])))

    keys = [f"data.path={text}", f"init_from={source}"]
    chosen = ["model.head_dim=8", "model.qkv_bias=true", "model.backend=explicit"]
    settings, start = found(*keys, *chosen)
    assert start.lineage is not None and start.lineage["source"] == str(source)
    assert settings["model"] == load(source).config.to_dict() | {"backend": "explicit"}
    with pytest.raises(UserError, match="model.head_dim=16 must be null"):
        found(*keys, "model.head_dim=16")
