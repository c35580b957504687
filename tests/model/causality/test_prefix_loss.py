"""The honest loss against one prefix at a time, against the one-pass loss of causal models, and under a leak."""

import math

import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tril.model.causality.prefix_loss import Estimate, one_pass_nll, over_windows, prefix_only_nll
from tril.model.gpt import IGNORE

B, T, V = 3, 9, 31
CAUSAL = {
    "default": {},
    "gpt2": {
        "pos": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "qk_norm": False,
        "tie_embeddings": True,
    },
    "no positions, one kv head": {"pos": "none", "n_kv_heads": 1, "backend": "explicit"},
    "window, softcap": {"window": 3, "logit_softcap": 2.0, "backend": "stacked"},
}
LEAKS = {"leak": {"causal": False}, "leak without positions": {"causal": False, "pos": "none", "backend": "stacked"}}
parts = pytest.mark.parametrize("parts", [*CAUSAL.values(), *LEAKS.values()], ids=[*CAUSAL, *LEAKS])
causal = pytest.mark.parametrize("parts", CAUSAL.values(), ids=CAUSAL)
leaks = pytest.mark.parametrize("parts", LEAKS.values(), ids=LEAKS)


@pytest.fixture
def windows():
    return torch.randint(V, (B, T)), torch.randint(V, (B, T))


@parts
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_every_target_is_predicted_from_its_prefix_alone(parts, batch_size, windows):
    model, (ids, targets) = tiny_gpt(**parts), windows
    expected = torch.empty(B, T)
    for b in range(B):
        for t in range(T):
            with torch.no_grad():
                log_p = model(ids[b : b + 1, : t + 1])[0, -1].double().log_softmax(-1)
            expected[b, t] = -log_p[targets[b, t]]
    assert_close(prefix_only_nll(model, ids, targets, batch_size=batch_size), expected)


@causal
def test_a_causal_model_claims_its_honest_loss(parts, windows):
    model = tiny_gpt(**parts)
    assert_close(prefix_only_nll(model, *windows), model.nll(*windows).detach())


@leaks
def test_a_leaking_model_claims_another_loss_wherever_something_follows(parts, windows):
    model = tiny_gpt(**parts)
    honest, claimed = prefix_only_nll(model, *windows), one_pass_nll(model, *windows)
    assert ((honest - claimed)[:, :-1].abs() > 1e-4).all()
    assert_close(honest[:, -1], claimed[:, -1])  # here the prefix is the window


@parts
def test_no_later_token_touches_the_honest_loss(parts, windows):
    model, (ids, targets) = tiny_gpt(**parts), windows
    before, claimed = prefix_only_nll(model, ids, targets), one_pass_nll(model, ids, targets)
    for t in range(T - 1):
        changed = torch.cat([ids[:, : t + 1], (ids[:, t + 1 :] + 1) % V], dim=1)
        assert torch.equal(prefix_only_nll(model, changed, targets)[:, : t + 1], before[:, : t + 1])
        if not model.config.causal:  # the leak is there, and it is the measure that does not see it
            assert ((one_pass_nll(model, changed, targets) - claimed)[:, : t + 1].abs() > 1e-5).all()


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_the_claimed_loss_is_the_models_own(batch_size, windows):
    model = tiny_gpt(causal=False)
    assert_close(one_pass_nll(model, *windows, batch_size=batch_size), model.nll(*windows).detach(), roundings=16)


@pytest.mark.parametrize("measure", [prefix_only_nll, one_pass_nll])
def test_ignored_targets_count_for_nothing(measure, windows):
    model, (ids, targets) = tiny_gpt(), windows
    some = targets.clone()
    some[1, 4:] = IGNORE
    found = measure(model, ids, some)
    assert (found[1, 4:] == 0).all()
    some[1, 4:] = targets[1, 4:]
    found[1, 4:] = measure(model, ids, some)[1, 4:]
    assert torch.equal(found, measure(model, ids, targets))


@pytest.mark.parametrize("measure", [prefix_only_nll, one_pass_nll])
def test_a_model_in_training_is_measured_without_dropout_and_left_as_it_was(measure, windows):
    model = tiny_gpt(embd_dropout=0.5, attn_dropout=0.5, resid_dropout=0.5)
    expected = measure(model, *windows)
    found = measure(model.train(), *windows)
    assert torch.equal(found, expected) and found.dtype == torch.float32
    assert all(module.training for module in model.modules())
    assert not found.is_inference() and not found.requires_grad


def test_windows_longer_than_the_context_are_refused():
    ids = torch.zeros(1, 13, dtype=torch.long)
    with pytest.raises(ValueError, match="13 positions exceed context_length=12"):
        prefix_only_nll(tiny_gpt(), ids, ids)


def test_mean_and_standard_error_are_over_windows():
    a = torch.tensor([[1.0, 3.0], [2.0, 6.0], [5.0, 7.0]])  # means 2, 4, 6
    b = torch.tensor([[0.0, 2.0], [1.0, 5.0], [4.0, 6.0]])
    assert over_windows(a) == Estimate(4.0, pytest.approx(2 / math.sqrt(3), rel=1e-15))
    assert over_windows(a - b) == Estimate(1.0, 0.0)  # paired: what the windows have in common is gone
