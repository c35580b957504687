"""scripts/export.py: what it writes and leaves, and a model of transformers that comes back trained."""

import contextlib
import json
import random

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.tokenizers import EOT, byte_tokenizer
from tests.runs import in_process
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop import hf_export
from tril.model.interop.hf import read_hf
from tril.scripts import certify
from tril.scripts.export import main

FILES = "certificate.json config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
WORDS = ("the king of wales", "my gentle lord", "no more of war", "good night to all", "the crown is mine")
STEPS = ("trainer.max_steps=60", "trainer.val_check_interval=60", "data.batch_size=8", "trainer.accelerator=cpu")
STEPS += ("trainer.precision=32-true", "optim.schedule.warmup_steps=5")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_fills_an_empty_folder_and_an_export_that_ends_early_leaves_nothing(tmp_path, monkeypatch):
    path, folder = tmp_path / "runs/model.ckpt", tmp_path / "a folder, new"
    model = tiny_gpt(vocab_size=264, mlp="swiglu", qk_norm="none", embed_skip=False, value_embed=False)
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    folder.mkdir()
    arguments = f"ckpt={path}", "out=a folder, new"
    done = call(main, *arguments, cwd=tmp_path)
    text = f"{folder}: LlamaForCausalLM, equal to {path} in logits and token ids\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert names(folder) == FILES.split() and names(tmp_path) == [folder.name, "runs"]
    assert json.loads((folder / "certificate.json").read_text()) == {"text": "none"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert_refused(call(main, *arguments, cwd=tmp_path), "out=a folder, new exists; name a new one")
    for error in (OSError(28, "No space left"), KeyboardInterrupt()):
        monkeypatch.setattr(hf_export, "check_equal", lambda folder, lm, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext():
            assert_refused(call(main, f"ckpt={path}", "out=new", cwd=tmp_path), "No space left")
    assert names(tmp_path) == [folder.name, "runs"]


@pytest.mark.slow
def test_gpt2_of_transformers_is_trained_exported_and_certified(tmp_path):
    """The text follows a rule, which a model of bytes learns in a few steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    draw = random.Random(0)
    speeches = (f"{draw.choice(('ROMEO', 'LEAR'))}:\n{', '.join(draw.sample(WORDS, 3))}.\n\n" for _ in range(400))
    (tmp_path / "play.txt").write_text("".join(speeches), encoding="utf-8")
    sizes = {"n_positions": 24, "n_layer": 2, "n_embd": 48, "n_head": 3, "bos_token_id": 256, "eos_token_id": 256}
    GPT2LMHeadModel(GPT2Config(vocab_size=264, **sizes)).save_pretrained(tmp_path / "source")
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=EOT).save_pretrained(tmp_path / "source")
    run = in_process("init_from=hf:source", "data.path=play.txt", *STEPS, "hydra.run.dir=run", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    done = call(main, "ckpt=run", "out=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    lm, start = load(tmp_path / "run"), tokenizer("LEAR:\nthe ", return_tensors="pt")
    generated = theirs.generate(**start, do_sample=False, max_new_tokens=12)[0, start.input_ids.shape[1] :]
    assert tokenizer.decode(generated) == lm.generate("LEAR:\nthe ", 12, temperature=0.0)
    again = read_hf(tmp_path / "out").language_model()
    state = again.model.state_dict()
    assert again.config == lm.config and again.tokenizer.to_str() == lm.tokenizer.to_str()
    assert all(torch.equal(tensor, state[name]) for name, tensor in lm.model.state_dict().items())
    stored = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert stored["passed"] and stored["text"].endswith("; belongs to these weights, config and code")
    done = call(certify.main, "hf=out", "device=cpu", "budget_seconds=1.0", "out=certified", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
