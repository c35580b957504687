"""The prefix-only loss: against one prefix at a time, against the one-pass loss of causal models, and with a leak."""

import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tril.model.causality.prefix_loss import one_pass_nll, prefix_only_nll
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
def test_both_losses_of_a_causal_model_are_equal(parts, windows):
    model = tiny_gpt(**parts)
    assert_close(prefix_only_nll(model, *windows), model.nll(*windows).detach())


@leaks
def test_the_losses_of_a_leaking_model_differ_at_every_position_but_the_last(parts, windows):
    model = tiny_gpt(**parts)
    prefix_only, one_pass = prefix_only_nll(model, *windows), one_pass_nll(model, *windows)
    assert ((prefix_only - one_pass)[:, :-1].abs() > 1e-4).all()
    assert_close(prefix_only[:, -1], one_pass[:, -1])  # here the prefix is the window


@parts
def test_no_later_token_changes_the_prefix_only_loss(parts, windows):
    model, (ids, targets) = tiny_gpt(**parts), windows
    before, one_pass = prefix_only_nll(model, ids, targets), one_pass_nll(model, ids, targets)
    for t in range(T - 1):
        changed = torch.cat([ids[:, : t + 1], (ids[:, t + 1 :] + 1) % V], dim=1)
        assert torch.equal(prefix_only_nll(model, changed, targets)[:, : t + 1], before[:, : t + 1])
        if not model.config.causal:  # the one-pass loss does see the leak
            assert ((one_pass_nll(model, changed, targets) - one_pass)[:, : t + 1].abs() > 1e-5).all()


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_the_one_pass_loss_is_that_of_the_model(batch_size, windows):
    model = tiny_gpt(causal=False)
    assert_close(one_pass_nll(model, *windows, batch_size=batch_size), model.nll(*windows).detach(), roundings=16)


@pytest.mark.parametrize("measure", [prefix_only_nll, one_pass_nll])
def test_ignored_targets_have_no_loss(measure, windows):
    model, (ids, targets) = tiny_gpt(), windows
    some = targets.clone()
    some[1, 4:] = IGNORE
    nll = measure(model, ids, some)
    assert (nll[1, 4:] == 0).all()
    some[1, 4:] = targets[1, 4:]
    nll[1, 4:] = measure(model, ids, some)[1, 4:]
    assert torch.equal(nll, measure(model, ids, targets))


@pytest.mark.parametrize("measure", [prefix_only_nll, one_pass_nll])
def test_dropout_is_off_and_the_training_mode_is_restored(measure, windows):
    model = tiny_gpt(embd_dropout=0.5, attn_dropout=0.5, resid_dropout=0.5)
    expected = measure(model, *windows)
    nll = measure(model.train(), *windows)
    assert torch.equal(nll, expected) and nll.dtype == torch.float32
    assert all(module.training for module in model.modules())
    assert not nll.is_inference() and not nll.requires_grad


def test_windows_longer_than_the_context_are_refused():
    ids = torch.zeros(1, 13, dtype=torch.long)
    with pytest.raises(ValueError, match="13 positions exceed context_length=12"):
        prefix_only_nll(tiny_gpt(), ids, ids)
