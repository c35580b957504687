"""certificate.json of an exported folder: whether it belongs to the weights next to it."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.calls import call
from tests.conftest import tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril.model.causality.case import ModelError
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.hf_folder import WEIGHTS, stored_certificate, write_hf
from tril.model.interop.model_card import CERTIFICATE, certificate
from tril.scripts.certify import main


@pytest.fixture
def folder(tmp_path):
    lm = LanguageModel(tiny_gpt(vocab_size=264, mlp="swiglu", qk_norm="none"), byte_tokenizer(), EOT)
    content = certificate(write_hf(tmp_path, lm), {"passed": True}, {})
    (tmp_path / CERTIFICATE).write_text(json.dumps(content))
    return tmp_path


def changed(folder, name):
    weights = load_file(folder / WEIGHTS)
    weights[name].view(-1)[-1] += 1e-3
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def test_it_belongs_until_a_weight_changes(folder):
    assert stored_certificate(folder) == {"text": "passed; belongs to these weights", "belongs": True, "passed": True}
    changed(folder, "model.norm.weight")
    found = stored_certificate(folder)
    assert not found["belongs"]
    expected = "passed; does not belong to these weights: 1 tensors differ, the first is model.norm.weight"
    assert found["text"] == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [({"causality": None, "sha256": {}}, "none"), ({"causality": {"passed": 1}}, "none that can be read")],
)
def test_a_folder_without_a_verdict(folder, content, text):
    (folder / CERTIFICATE).write_text(json.dumps(content))
    assert stored_certificate(folder) == {"text": text, "belongs": False, "passed": None}
    (folder / CERTIFICATE).unlink()
    assert stored_certificate(folder) is None


def broken(*_, **__):
    raise ModelError("the model is not called in this test")
    yield


def test_certify_says_so_first(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tril.model.causality.grids.transformers_grid.transformers_cases", broken)
    changed(folder, "model.norm.weight")
    done = call(main, f"hf={folder}", f"out={tmp_path / 'out'}", cwd=tmp_path)
    assert done.stdout.startswith("stored certificate: passed; does not belong to these weights: 1 tensors differ")
    assert done.returncode == 3
