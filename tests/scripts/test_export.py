"""scripts/export.py: the folder of a run, and what it refuses without leaving anything behind."""

import contextlib
import json

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.runs import TINY, in_process
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop import hf_export
from tril.model.interop.hf import read_hf
from tril.scripts.export import main

FILES = "certificate.json config.json generation_config.json model.safetensors"
FILES += " tokenizer.json tokenizer_config.json"


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "runs" / "model.ckpt"
    model = tiny_gpt(vocab_size=264, mlp="swiglu", qk_norm="none")
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_of_save_fills_an_empty_folder_and_a_full_one_is_refused(tmp_path, checkpoint):
    (tmp_path / "a folder, new").mkdir()
    arguments = f"ckpt={checkpoint}", "out=a folder, new"
    done = call(main, *arguments, cwd=tmp_path)
    folder = tmp_path / "a folder, new"
    text = f"{folder}: LlamaForCausalLM, equal to {checkpoint} in logits and token ids\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert names(folder) == FILES.split() and names(tmp_path) == [folder.name, "runs"]
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate == {"text": "none"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert_refused(call(main, *arguments, cwd=tmp_path), "out=a folder, new exists; name a new one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "out=null must be a new folder"),
        (["out=new", "to=onnx"], "to=onnx must be 'hf' or 'gguf'"),
        (["out=new", "to=gguf"], "out=new must be a new file FILE.gguf"),
        (["out=runs/model.ckpt"], "out=runs/model.ckpt exists; name a new one"),
        (["out=runs/model.ckpt/below"], "runs/model.ckpt"),
        (["out=new", "ckpt=nothing"], "nothing does not exist"),
    ],
    ids=str,
)
def test_wrong_settings(tmp_path, checkpoint, arguments, message):
    assert_refused(call(main, f"ckpt={checkpoint}", *arguments, cwd=tmp_path), message)
    assert names(tmp_path) == ["runs"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()], ids=repr)
def test_an_export_that_ends_early_leaves_nothing(tmp_path, checkpoint, monkeypatch, error):
    def fails(folder, lm):
        raise error

    monkeypatch.setattr(hf_export, "check_equal", fails)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext():
        assert_refused(call(main, f"ckpt={checkpoint}", "out=new", cwd=tmp_path), "No space left")
    assert names(tmp_path) == ["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "llama", "qwen3"])
def test_a_run_of_a_preset(tmp_path, text, preset):
    """Train 40 steps, export, load with transformers, import again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sizes = ["model.vocab_size=320", "trainer.max_steps=40", "trainer.val_check_interval=20", "hydra.run.dir=run"]
    done = in_process(*TINY, f"model={preset}", f"data.path={text}", *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call(main, "ckpt=run", "out=hf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lm, ids = load(tmp_path / "run"), torch.randint(300, (2, 32))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(read_hf(tmp_path / "hf").language_model().model(ids), lm.model(ids))
        assert (theirs(ids).logits - lm.model(ids)).abs().max() <= 1e-4
    start = tokenizer("line 7: the", return_tensors="pt")
    generated = theirs.generate(**start, do_sample=False, max_new_tokens=12)[0, start.input_ids.shape[1] :]
    assert tokenizer.decode(generated) == lm.generate("line 7: the", 12, temperature=0.0)
    back, state = read_hf(tmp_path / "hf").language_model().model.state_dict(), lm.model.state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
