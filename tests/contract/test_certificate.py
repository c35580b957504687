"""The certificate: leaks fail, correct models pass, and a run whose own model leaks is refused.

The models are changes of one small model; `tests/causality/rows.py` has many more.
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
from tril.model.causality import assert_causal, certify, certify_loss

V, T, C = 13, 16, 8


def softmax(s, visible):
    return s.masked_fill(~visible, -torch.inf).softmax(-1)


def pooled(x, size, stride, padding):
    return F.avg_pool1d(F.pad(x.mT, padding), size, stride).mT.repeat_interleave(stride, 1)[:, : x.shape[1]]


class Part(nn.Module):
    """Attention with `weights` of scores and mask (B, T, S), and `mix` of states (B, T, C) and this module."""

    def __init__(self, weights=softmax, mix=lambda x, m: 0 * x):
        super().__init__()
        self.weights, self.mix, self.calls = weights, mix, 0
        self.q = nn.Linear(C, C)

    def forward(self, x, past=None, padding=None):
        states = x if past is None else torch.cat([past, x], 1)  # (B, S, C)
        self.states, key = states.detach(), torch.arange(states.shape[1])
        query = key[states.shape[1] - x.shape[1] :, None]
        visible = key <= query
        if padding is not None:
            visible = visible & padding[:, None].bool() | (key == query)
        x = x + self.weights(self.q(x) @ states.mT, visible) @ states
        return x + self.mixed(x)

    def mixed(self, x):
        self.calls += 1
        return self.mix(x, self)


class Cached(nn.Sequential):
    def forward(self, input_ids, past_key_values=None, attention_mask=None, use_cache=False):
        x = self[1](self[0](input_ids), past_key_values, attention_mask)
        return SimpleNamespace(logits=self[2](x), past_key_values=self[1].states)


def model(kind=nn.Sequential, **changes):
    torch.manual_seed(0)
    return kind(nn.Embedding(V, C), Part(**changes), nn.Linear(C, V))


SHOWN = {  # leaks that one changed token shows in evaluation mode
    "mean over time": lambda x, m: x.mean(1, True),
    "mask dropped by a padding token (keras#23040)": lambda x, m: x.mean(1, True) * (x > 1).any(1, True),
    "experts choose tokens": lambda x, m: x * (x[..., :1] > x[..., :1].mean(1, True)),
    "at multiples of 8 tokens": lambda x, m: x.roll(-1, 1) * (x.shape[1] % 8 == 0),
    "mean of a block (nanochat#844)": lambda x, m: pooled(x, 4, 4, (0, 3)),
    "a ten-thousandth of the next token": lambda x, m: 1e-4 * x.roll(-1, 1),
    "only in evaluation": lambda x, m: x.roll(-1, 1) * (not m.training),
    "one position": lambda x, m: x.roll(-1, 1) * (torch.arange(x.shape[1]) == 7)[:, None],
    "norm over time": lambda x, m: x / (1 + x.var(1, correction=0, keepdim=True)),
}
HIDDEN = {  # leaks that need a mode, a batch, an earlier call, a length or gradients
    "only in training (keras#23038)": lambda x, m: x.roll(-1, 1) * m.training,
    "rows of the batch mixed": lambda x, m: 0.1 * x.roll(1, 0),
    "in every seventh call": lambda x, m: x.roll(-1, 1) * (m.calls % 7 == 0),
    "only in the gradient": lambda x, m: x.roll(-1, 1) - x.roll(-1, 1).detach(),
    "batch norm in training": lambda x, m: x.mean((0, 1), True) * m.training,
    "scaled by the length": lambda x, m: x * x.shape[1],
    "only under autocast": lambda x, m: x.roll(-1, 1) * torch.is_autocast_enabled("cpu"),
    "below its noise": lambda x, m: 1e-3 * x.roll(-1, 1) + 1e-2 * (m.calls % 5),
}
CALLED = SimpleNamespace(
    causal=lambda ids: F.one_hot(ids, V).cumsum(1).float(),
    leaks=lambda ids: F.one_hot(ids, V).flip(1).cumsum(1).float(),
    raises=softmax,  # without its second argument
    rounds=lambda ids: (x := F.one_hot(ids, V) / 3).cumsum(1) / (1 // (x.itemsize < 8)) + 1e-7 * x.sum(1, True),
)
SIZES = {"vocab_size": V, "context_length": T, "budget_seconds": 1.0}
MODEL = ("model.n_layers=1", "model.dim=8", "model.context_length=16", "model.n_heads=2")
SMALL = (*merged(TINY, *MODEL, "trainer.max_steps=4"), "~callbacks.samples", "~callbacks.heads")


def some(names, everyday):
    return [pytest.param(name, marks=[pytest.mark.slow] * (i >= everyday)) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", some(SHOWN, 8))
def test_a_leak_fails_at_positions_that_depend_on_each_other(name):
    tested = model(mix=SHOWN[name])
    before = copy.deepcopy(tested)
    certificate = certify(tested, **SIZES)
    assert not certificate.passed and tested.training
    assert all(torch.equal(old, new) for old, new in zip(before.parameters(), tested.parameters(), strict=True))
    first = certificate.failures[0]
    assert first.key > first.query and first.place.startswith("1")  # the second of three modules
    ids = torch.randint(V, (1000, T))
    other = ids.index_copy(1, torch.tensor([first.key]), torch.randint(V, (1000, 1)))
    with torch.no_grad():
        change = before.double().eval()(ids) - before(other)
    assert change[:, first.query].abs().max() > 1e-12  # this output depends on that token


@pytest.mark.parametrize("name", some(HIDDEN, 5))
def test_assert_causal_raises_for_leaks(name):
    with pytest.raises(AssertionError):
        assert_causal(model(mix=HIDDEN[name]), **SIZES)


def test_a_cache_with_padding_passes_and_padding_that_is_seen_fails():
    assert_causal(model(), **SIZES)
    assert_causal(model(Cached), **SIZES)
    with pytest.raises(AssertionError):
        assert_causal(model(Cached, weights=lambda s, v: s.tril(s.shape[2] - s.shape[1])), **SIZES)


def test_a_loss_passes_and_one_that_sees_targets_fails():
    def passed(change=lambda nats: nats, shift=1):
        tested, ids = model(), torch.randint(V, (4, T + 1))
        losses = lambda x, y: change(F.cross_entropy(tested(x).mT, y, reduction="none"))  # noqa: E731
        return certify_loss(losses, [(ids[:, :-1], ids[:, shift:][:, :T])], model=tested, vocab_size=V).passed

    text, other = torch.randint(V, (2, 2000))
    assert passed() and certify_loss(train=text, validation=other).passed
    assert not passed(shift=0) and not passed(lambda nats: nats + nats.roll(-1, 1))
    assert not passed(lambda nats: nats.clamp(max=2))  # not of a distribution
    assert not certify_loss(train=text, validation=text[500:900]).passed


def test_the_exit_status_says_what_was_found(tmp_path):
    names = "causal", "leaks", "absent", "raises", "rounds"
    sizes = f"vocab_size={V}", "context_length=8"
    rows = [(f"call={__name__}:CALLED.{name}", *sizes, f"out={name}") for name in names]
    ended = [run("certify", *row, cwd=tmp_path) for row in rows]
    assert [done.returncode for done in ended] == [0, 1, 2, 3, 4], ended
    assert all(done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 for done in ended[2:4])
    verdicts = {folder.name: verdict(folder) for folder in tmp_path.iterdir()}
    assert verdicts == {"causal": True, "leaks": False, "rounds": True}


def verdict(folder):
    return json.loads((folder / "causality.json").read_text("utf-8"))["passed"]


REPLACED = {  # after the semicolon, settings of the run: arguments of a function that have another value
    "no mask": (MultiHeadAttention, "__init__", {"causal": False}),
    "window dropped; model.window=4": (MultiHeadAttention, "__init__", {"window": None}),
    "documents not separated; data.document_mask=true": (MultiHeadAttention, "forward", {"mask": None}),
    "kernel without a mask": (F, "scaled_dot_product_attention", {"is_causal": False, "attn_mask": None}),
}
ADDED = SHOWN | HIDDEN
ADDED["in bf16; trainer.precision=bf16-mixed"] = ADDED.pop("only under autocast")
LATER = "norm over time, after one batch"
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
        leak, forward = Part(mix=ADDED[name]), MultiHeadAttention.forward

        def leaking(module, x, *others, **options):
            out = forward(module, x, *others, **options)
            return out if isinstance(out, tuple) else out + leak.train(module.training).mixed(x)[:, -out.shape[1] :]

        patch.setattr(MultiHeadAttention, "forward", leaking)
    elif name == LATER:
        fit = Trainer.fit

        def fit_edited(trainer, module, *others, **options):
            step = module.training_step

            def step_edited(batch, i, *rest):
                if i == 1:
                    edit("norm over time", patch)
                return step(batch, i, *rest)

            module.training_step = step_edited
            fit(trainer, module, *others, **options)

        patch.setattr(Trainer, "fit", fit_edited)


@pytest.mark.parametrize("name", [*some(REPLACED, 2), *some(ADDED, 4), LATER, *CORRECT_RUNS])
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
    done = run("certify", f"ckpt={trained}", "device=cpu", f"out={tmp_path}", cwd=tmp_path).succeeded()
    assert verdict(tmp_path) and "stored certificate: passed at step 8; belongs to this step and code" in done.stdout
    options = *MODEL, "device=cpu", f"out={tmp_path}"
    edit("kernel without a mask", monkeypatch)
    done = run("certify", *options, cwd=tmp_path)
    assert done.returncode == 1 and not verdict(tmp_path)
