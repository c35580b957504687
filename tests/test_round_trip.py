"""A model of transformers goes in, is trained, and comes out: text falls in loss, and both sides certify it."""

import json
import random

import pytest
import torch

from tests.calls import call
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.runs import in_process, rows
from tril.model.causality.hf import quiet
from tril.model.checkpoint import load
from tril.model.interop.hf import read_hf

T = 24


@pytest.fixture
def play(tmp_path):
    """A play of lines that follow a rule, which a model of bytes learns in a few steps."""
    draw = random.Random(0)
    words = ("the king of wales", "my gentle lord", "no more of war", "good night to all", "the crown is mine")
    speeches = (f"{draw.choice(('ROMEO', 'LEAR'))}:\n{', '.join(draw.sample(words, 3))}.\n\n" for _ in range(400))
    path = tmp_path / "play.txt"
    path.write_text("".join(speeches), encoding="utf-8")
    return path


@pytest.mark.slow
def test_gpt2_of_transformers_is_trained_exported_and_certified(tmp_path, play):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from tril.scripts import certify, export

    quiet()
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = {"n_positions": T, "n_layer": 2, "n_embd": 48, "n_head": 3, "bos_token_id": 256, "eos_token_id": 256}
    GPT2LMHeadModel(GPT2Config(vocab_size=264, **sizes)).save_pretrained(source)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=EOT).save_pretrained(source)

    steps = ["trainer.max_steps=100", "trainer.val_check_interval=50", "trainer.log_every_n_steps=10"]
    machine = ["trainer.accelerator=cpu", "trainer.precision=32-true", "optim.schedule.warmup_steps=5"]
    data = ["data=files", f"data.path={play}", "data.batch_size=8", "callbacks.samples.max_new_tokens=8"]
    done = in_process(f"init_from=hf:{source}", *data, *steps, *machine, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(row["train/loss"]) for row in rows(tmp_path / "run") if row.get("train/loss")]
    validation = [float(row["val/loss"]) for row in rows(tmp_path / "run") if row.get("val/loss")]
    assert losses[-1] < 0.5 * losses[0] and validation[-1] < validation[0]
    before, lm = read_hf(source).language_model(), load(tmp_path / "run")
    assert not any(
        torch.equal(tensor, lm.model.state_dict()[name]) for name, tensor in before.model.state_dict().items()
    )

    done = call(export.main, "ckpt=run", "out=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    ids = torch.randint(257, (4, T))
    assert type(theirs) is GPT2LMHeadModel
    with torch.no_grad():
        assert (theirs(ids).logits - lm.model(ids)).abs().max().item() <= 1e-4
    start = tokenizer("LEAR:\nthe ", return_tensors="pt")
    generated = theirs.generate(**start, do_sample=False, max_new_tokens=12)[0, start.input_ids.shape[1] :]
    assert tokenizer.decode(generated) == lm.generate("LEAR:\nthe ", 12, temperature=0.0)

    again = read_hf(out).language_model()
    state = again.model.state_dict()
    assert again.config == lm.config and again.tokenizer.to_str() == lm.tokenizer.to_str()
    assert all(torch.equal(tensor, state[name]) for name, tensor in lm.model.state_dict().items())
    stored = json.loads((out / "certificate.json").read_text())
    assert stored["passed"] and stored["text"].endswith("; belongs to these weights, config and code")
    for side in ("ckpt=run", "hf=out"):
        done = call(certify.main, side, "device=cpu", f"out=certified-{side[:2]}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("stored certificate: passed" in done.stdout) == (side == "ckpt=run")
