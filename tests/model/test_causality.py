"""No output depends on a later token: shown by changed tokens, by gradients, and by the attention weights."""

import pytest
import torch

from tests.conftest import TRAINABLE, assert_close, randomize, tiny_gpt
from tril.model.attention import MultiHeadAttention
from tril.model.gpt import IGNORE

B, T, V = 2, 9, 31

CONFIGS = {
    "default": {},
    "gpt2": {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qk_norm": False},
    "grouped": {"n_kv_heads": 2, "mlp": "swiglu", "tie_embeddings": False},
    "one shared head": {"n_kv_heads": 1, "pos": "none", "mlp": "relu", "head_dim": 6, "qk_norm": False},
    "window": {"window": 3},
    "window of one": {"window": 1, "pos": "learned", "bias": True},
    "softcap": {"logit_softcap": 2.0, "norm": "layernorm", "n_layers": 3},
}
DROPOUT = {"embd_dropout": 0.1, "attn_dropout": 0.2, "resid_dropout": 0.1}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def choices(request):
    return request.param


def logits_and_embeddings(model, ids):
    """Logits and the token embeddings (B, T, C), a leaf of their graph."""
    embeddings = model.embed(ids).detach().requires_grad_()
    hook = model.embed.register_forward_hook(lambda *_: embeddings)
    logits = model(ids)
    hook.remove()
    return logits, embeddings


@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_later_tokens_change_no_earlier_logits(choices, backend):
    model = tiny_gpt(**choices, backend=backend)
    ids = torch.randint(V, (B, T))
    before = model(ids)
    for t in range(T - 1):
        changed = ids.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + torch.randint(1, V, (B, T - 1 - t))) % V
        after = model(changed)
        if backend == "fused":  # a kernel may sum in another order
            assert_close(after[:, : t + 1], before[:, : t + 1], roundings=16)
        else:
            assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert (after[:, t + 1] - before[:, t + 1]).abs().amax(-1).min() > 0.01  # the change has an effect


@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_later_tokens_change_no_earlier_logits_in_training_with_dropout(choices, backend):
    model = tiny_gpt(**choices, **DROPOUT, backend=backend).train()
    ids = torch.randint(V, (B, T))

    def run(ids):
        torch.manual_seed(1)  # drops the same units each time
        return model(ids)

    before = run(ids)
    assert not torch.equal(before, model(ids))
    for t in range(T - 1):
        changed = torch.cat([ids[:, : t + 1], (ids[:, t + 1 :] + 1) % V], dim=1)
        assert_close(run(changed)[:, : t + 1], before[:, : t + 1], roundings=16 if backend == "fused" else 0)


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["eval", "train"])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_are_nonzero_exactly_for_the_receptive_field(choices, backend, dropout):
    model = tiny_gpt(**choices, **dropout, backend=backend).train(bool(dropout))
    ids = torch.randint(V, (B, T))
    logits, embeddings = logits_and_embeddings(model, ids)
    window = choices.get("window", T)
    past = model.config.n_layers * (window - 1)  # number of past positions that an output depends on
    for t in range(T):
        out = (logits[:, t] * torch.randn(V)).sum()
        (gradient,) = torch.autograd.grad(out, embeddings, retain_graph=True)
        size = gradient.abs().amax(-1)  # (B, T)
        assert (size[:, t + 1 :] == 0).all()
        assert (size[:, : max(0, t - past)] == 0).all()
        if dropout:  # it may cut all paths to a past position, but not the residual stream
            assert (size[:, t] > 0).all()
        else:
            assert (size[:, max(0, t - past) : t + 1] > 0).all()


def test_the_loss_of_one_target_has_no_gradient_for_later_tokens(choices):
    model = tiny_gpt(**choices)
    ids, targets = torch.randint(V, (2, B, T))
    embeddings = model.embed(ids).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: embeddings)
    for t in range(T):
        one_target = torch.full_like(targets, IGNORE)
        one_target[:, t] = targets[:, t]
        (gradient,) = torch.autograd.grad(model.nll(ids, one_target).sum(), embeddings)
        assert (gradient[:, t + 1 :] == 0).all() and (gradient[:, t] != 0).any()


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("window", [None, 1, 3, T])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_are_nonzero_exactly_in_the_band(backend, window, qk_norm):
    attn = randomize(MultiHeadAttention(32, 4, n_kv_heads=2, window=window, qk_norm=qk_norm, backend=backend))
    _, weights = attn(torch.randn(B, T, 32), need_weights=True)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    band = (distance >= 0) & (distance < (window or T))
    assert torch.equal(weights != 0, band.expand_as(weights))  # exactly 0 outside, nowhere 0 inside
    assert_close(weights.sum(-1), torch.ones(B, 4, T))


@torch.no_grad()
def test_without_causal_every_position_attends_to_all_others():
    model = tiny_gpt(causal=False)
    ids = torch.randint(V, (B, T))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % V
    assert (model(changed) - model(ids)).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_rows_of_a_batch_are_independent(choices):
    model = tiny_gpt(**choices)
    ids = torch.randint(V, (B, T))
    changed = ids.clone()
    changed[1] = (changed[1] + 1) % V
    assert torch.equal(model(changed)[0], model(ids)[0])
