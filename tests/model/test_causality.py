"""No position learns anything from a later one: by changing later tokens, by gradients, and by the weights themselves."""

import pytest
import torch

from tests.conftest import TRAINABLE, assert_close, randomise, tiny_gpt
from tril.model.attention import MultiHeadAttention
from tril.model.gpt import IGNORE

B, T, V = 2, 9, 31

CONFIGS = {
    "default": {},
    "gpt2": {
        "pos": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "qk_norm": False,
        "tie_embeddings": True,
    },
    "grouped": {"n_kv_heads": 2, "mlp": "swiglu"},
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
    """Logits and, as the leaf of their graph, the token embeddings (B, T, C)."""
    seen = []
    hook = model.embed.register_forward_hook(lambda _, __, out: seen.append(out.detach().requires_grad_()) or seen[0])
    logits = model(ids)
    hook.remove()
    return logits, seen[0]


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
        if backend == "fused":  # a kernel may sum hidden zeros in another order, which costs a rounding
            assert_close(after[:, : t + 1], before[:, : t + 1], roundings=16)
        else:
            assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert (after[:, t + 1] - before[:, t + 1]).abs().amax(-1).min() > 0.01  # the change did reach the model


@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_later_tokens_change_no_earlier_logits_in_training_with_dropout(choices, backend):
    model = tiny_gpt(**choices, **DROPOUT, backend=backend).train()
    ids = torch.randint(V, (B, T))

    def run(ids):
        torch.manual_seed(1)  # the same units are dropped every time
        return model(ids)

    before = run(ids)
    assert not torch.equal(before, model(ids))
    for t in range(T - 1):
        changed = torch.cat([ids[:, : t + 1], (ids[:, t + 1 :] + 1) % V], dim=1)
        assert_close(run(changed)[:, : t + 1], before[:, : t + 1], roundings=16 if backend == "fused" else 0)


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["eval", "train"])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_reach_every_visible_position_and_no_other(choices, backend, dropout):
    model = tiny_gpt(**choices, **dropout, backend=backend).train(bool(dropout))
    ids = torch.randint(V, (B, T))
    logits, embeddings = logits_and_embeddings(model, ids)
    window = choices.get("window", T)
    reach = model.config.n_layers * (window - 1)  # each layer looks back by a window
    for t in range(T):
        out = (logits[:, t] * torch.randn(V)).sum()
        (gradient,) = torch.autograd.grad(out, embeddings, retain_graph=True)
        size = gradient.abs().amax(-1)  # (B, T)
        assert (size[:, t + 1 :] == 0).all()
        assert (size[:, : max(0, t - reach)] == 0).all()
        if dropout:  # which may cut every path to an older position, but not the residual stream
            assert (size[:, t] > 0).all()
        else:
            assert (size[:, max(0, t - reach) : t + 1] > 0).all()


def test_the_loss_of_one_target_teaches_nothing_to_later_positions(choices):
    model = tiny_gpt(**choices)
    ids, targets = torch.randint(V, (2, B, T))
    for t in range(T):
        only = torch.full_like(targets, IGNORE)
        only[:, t] = targets[:, t]
        seen = []
        hook = model.embed.register_forward_hook(lambda _, __, out: seen.append(out) or out.retain_grad())
        model.nll(ids, only).sum().backward()
        hook.remove()
        assert (seen[0].grad[:, t + 1 :] == 0).all() and (seen[0].grad[:, t] != 0).any()


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("window", [None, 1, 3, T])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_are_exactly_the_band(backend, window, qk_norm):
    attn = randomise(MultiHeadAttention(32, 4, n_kv_heads=2, window=window, qk_norm=qk_norm, backend=backend))
    _, weights = attn(torch.randn(B, T, 32), need_weights=True)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    band = (distance >= 0) & (distance < (window or T))
    assert torch.equal(weights != 0, band.expand_as(weights))  # 0 outside to the bit, not 0 anywhere inside
    assert_close(weights.sum(-1), torch.ones(B, 4, T))


@torch.no_grad()
def test_without_causal_every_position_sees_every_other():
    model = tiny_gpt(causal=False)
    ids = torch.randint(V, (B, T))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % V
    assert (model(changed) - model(ids)).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other(choices):
    model = tiny_gpt(**choices)
    ids = torch.randint(V, (B, T))
    changed = ids.clone()
    changed[1] = (changed[1] + 1) % V
    assert torch.equal(model(changed)[0], model(ids)[0])
