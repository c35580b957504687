"""The certificate of runs and of the command: verdicts, exit statuses, and what checkpoints say of their weights.

`tests/causality` has the models that it must tell apart.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback
from torch import nn

from tests.conftest import tiny_gpt
from tests.contract.harness import TINY, interrupted, merged, newest_run, run, summary
from tril.model import MultiHeadAttention
from tril.model.causality import assert_causal, certify
from tril.model.causality.certificate import Certificate
from tril.model.causality.step import check_stored_step
from tril.model.checkpoint import Checkpoint, verdict
from tril.model.training import checkpoints

V = 13
CALLED = SimpleNamespace(
    causal=lambda ids: F.one_hot(ids, V).cumsum(1).float(),
    leaks=lambda ids: F.one_hot(ids, V).flip(1).cumsum(1).float(),
    raises=lambda ids, mask: ids,  # without its second argument
    rounds=lambda ids: (x := F.one_hot(ids, V) / 3).cumsum(1) / (1 // (x.itemsize < 8)) + 1e-7 * x.sum(1, True),
)


def written(folder):
    return json.loads((folder / "causality.json").read_text("utf-8"))


def passed(folder):
    return written(folder)["passed"]


MODEL = ("model.n_layers=1", "model.dim=8", "model.context_length=16", "model.n_heads=2")
SMALL = (*merged(TINY, *MODEL, "trainer.max_steps=4"), "~callbacks.samples", "~callbacks.heads")


class Sees(nn.Module):
    """Position 7 sees the next token."""

    def forward(self, x):
        return x + x.roll(-1, 1) * (torch.arange(x.shape[1]) == 7)[:, None]


def test_a_leak_is_located_and_the_model_is_unchanged():
    model = nn.Sequential(nn.Embedding(V, 8), Sees(), nn.Linear(8, V))
    before, sizes = copy.deepcopy(model), {"vocab_size": V, "context_length": 16, "budget_seconds": 1.0}
    certificate = certify(model, **sizes)
    assert not certificate.passed and model.training
    assert all(torch.equal(old, new) for old, new in zip(before.parameters(), model.parameters(), strict=True))
    first = certificate.failures[0]
    assert (first.query, first.key, first.place) == (7, 8, "1")
    with pytest.raises(AssertionError):
        assert_causal(model, **sizes)
    assert_causal(nn.Sequential(model[0], model[2]), **sizes)


def test_the_exit_status_says_what_was_found(tmp_path):
    names = "causal", "leaks", "absent", "raises", "rounds"
    sizes = f"vocab_size={V}", "context_length=8"
    rows = [(f"call={__name__}:CALLED.{name}", *sizes, f"out={name}") for name in names]
    ended = [run("certify", *row, cwd=tmp_path) for row in rows]
    assert [done.returncode for done in ended] == [0, 1, 2, 3, 4], ended
    assert all(done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 for done in ended[2:4])
    found = {folder.name: passed(folder) for folder in tmp_path.iterdir()}
    assert found == {"causal": True, "leaks": False, "rounds": False}


class Leaks(Callback):
    """Attention sees the mean over time after a batch, as with a mask that comes off."""

    def on_train_batch_end(self, *_):
        forward = MultiHeadAttention.forward
        MultiHeadAttention.forward = lambda module, x, **options: forward(module, x, **options) + x.mean(1, True)


def test_a_run_whose_model_leaks_after_a_batch_ends(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(MultiHeadAttention, "forward", MultiHeadAttention.forward)  # restores it
    later = f"+callbacks.later._target_={__name__}.Leaks"
    done = run("train", *SMALL, f"data.path={texts}", later, cwd=tmp_path)
    assert done.returncode == 2 and "causality.allow_leak=true" in done.stderr.splitlines()[-1], done
    assert not passed(newest_run(tmp_path)) and not [*tmp_path.rglob("summary.json")]


def test_allow_leak_trains_and_marks_the_run(run_of, trained):
    leaking = run_of("model.causal=false", "causality.allow_leak=true", base=SMALL)
    assert not passed(leaking) and "LEAKS" in summary(leaking)["causality"]
    assert passed(trained) and "LEAKS" not in summary(trained)["causality"]


# the command
FRESH = ("model.n_layers=1", "model.dim=16", "model.n_heads=2", "model.context_length=9")


def certified(*overrides, cwd):
    return run("certify", *overrides, "budget_seconds=0.2", "device=cpu", cwd=cwd, strict=True)


def last_two(ids):
    x = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))[ids]
    return x + 2 * F.pad(x, (0, 0, 1, -1))


def test_a_fresh_model_is_certified_and_a_leak_or_a_wrong_receptive_field_is_named(tmp_path):
    for heads, n_tokens in ((2, 4), (8, 3)):  # large heads have offset keys: the first holds half of the key before it
        done = certified(*FRESH, "model.window=3", f"model.n_heads={heads}", "out=here", cwd=tmp_path).succeeded()
        uses = f"; uses at most the last {n_tokens} tokens\n"
        assert done.stdout.startswith("nano: causal: ") and uses in done.stdout
    lengths = {result["length"] for result in written(tmp_path / "here")["results"]}
    assert written(tmp_path / "here")["passed"] and {9} <= lengths <= set(range(1, 10))
    done = certified(*FRESH, "model.causal=false", cwd=tmp_path)
    assert done.returncode == 1 and "nano: NOT causal: output 0 depends on input 1" in done.stdout, done.stderr
    assert "FAILED  future: output 0 depends on input 1, first in blocks.0.attn" in done.stdout
    assert written(tmp_path / "outputs/causality/nano")["passed"] is False
    sizes = [f"call={__name__}:last_two", "vocab_size=7", "context_length=12"]
    certified(*sizes, "receptive_field=1", cwd=tmp_path).succeeded()
    done = certified(*sizes, "receptive_field=2", cwd=tmp_path)
    assert done.returncode == 1 and "receptive field: output 11 does not depend on input 9" in done.stdout


@pytest.mark.slow
def test_models_of_transformers_are_certified(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, XGLMConfig

    sizes = {"vocab_size": 31, "d_model": 16, "ffn_dim": 32, "num_layers": 1, "attention_heads": 2}
    XGLMConfig(**sizes, max_position_embeddings=6).to_json_file(tmp_path / "xglm.json")  # not in float64
    certified("hf=xglm.json", cwd=tmp_path).succeeded()
    special = {"bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2Config(vocab_size=31, n_positions=6, n_layer=1, n_embd=16, n_head=2, **special)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "saved")
    certified("hf=saved", cwd=tmp_path).succeeded()
    assert written(tmp_path / "outputs/causality/saved")["passed"]


def test_every_checkpoint_of_a_run_says_which_weights_were_tested(train_tiny, tmp_path, monkeypatch):
    """Also when the run goes on in a new process, with another backend."""
    verdicts, original = {}, checkpoints.write_state

    def recording(path, content):
        original(path, content)
        verdicts[content["global_step"]] = verdict(Checkpoint.read(path))

    monkeypatch.setattr(checkpoints, "write_state", recording)
    with interrupted():
        train_tiny("checkpoint.every_n_steps=3", "~callbacks.samples", "~callbacks.heads")
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    run("train", "resume=run", "model.backend=explicit", cache, cwd=tmp_path).succeeded()
    random, weights = "passed before training, with random weights", "to this step and code"
    between, validated = f"{random}; does not belong {weights}", f"passed at step {{}}; belongs {weights}"
    assert verdicts == {3: between, 4: validated.format(4), 6: between, 8: validated.format(8)}
    certified("ckpt=run", cwd=tmp_path).succeeded()
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
        return {"mask": documents[:, None, :, None] == documents[:, None, None, :]} if eot is not None else {}

    assert not failed(document_mask=False) and not failed(document_mask=True)
    monkeypatch.setattr("tril.model.causality.step.document_options", separated)
    assert failed(document_mask=True) == {"future loss precision=32-true"}
