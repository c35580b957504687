"""scripts/export.py: what it writes and leaves. The contract and `tests/model/interop` load it with transformers."""

import json

import pytest

from tests.calls import call
from tests.conftest import tiny_gpt
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop import hf_export
from tril.scripts.export import main

FILES = "certificate.json config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
PARTS = {"mlp": "swiglu", "qk_norm": "none", "key_offset": False, "embed_skip": False, "value_embed": False}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_fills_an_empty_folder_and_an_export_that_ends_early_leaves_nothing(tmp_path, monkeypatch):
    path, folder = tmp_path / "runs/model.ckpt", tmp_path / "a folder, new"
    save(path, LanguageModel(tiny_gpt(vocab_size=264, **PARTS), byte_tokenizer(), EOT), fingerprint="f00")
    folder.mkdir()
    done = call(main, f"ckpt={path}", "out=a folder, new", cwd=tmp_path)
    text = f"{folder}: LlamaForCausalLM, equal to {path} in logits and token ids\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert names(folder) == FILES.split() and len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert json.loads((folder / "certificate.json").read_text()) == {"text": "none"}

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_export, "check_equal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(main, f"ckpt={path}", "out=new", cwd=tmp_path)
    assert names(tmp_path) == [folder.name, "runs"]
