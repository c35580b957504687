"""Which weights, config, data and code the certificate of a checkpoint belongs to."""

import copy
import hashlib
import json

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.conftest import tiny_gpt
from tril.model import binding
from tril.model.binding import compare, describe, describe_checkpoint, sources_sha256
from tril.model.checkpoint import language_model, payload, read, write
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig

EOT = "<|endoftext|>"
BELONGS = "passed at step 4; belongs to these weights, config, data and code"
MISSING = {"text": "none", "belongs": False, "differs": ["none"], "passed": None, "certified_at_step": None}


@pytest.fixture
def path(tmp_path):
    """A checkpoint of step 4 that was certified there, as training writes it."""
    return written(tmp_path / "a.ckpt", certified_at_step=4)


def written(path, *, step=4, **certificate):
    model = tiny_gpt(n_layers=1, pos="rope", window=5)
    tokenizer = Tokenizer(models.WordLevel({EOT: 0, "word": 1}, unk_token="word"))
    entry = payload(model, tokenizer, EOT, {"fingerprint": "of the text"})
    module = TrainingModule(model, OptimConfig(), total_steps=8, val_bytes=float, payload=entry)
    module.set_certificate({"passed": True, **certificate})
    content = {"state_dict": module.state_dict(), "global_step": step}
    module.on_save_checkpoint(content)
    write(path, content)
    return path


def verdict(path):
    content = read(path)
    config = language_model(path, content).model.config
    return compare(content["tril"].get("causality"), describe_checkpoint(content, config.to_dict()))


def changed(path, change):
    """The file with another content and the checksums of that."""
    content = read(path, mmap=False)
    change(content)
    write(path, content)
    return verdict(path)


def flip_the_last_bit(content):
    weight = content["state_dict"]["model.blocks.0.attn.q_proj.weight"]
    weight.view(torch.int32)[0, 0] ^= 1


def config(**values):
    return lambda content: content["tril"]["config"].update(values)


def test_an_unchanged_checkpoint_belongs_to_its_certificate(path):
    expected = {"text": BELONGS, "belongs": True, "differs": [], "passed": True, "certified_at_step": 4}
    assert verdict(path) == changed(path, lambda content: None) == expected


def test_the_hashes_are_those_of_the_file(path):
    content = read(path)
    found = content["tril"]["causality"]["of"]
    lines = [
        f"{name} torch.float32 {tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
        for name, tensor in sorted(content["state_dict"].items())
    ]
    settings = content["tril"]["config"]
    assert found["weights"] == hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert found["config"] == hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    assert found["settings"] == settings and found["data"] == "of the text" and found["step"] == 4


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (config(window=3), "model.window=3 was 5"),
        (config(window=None), "model.window=None was 5"),
        (config(pos="alibi"), "model.pos='alibi' was 'rope'"),
        (config(rope_base=500.0), "model.rope_base=500.0 was 10000.0"),
        (config(backend="flex"), "model.backend='flex' was 'fused'"),
        (flip_the_last_bit, "the weights differ"),
        (lambda content: content["tril"]["data"].update(fingerprint="other"), "the data differ"),
        (lambda content: content["tril"]["causality"]["of"].update(weights="0" * 64), "the weights differ"),
        (lambda content: content["tril"]["causality"]["of"].pop("weights"), "no hash of the weights is stored"),
        (lambda content: content["tril"]["causality"]["of"].update(config="0" * 64), "the config differs"),
    ],
)
def test_what_was_changed_since_is_named(path, change, differs):
    found = changed(path, change)
    assert found["differs"] == [differs] and found["belongs"] is False
    assert found["text"] == f"passed at step 4; does not belong to this file: {differs}"


def test_all_changes_are_named(path):
    found = changed(path, lambda content: (config(window=3)(content), flip_the_last_bit(content)))
    assert found["differs"] == ["model.window=3 was 5", "the weights differ"]


def test_other_code_is_named(path, monkeypatch):
    """A version alone may be unknown: a checkout need not be installed."""
    monkeypatch.setattr(binding, "SOURCES", ("model/gpt.py",))
    assert verdict(path)["differs"] == ["the code differs"]
    monkeypatch.setattr(binding, "version", lambda name: "9.9")
    assert verdict(path)["differs"][1].startswith("Tril 9.9 was ")


def test_the_code_is_what_computes_and_what_certifies(tmp_path, monkeypatch):
    files = {"model/gpt.py": b"1", "model/causality/grids/a.py": b"2", "model/heads/b.py": b"3", "train.py": b"4"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(binding, "PACKAGE", tmp_path)
    expected = hashlib.sha256(b"model/causality/grids/a.py\x002\x00model/gpt.py\x001\x00").hexdigest()
    assert sources_sha256.__wrapped__(*binding.SOURCES) == expected


@pytest.mark.parametrize(
    ("certificate", "text"),
    [
        ({"certified_at_step": 3}, "passed at step 3; does not belong to this file: the weights are of step 4"),
        ({"certified_at_step": None}, "passed before training, with random weights; does not belong to this file: the"),
        ({"certified_at_step": 4, "passed": False}, "FAILED at step 4; belongs to these weights"),
    ],
    ids=str,
)
def test_weights_that_were_not_tested_and_failures_are_named(tmp_path, certificate, text):
    found = verdict(written(tmp_path / "a.ckpt", **certificate))
    assert found["text"].startswith(text) and found["belongs"] is (certificate["certified_at_step"] == 4)


def test_a_deleted_verdict_is_none(path):
    assert changed(path, lambda content: content["tril"].pop("causality")) == MISSING


def test_certificates_of_older_versions_have_no_hashes(path):
    def older(content):
        content["tril"]["causality"] = {"passed": True, "checks": {"no future": 2}, "failed": [], "seconds": 0.1}

    found = changed(path, older)
    assert found["text"].startswith("passed; no hashes stored, so") and found["differs"] == ["no hashes stored"]


@pytest.mark.parametrize("certificate", ["text", [], {}, {"passed": "yes"}, torch.ones(2)], ids=str)
def test_a_certificate_that_cannot_be_read_is_none(path, certificate):
    found = changed(path, lambda content: content["tril"].update(causality=certificate))
    assert found["text"] == "none that can be read" and found["belongs"] is False


@pytest.mark.parametrize("wrong", [torch.ones(2), [1], 7, {}], ids=str)
@pytest.mark.parametrize("key", ["weights", "config", "settings", "data", "code", "step", "version"])
def test_hashes_of_any_type_differ(path, key, wrong):
    stored = read(path)["tril"]["causality"]
    found = describe_checkpoint(read(path), tiny_gpt(n_layers=1, window=5).config.to_dict())
    broken = copy.deepcopy(stored)
    broken["of"][key] = wrong
    assert compare(broken, found)["belongs"] is (key == "version")


def test_a_description_without_file(path):
    """As another program computes it to compare it with causality.json."""
    content = read(path)
    stored = content["tril"]["causality"]["of"]
    found = describe(content["tril"]["config"], data="of the text", step=4, weights=stored["weights"])
    assert found == stored
