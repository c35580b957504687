"""scripts/export.py: the files that it writes. The contract and `tests/model/interop` load them with transformers."""

import json

from tests.conftest import tiny_gpt
from tests.contract.harness import run
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel

FILES = "certificate.json config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"


def test_a_checkpoint_fills_an_empty_folder(tmp_path):
    model = tiny_gpt(vocab_size=264, mlp="swiglu", key_offset=False, embed_skip=False, value_embed=False)
    path, folder = tmp_path / "runs/model.ckpt", tmp_path / "a folder, new"
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    folder.mkdir()
    done = run("export", f"ckpt={path}", "out=a folder, new", cwd=tmp_path)
    text = f"{folder}: Qwen3ForCausalLM, equal to {path} in logits and token ids\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == FILES.split() and len({file.stat().st_mode for file in files}) == 1
    assert json.loads((folder / "certificate.json").read_text()) == {"text": "none"}
