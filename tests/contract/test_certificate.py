"""The certificate: its verdict and exit status, and runs whose own model leaks, which train nothing.

`tests/causality` has the models that it must tell apart.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contract.harness import TINY, merged, newest_run, run, summary
from tril.model import GPT, MultiHeadAttention, load
from tril.model.causality import assert_causal, certify

V = 13
CALLED = SimpleNamespace(
    causal=lambda ids: F.one_hot(ids, V).cumsum(1).float(),
    leaks=lambda ids: F.one_hot(ids, V).flip(1).cumsum(1).float(),
    raises=lambda ids, mask: ids,  # without its second argument
    rounds=lambda ids: (x := F.one_hot(ids, V) / 3).cumsum(1) / (1 // (x.itemsize < 8)) + 1e-7 * x.sum(1, True),
)
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
    verdicts = {folder.name: verdict(folder) for folder in tmp_path.iterdir()}
    assert verdicts == {"causal": True, "leaks": False, "rounds": False}


def verdict(folder):
    return json.loads((folder / "causality.json").read_text("utf-8"))["passed"]


REPLACED = {  # after the semicolon, settings of the run: arguments of a function that have another value
    "no mask": (MultiHeadAttention, "__init__", {"causal": False}),
    "window dropped; model.window=4": (MultiHeadAttention, "__init__", {"window": None}),
    "documents not separated; data.document_mask=true": (MultiHeadAttention, "forward", {"mask": None}),
    "kernel without a mask": (F, "scaled_dot_product_attention", {"is_causal": False, "attn_mask": None}),
}
ADDED = {  # to the output of attention, from its input and the mode
    "a ten-thousandth of the next token": lambda x, training: 1e-4 * x.roll(-1, 1),
    "mean over time": lambda x, training: x.mean(1, True),
    "only in evaluation": lambda x, training: x.roll(-1, 1) * (not training),
    "only in training": lambda x, training: x.roll(-1, 1) * training,
    "rows of the batch mixed": lambda x, training: 0.1 * x.roll(1, 0),
    "only in the gradient": lambda x, training: x.roll(-1, 1) - x.roll(-1, 1).detach(),
    "in bf16; trainer.precision=bf16-mixed": lambda x, training: x.roll(-1, 1) * torch.is_autocast_enabled("cpu"),
}
LATER = "mean over time, after one batch"
CORRECT_RUNS = (
    "; model.window=4 data.document_mask=true model.attn_dropout=0.2 model.embd_dropout=0.1",
    "; trainer.precision=bf16-mixed",
)


def edit(name, patch):
    """Puts a defect into this process."""
    from lightning.pytorch import Trainer

    if name in REPLACED:
        owner, function, options = REPLACED[name]
        replaced = getattr(owner, function)
        patch.setattr(owner, function, lambda *inputs, **others: replaced(*inputs, **others | options))
    elif name in ADDED:
        leak, forward = ADDED[name], MultiHeadAttention.forward

        def leaking(module, x, *others, **options):
            out = forward(module, x, *others, **options)
            return out if isinstance(out, tuple) else out + leak(x, module.training)[:, -out.shape[1] :]

        patch.setattr(MultiHeadAttention, "forward", leaking)
    elif name == LATER:
        fit = Trainer.fit

        def fit_edited(trainer, module, *others, **options):
            step = module.training_step

            def step_edited(batch, i, *rest):
                if i == 1:
                    edit("mean over time", patch)
                return step(batch, i, *rest)

            module.training_step = step_edited
            fit(trainer, module, *others, **options)

        patch.setattr(Trainer, "fit", fit_edited)


@pytest.mark.parametrize("name", [*REPLACED, *ADDED, LATER, *CORRECT_RUNS])
def test_a_run_with_a_defect_is_refused_and_one_without_is_not(name, texts, trained, tmp_path, monkeypatch):
    settings = merged(SMALL, f"data.path={texts}", *name.partition(";")[2].split())
    cache = f"{trained.parents[2]}/cache"  # with the prepared text, so that nothing is said about its split
    edit(name, monkeypatch)
    done = run("train", *settings, cwd=tmp_path, TRIL_CACHE=cache)
    if name in CORRECT_RUNS:
        done.succeeded()
    else:
        assert done.returncode == 2 and "causality.allow_leak=true" in done.stderr.splitlines()[-1], done
        assert not verdict(newest_run(tmp_path)) and not [*tmp_path.rglob("summary.json")]
        assert name == LATER or not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("metrics.csv")]


@pytest.fixture
def calls(monkeypatch):
    """The mode, the inputs and the targets of each call of the model's loss."""
    nll, calls = GPT.nll, []

    def recording(model, ids, targets, **options):
        calls.append((model.training, ids.clone(), targets.clone()))
        return nll(model, ids, targets, **options)

    monkeypatch.setattr(GPT, "nll", recording)
    return calls


def test_each_step_passes_windows_of_its_text_to_the_model_unchanged(texts, calls, tmp_path):
    files = {True: texts.parent / "00.txt", False: texts.parent / "39.txt"}  # of training, and of validation
    paths = f"data.path={files[True]}", f"data.val_path={files[False]}"
    settings = merged(SMALL, *paths, "data.tokenizer.kind=byte", "~callbacks.causality")
    run("train", *settings, cwd=tmp_path).succeeded()
    encode = load(newest_run(tmp_path)).tokenizer.encode
    ids = {mode: torch.tensor(encode(file.read_text("utf-8")).ids) for mode, file in files.items()}
    assert [mode for mode, *_ in calls].count(True) == 4 and len(calls) > 8
    for mode, inputs, targets in calls:
        for row, answers in zip(inputs, targets, strict=True):
            if (answers >= 0).all():  # the end of the validation text fills a part of its window
                window = torch.cat([row, answers[-1:]])
                assert torch.equal(row[1:], answers[:-1])
                assert (ids[mode].unfold(0, len(window), 1) == window).all(1).any()


def test_allow_leak_trains_and_marks_the_run(run_of, trained):
    leaking = run_of("model.causal=false", "causality.allow_leak=true", base=SMALL)
    assert not verdict(leaking) and "LEAKS" in summary(leaking)["causality"]
    assert verdict(trained) and "LEAKS" not in summary(trained)["causality"]


@pytest.mark.slow
def test_the_command_certifies_a_checkpoint_and_fails_a_defect(trained, tmp_path, monkeypatch):
    options = "device=cpu", f"out={tmp_path}", "budget_seconds=1"
    done = run("certify", f"ckpt={trained}", *options, cwd=tmp_path).succeeded()
    assert verdict(tmp_path) and "stored certificate: passed at step 8; belongs to this step and code" in done.stdout
    edit("kernel without a mask", monkeypatch)
    done = run("certify", *MODEL, *options, cwd=tmp_path)
    assert done.returncode == 1 and not verdict(tmp_path)
