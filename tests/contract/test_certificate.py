"""The certificate: leaks fail, correct models pass, and a run whose own model or steps leak is refused."""

import contextlib
import copy
import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.contract.harness import TINY, assert_refused, merged, newest_run, run, summary
from tests.contract.leaks import CORRECT, HIDDEN, SHOWN, Part, T, V, model
from tril import load
from tril.model import MultiHeadAttention
from tril.model.causality import assert_causal, certify, certify_loss

SIZES = {"vocab_size": V, "context_length": T, "budget_seconds": 1.0}
WINDOW = {"expected": torch.ones(T, T).tril().triu(-2).bool()}  # of the rows with this word
MODEL = ("model.n_layers=1", "model.dim=8", "model.context_length=16", "model.n_heads=2")
SMALL = (*merged(TINY, *MODEL, "trainer.max_steps=4"), "~callbacks.samples", "~callbacks.heads")


def some(names, everyday):
    return [pytest.param(name, marks=[pytest.mark.slow] * (i >= everyday)) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", some(SHOWN, 8))
def test_a_leak_fails_at_positions_that_depend_on_each_other(name):
    tested = model(**SHOWN[name])
    before = copy.deepcopy(tested)
    certificate = certify(tested, **SIZES, **(WINDOW if "window" in name else {}))
    assert not certificate.passed and tested.training
    assert all(torch.equal(old, new) for old, new in zip(before.parameters(), tested.parameters(), strict=True))
    first = certificate.failures[0]
    assert first.key > first.query or ("window" in name and first.key < first.query - 2)
    assert first.place.startswith("1")  # the second of three modules
    ids = torch.randint(V, (1000, T))
    other = ids.index_copy(1, torch.tensor([first.key]), torch.randint(V, (1000, 1)))
    with torch.no_grad():
        change = before.double().eval()(ids) - before(other)
    assert change[:, first.query].abs().max() > 1e-12  # this output depends on that token


@pytest.mark.parametrize("name", [*some(HIDDEN, 7), *some(CORRECT, 19)])
def test_assert_causal_raises_for_leaks_alone(name):
    with pytest.raises(AssertionError) if name in HIDDEN else contextlib.nullcontext():
        tested = model(**HIDDEN[name]) if name in HIDDEN else CORRECT[name]()
        assert_causal(tested, **SIZES, **(WINDOW if "window" in name else {}))


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


@pytest.mark.parametrize(("name", "status"), {"causal": 0, "leaks": 1, "absent": 2, "raises": 3, "rounds": 4}.items())
def test_the_exit_status_says_what_was_found(name, status, tmp_path):
    call = f"call=tests.contract.leaks:CALLED.{name}"
    done = run("certify", call, f"vocab_size={V}", "context_length=8", "out=here", cwd=tmp_path)
    assert done.status == status, done
    if status in (2, 3):
        assert done.err.startswith("error: ") and done.err.count("\n") == 1 and not (tmp_path / "here").exists()
    else:
        assert verdict(tmp_path / "here") is (status != 1)


def verdict(folder):
    return json.loads((folder / "causality.json").read_text("utf-8"))["passed"]


@pytest.fixture(scope="module")
def train(tmp_path_factory, texts):
    cwd = tmp_path_factory.mktemp("runs")

    def train(*settings):
        return run("train", *merged(SMALL, f"data.path={texts}", *settings), cwd=cwd), newest_run(cwd)

    assert train("model.window=4", "data.document_mask=true")[0].status == 0  # settings of some defects below
    assert train("trainer.precision=bf16-mixed")[0].status == 0
    return train


def replaced(name, owner=MultiHeadAttention, **options):
    function = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *inputs, **others: function(*inputs, **others | options))


PATCHES = {  # after the semicolon: settings of the run
    "no mask": replaced("__init__", causal=False),
    "window dropped; model.window=4": replaced("__init__", window=None),
    "documents not separated; data.document_mask=true": replaced("forward", mask=None),
    "kernel without a mask": replaced("scaled_dot_product_attention", F, is_causal=False, attn_mask=None),
}
ADDED = {name: row["mix"] for name, row in (SHOWN | HIDDEN).items() if "mix" in row and "gate" not in name}
ADDED["in bf16; trainer.precision=bf16-mixed"] = ADDED.pop("only under autocast")
FED = {  # a step, and when it gets its targets as inputs
    "a leak after one batch": ("training_step", lambda module, i: i == 1 and add(module, ADDED["norm over time"])),
    "targets": ("training_step", lambda module, i: True),
    "targets in validation": ("validation_step", lambda module, i: True),
    "targets after two batches": ("training_step", lambda module, i: i > 1),
    "targets after an epoch; data.batch_size=64 trainer.max_steps=14": ("training_step", lambda m, i: m.current_epoch),
}


def add(module, change):
    """Adds a leak of the table to what every attention module returns."""
    leak = Part(mix=change)

    def changed(part, inputs, out):
        return out if isinstance(out, tuple) else out + leak.train(part.training).mixed(inputs[0])[:, -out.shape[1] :]

    for part in module.modules():
        if isinstance(part, MultiHeadAttention):
            part.register_forward_hook(changed)


def callback(name):
    """What `+callbacks.edit` on the command line creates."""
    from lightning import Callback

    def setup(self, trainer, module, stage):
        if name in ADDED:
            return add(module, ADDED[name])
        step, fed = FED[name]
        function = getattr(module, step)
        changed = lambda pair, i: (pair[1].clamp(min=0), pair[1]) if fed(module, i) else pair  # noqa: E731
        setattr(module, step, lambda batch, i, *others: function(changed(batch, i), i, *others))

    return type("Edit", (Callback,), {"setup": setup})()


@pytest.mark.parametrize("name", [*some(PATCHES, 2), *some(ADDED, 4), *some(FED, 1)])
def test_a_run_with_a_defect_is_refused(name, train):
    target = f"{__name__}.callback"
    edit = (f"+callbacks.edit._target_={target}", f"+callbacks.edit.name='{name}'", f"allow_targets=[{target}]")
    with PATCHES.get(name, contextlib.nullcontext()):
        done, folder = train(*edit * (name not in PATCHES), *name.partition(";")[2].split())
    assert_refused(done, "causality.allow_leak=true")
    assert not verdict(folder) and not (folder / "summary.json").exists()
    assert name in FED or not [*folder.rglob("*.ckpt"), *folder.rglob("metrics.csv")]


def test_allow_leak_trains_and_marks_the_run(train, trained):
    done, folder = train("model.causal=false", "causality.allow_leak=true")
    assert done.status == 0 and not verdict(folder) and "LEAKS" in summary(folder)["causality"]
    assert verdict(trained) and "LEAKS" not in summary(trained)["causality"]


def test_a_run_has_the_same_weights_without_the_certificate(train):
    (_, certified), (_, other) = train(), train("~callbacks.causality")
    assert (certified / "causality.json").exists() and not (other / "causality.json").exists()
    weights, others = (load(folder).model.state_dict() for folder in (certified, other))
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
def test_the_command_certifies_a_checkpoint_and_fails_a_defect(trained, tmp_path):
    done = run("certify", f"ckpt={trained}", "device=cpu", f"out={tmp_path}", cwd=tmp_path)
    assert done.status == 0 and verdict(tmp_path)
    assert "stored certificate: passed at step 8; belongs to these weights" in done.out
    with PATCHES["kernel without a mask"]:
        done = run("certify", *MODEL, "device=cpu", f"out={tmp_path}", cwd=tmp_path)
    assert done.status == 1 and not verdict(tmp_path)
