"""Every entry with the interface "logits", judged by a brute-force oracle."""

import pytest
import torch

from tests.causality import corpus
from tests.causality.corpus import Trigger
from tests.causality.oracle import Run, changes, dependencies, differ, leaks_by_gradient


def parameter(entry):
    return pytest.param(entry, id=entry.name, marks=pytest.mark.slow if entry.name in SLOW else ())


LOGITS = [entry for entry in corpus.entries() if entry.interface == "logits"]
SLOW = ("compiled_module", "mask_that_comes_off_after_500_calls")
LEAKING = [parameter(entry) for entry in LOGITS if entry.leaks]
CORRECT = [parameter(entry) for entry in LOGITS if not entry.leaks]


def changes_outputs(entry):
    """Whether a forbidden change alters outputs, and not only outside of a pattern."""
    return not entry.when.gradient_only and entry.expected is None


def runs(entry, trigger):
    modes = (False, True) if trigger.training is None else (trigger.training,)
    return [Run(entry, trigger, training) for training in modes]


@pytest.mark.parametrize("entry", LEAKING)
def test_a_leak_shows_under_its_trigger(entry):
    """In each mode that the trigger leaves open."""
    trigger = entry.when
    length = trigger.length or 24
    for run in runs(entry, trigger):
        if trigger.gradient_only:
            assert leaks_by_gradient(run, length)
            assert not any(differ(*pair) for _, *pair in changes(run, length))
        elif entry.expected is not None:
            assert (dependencies(run, length, seed=0) & ~entry.visible(length)).any()
        else:
            assert any(differ(*pair) for seed in range(3) for _, *pair in changes(run, length, seed))


@pytest.mark.parametrize("entry", CORRECT)
def test_a_correct_model_sees_what_it_may_and_nothing_else(entry):
    length, run = 20, Run(entry, Trigger())
    found = torch.stack([dependencies(run, length, seed) for seed in range(8)]).any(0)
    assert torch.equal(found, entry.visible(length)), (found ^ entry.visible(length)).nonzero()


@pytest.mark.slow
@pytest.mark.parametrize("entry", CORRECT)
def test_a_correct_model_is_causal_at_other_lengths_and_in_batches(entry):
    trigger = Trigger(batch=3)
    for length in (1, 2, 33, 64):
        for run in runs(entry, trigger):
            for what, *pair in changes(run, length):
                allowed = entry.expected is not None and bool(entry.visible(length).triu(1).any())
                random = run.training and not what.startswith("suffix")  # other shapes draw other random numbers
                assert allowed or random or not differ(*pair), (what, length, run.training)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in LOGITS if e.place and changes_outputs(e)])
def test_a_leak_begins_at_its_place(entry):
    """A forbidden change alters the output of this submodule and not its input."""
    trigger = entry.when
    training, length = bool(trigger.training), trigger.length or 24
    runs_of_views = [Run(entry, trigger, training, view) for view in ("input", "output")]
    for seed in range(3):
        pairs = zip(*(changes(run, length, seed) for run in runs_of_views), strict=True)
        if any(not differ(*inputs) and differ(*outputs) for (_, *inputs), (_, *outputs) in pairs):
            return
    pytest.fail(f"no change alters the output of {entry.place} alone")
