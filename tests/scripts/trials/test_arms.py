"""The arms of a comparison: which overrides they take, how they are checked, and what their key depends on."""

from pathlib import Path

import pytest

from tril.scripts.trials.arms import make_arm, split_overrides
from tril.scripts.trials.source_tree import SourceTree

TREE = SourceTree(Path("nowhere"), "digest", None)


def key(text, common="", tree=TREE):
    return make_arm("candidate", text, common, tree).key


def test_overrides_of_an_arm_replace_common_ones():
    overrides = split_overrides("candidate", "model.dim=64 optim=adamw data.path='my text'", "model.dim=32 +a.b=1")
    assert overrides == ["model.dim=32", "optim=adamw", "data.path=my text", "+a.b=1"]
    assert split_overrides("baseline", "", "") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.dim='64", 'cannot read candidate="model.dim=\'64" (No closing quotation); close the quotes'),
        ("model.dim", "candidate: cannot read 'model.dim'; settings are written key=value"),
        ("seed=3", "candidate: seed=3 cannot be set for an arm; set the first seed with seed=N, outside of the arms"),
        ("+ablation=heads", "candidate: +ablation=heads cannot be set for an arm; name one configuration"),
        ("hydra.run.dir=x", "candidate: hydra.run.dir=x cannot be set for an arm; the referee chooses the folders"),
        ("hydra/launcher=joblib", "candidate: hydra/launcher=joblib cannot be set for an arm"),
        ("resume=latest", "candidate: resume=latest cannot be set for an arm; the referee continues its runs"),
    ],
)
def test_refused_overrides(text, message):
    with pytest.raises(ValueError) as caught:
        split_overrides("candidate", "", text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.n_heads=5", "candidate: model.n_heads=5 must divide model.dim="),
        ("model.n_heds=2", "candidate: there is no setting model.n_heds; did you mean model.n_heads?"),
        ("model.n_heads=1,2", "candidate: model.n_heads=1,2 has several values"),
        ("optim=adamw optim.muon_lr=0.1", "candidate: optim.muon_lr=0.1 has no effect without optim.kind=muon"),
        ("causality.allow_leak=true", "candidate: causality.allow_leak=true allows false losses; the referee compares"),
        ("callbacks.causality=null", "candidate: callbacks.causality=null leaves out the certificate; the referee"),
    ],
)
def test_invalid_arms_are_refused(text, message):
    with pytest.raises(ValueError) as caught:
        key(text)
    assert str(caught.value).startswith(message)


def test_the_warmup_of_a_recipe_fits_into_a_short_run():
    assert key("optim=adamw trainer.max_steps=20") != key("optim=adamw trainer.max_steps=30")


def test_key_depends_on_settings_and_code_and_not_on_how_they_are_written():
    first = key("model.dim=64")
    assert key("", common="model.dim=64") == first == key("model.dim=64 optim=muon")
    others = [key("model.dim=32"), key("model.dim=64", tree=SourceTree(Path(), "other", None))]
    assert first not in others
