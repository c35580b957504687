"""scripts/certify.py: which models it takes, what checkpoints say of their weights, and the step of a checkpoint."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import tiny_gpt
from tests.contract.harness import run
from tests.runs import interrupted, train_typed
from tril.model import masks
from tril.model.causality.certificate import Certificate
from tril.model.causality.step import check_stored_step
from tril.model.checkpoint import Checkpoint, verdict
from tril.model.training import checkpoints

SMALL = ("model.n_layers=1", "model.dim=16", "model.n_heads=2", "model.context_length=9")


def certify(*overrides, cwd):
    return run("certify", *overrides, "budget_seconds=0.2", "device=cpu", cwd=cwd, strict=True)


def written(folder):
    return json.loads((folder / "causality.json").read_text())


def last_two(ids):
    x = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))[ids]
    return x + 2 * F.pad(x, (0, 0, 1, -1))


def test_a_fresh_model_is_certified_and_a_leak_or_a_wrong_receptive_field_is_named(tmp_path):
    for heads, n_tokens in ((2, 4), (8, 3)):  # large heads have offset keys: the first holds half of the key before it
        done = certify(*SMALL, "model.window=3", f"model.n_heads={heads}", "out=here", cwd=tmp_path).succeeded()
        uses = f"; uses at most the last {n_tokens} tokens\n"
        assert done.stdout.startswith("nano: causal: ") and uses in done.stdout
    lengths = {result["length"] for result in written(tmp_path / "here")["results"]}
    assert written(tmp_path / "here")["passed"] and {9} <= lengths <= set(range(1, 10))
    done = certify(*SMALL, "model.causal=false", cwd=tmp_path)
    assert done.returncode == 1 and "nano: NOT causal: output 0 depends on input 1" in done.stdout, done.stderr
    assert "FAILED  future: output 0 depends on input 1, first in blocks.0.attn" in done.stdout
    assert written(tmp_path / "outputs/causality/nano")["passed"] is False
    sizes = [f"call={__name__}:last_two", "vocab_size=7", "context_length=12"]
    certify(*sizes, "receptive_field=1", cwd=tmp_path).succeeded()
    done = certify(*sizes, "receptive_field=2", cwd=tmp_path)
    assert done.returncode == 1 and "receptive field: output 11 does not depend on input 9" in done.stdout


@pytest.mark.slow
def test_models_of_transformers_are_certified(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, XGLMConfig

    sizes = {"vocab_size": 31, "d_model": 16, "ffn_dim": 32, "num_layers": 1, "attention_heads": 2}
    XGLMConfig(**sizes, max_position_embeddings=6).to_json_file(tmp_path / "xglm.json")  # not in float64
    certify("hf=xglm.json", cwd=tmp_path).succeeded()
    special = {"bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2Config(vocab_size=31, n_positions=6, n_layer=1, n_embd=16, n_head=2, **special)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "saved")
    certify("hf=saved", cwd=tmp_path).succeeded()
    assert written(tmp_path / "outputs/causality/saved")["passed"]


def test_every_checkpoint_of_a_run_says_which_weights_were_tested(configure, tmp_path, monkeypatch):
    """Also when the run goes on in a new process, with another backend."""
    verdicts, original = {}, checkpoints.write_state

    def recording(path, content):
        original(path, content)
        verdicts[content["global_step"]] = verdict(Checkpoint.read(path))

    monkeypatch.setattr(checkpoints, "write_state", recording)
    with interrupted():
        train_typed(configure("checkpoint.every_n_steps=3", "callbacks.samples=null", "callbacks.heads=null"))
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    run("train", "resume=run", "model.backend=explicit", cache, cwd=tmp_path).succeeded()
    random, weights = "passed before training, with random weights", "to this step and code"
    between, validated = f"{random}; does not belong {weights}", f"passed at step {{}}; belongs {weights}"
    assert verdicts == {3: between, 4: validated.format(4), 6: between, 8: validated.format(8)}
    certify("ckpt=run", cwd=tmp_path).succeeded()
    assert written(tmp_path / "run")["stored_certificate"] == validated.format(8)


def test_the_step_of_a_run_passes_unless_the_targets_separate_documents(monkeypatch):
    def failed(*, document_mask):
        stored = SimpleNamespace(data={"eot_id": 0}, settings={"data.document_mask": document_mask})
        certificate = Certificate("a step")
        with certificate.running():
            check_stored_step(certificate, tiny_gpt(), stored)
        return {f"{result.check} {result.variant}" for result in certificate.failures}

    def separated(inputs, eot):  # the window is cut after the target's end-of-text token, which the input cannot know
        documents = (inputs == eot).roll(-1, 1).cumsum(1)
        return documents, torch.arange(inputs.shape[1]).expand_as(inputs)

    assert not failed(document_mask=False) and not failed(document_mask=True)
    monkeypatch.setattr(masks, "split_documents", separated)
    assert failed(document_mask=True) == {"future loss precision=32-true"}
