"""The GPT against formulas and a second implementation of GPT-2.

B batch, T queries, H query heads, D head size, C width, V vocabulary, L layers.
"""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import BACKENDS_SLOW_FLEX, GPT2, MODEL_CHOICES, TRAINABLE, assert_close, randomize, tiny_gpt
from tril.model.gpt import GPT, IGNORE, GPTConfig

B, T, V, H, L = 2, 9, 31, 4, 2  # V, H and L are those of tiny_gpt


# --- the forward pass


def gpt2(weights, ids, n_layers, n_heads):
    """GPT-2's forward pass (Radford et al. 2019) as formulas on a dict of tensors."""

    def layer_norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[name + ".weight"] + weights[name + ".bias"]

    def linear(x, *names):  # several layers are concatenated, as in c_attn
        weight, bias = (torch.cat([weights[f"{name}.{kind}"] for name in names]) for kind in ("weight", "bias"))
        return x @ weight.T + bias

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    n, length = ids.shape
    x = weights["embed.weight"][ids] + weights["pos_embed.weight"][:length]
    for i in range(n_layers):
        block = f"blocks.{i}."
        qkv = linear(layer_norm(x, block + "norm1"), *(block + f"attn.{p}_proj" for p in "qkv"))
        q, k, v = (part.reshape(n, length, n_heads, -1).permute(0, 2, 1, 3) for part in qkv.chunk(3, dim=-1))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        scores = scores - torch.ones(length, length).triu(1) * 1e10
        y = torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).reshape(n, length, -1)
        x = x + linear(y, block + "attn.o_proj")
        x = x + linear(gelu(linear(layer_norm(x, block + "norm2"), block + "mlp.up")), block + "mlp.down")
    return layer_norm(x, "norm") @ weights["embed.weight"].T


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_gpt2_configuration_computes_gpt2(backend):
    shape = {"vocab_size": V, "context_length": 12, "n_layers": 3, "dim": 32, "n_heads": 4}
    model = randomize(GPT(GPTConfig(**{**GPT2, **shape}, backend=backend)))
    ids = torch.randint(V, (B, T))
    assert_close(model(ids), gpt2(model.state_dict(), ids, n_layers=3, n_heads=4))


@torch.no_grad()
def test_softcap_bounds_the_logits():
    model, ids = tiny_gpt(), torch.randint(V, (B, T))
    capped = tiny_gpt(logit_softcap=0.5)
    capped.load_state_dict(model.state_dict())
    assert_close(capped(ids), 0.5 * torch.tanh(model(ids) / 0.5))


def combinations():
    """Every combination of FFN, norm, positions and bias; the other settings are random."""
    draw = random.Random(0)
    values = (MODEL_CHOICES["mlp"], MODEL_CHOICES["norm"], MODEL_CHOICES["pos"], (False, True))
    for mlp, norm, pos, bias in itertools.product(*values):
        causal = draw.random() < 0.8
        yield {
            "mlp": mlp,
            "norm": norm,
            "pos": pos,
            "bias": bias,
            "causal": causal,
            "window": draw.choice([None, 3]) if causal else None,
            "n_kv_heads": draw.choice([None, 1, 2]),
            "head_dim": draw.choice([None, 6]),
            "mlp_ratio": draw.choice([4.0, 1.5]),
            "mlp_hidden": draw.choice([None, 24]),
            "norm_eps": draw.choice([None, 1e-3]),
            "rope_base": draw.choice([10_000.0, 100.0]),
            "qkv_bias": draw.choice([None, False, True]),
            "qk_norm": draw.choice(MODEL_CHOICES["qk_norm"]),
            "tie_embeddings": draw.random() < 0.5,
            "logit_softcap": draw.choice([None, 15.0]),
            "init": draw.choice(MODEL_CHOICES["init"]),
            "backend": draw.choice(TRAINABLE),
            "embd_dropout": draw.choice([0.0, 0.1]),
            "attn_dropout": draw.choice([0.0, 0.1]),
            "resid_dropout": draw.choice([0.0, 0.1]),
        }


@pytest.mark.parametrize("choices", list(combinations()), ids=lambda c: "-".join(map(str, c.values())))
def test_every_combination_trains_every_parameter(choices):
    model = GPT(GPTConfig(V, context_length=T, n_layers=2, dim=32, n_heads=4, **choices)).train()
    ids, targets = torch.randint(V, (2, B, T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # With zero_out, the first step changes the head only, and the second the output projections.
    for _ in range(3):
        optimizer.zero_grad()
        model.nll(ids, targets).mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    for name, p in model.named_parameters():
        if name.endswith("k_proj.bias") and choices["qk_norm"] == "none" and choices["pos"] != "rope":
            continue  # shifts all scores of a query equally: no effect
        assert p.grad.abs().max() > 0, name


# --- the loss


def test_nll_is_the_negative_log_softmax_at_the_target():
    model = tiny_gpt()
    ids, targets = torch.randint(V, (2, B, T))
    expected = -model(ids).double().softmax(-1).gather(-1, targets[..., None]).squeeze(-1).log()
    assert_close(model.nll(ids, targets), expected)


def test_ignored_targets_have_loss_0_and_no_gradient():
    model = tiny_gpt()
    ids, targets = torch.randint(V, (2, B, T))
    some = targets.clone()
    some[0, 3:] = IGNORE
    loss = model.nll(ids, some)
    assert (loss[0, 3:] == 0).all()
    assert torch.equal(loss[some != IGNORE], model.nll(ids, targets)[some != IGNORE])
    model.nll(ids, torch.full_like(targets, IGNORE)).sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_nll_is_float32_for_bfloat16_logits(weights):
    model = tiny_gpt().to(weights)
    ids, targets = torch.randint(V, (2, B, T))
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        logits, loss = model(ids), model.nll(ids, targets)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(B, T)
    assert_close(loss, expected)


# --- arguments


@pytest.mark.parametrize("pos", ["rope", "learned"])
@torch.no_grad()
def test_rows_may_have_different_positions(pos):
    model = tiny_gpt(pos=pos)
    ids = torch.randint(V, (B, 6))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [11, 3, 4, 9, 0, 7]])
    out = model(ids, positions=positions)
    assert_close(out[:1], model(ids[:1]))
    assert_close(out[1:], model(ids[1:], positions=positions[1]))
    assert (out[1] - model(ids)[1]).abs().max() > 0.01


@torch.no_grad()
def test_rotary_positions_are_relative_and_learned_ones_are_not():
    ids = torch.randint(V, (B, 6))
    shifted = torch.arange(6) + 5
    rope, learned = tiny_gpt(pos="rope"), tiny_gpt(pos="learned")
    assert_close(rope(ids, positions=shifted), rope(ids))
    assert (learned(ids, positions=shifted) - learned(ids)).abs().max() > 0.01


@pytest.mark.parametrize("pos", MODEL_CHOICES["pos"])
@torch.no_grad()
def test_packed_documents_are_independent(pos):
    model = tiny_gpt(pos=pos)
    one, two = torch.randint(V, (1, 4)), torch.randint(V, (1, 7))
    document = torch.tensor([0] * 4 + [1] * 7)
    packed = model(
        torch.cat([one, two], dim=1),
        mask=document[:, None] == document,
        positions=torch.cat([torch.arange(4), torch.arange(7)]),
    )
    assert_close(packed, torch.cat([model(one), model(two)], dim=1))


@torch.no_grad()
def test_the_gate_acts_on_one_layer_and_head():
    model, ids = tiny_gpt(), torch.randint(V, (B, T))
    ungated = model(ids)
    for layer, head in itertools.product(range(L), range(H)):
        gate = torch.ones(L, H)
        gate[layer, head] = 0.0
        gated = model(ids, head_gate=gate)
        weight = model.blocks[layer].attn.o_proj.weight
        original = weight.clone()
        weight[:, head * 8 : (head + 1) * 8] = 0.0  # D = 8
        assert_close(gated, model(ids))
        weight.copy_(original)
        by_row = torch.stack([torch.ones(L, H), gate], dim=1)  # (L, B, H)
        assert_close(model(ids, head_gate=by_row), torch.stack([ungated[0], gated[1]]))
        assert (gated - ungated).abs().max() > 0.001


@pytest.mark.parametrize("shape", [(), (L + 1, H), (L, H + 1), (H,), (L, B + 1, H)])
def test_gates_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="head_gate of shape"):
        tiny_gpt()(torch.randint(V, (B, T)), head_gate=torch.ones(shape))


def test_an_input_beyond_the_context_length_is_refused():
    model = tiny_gpt(context_length=8)
    model(torch.randint(V, (B, 8)))
    with pytest.raises(ValueError, match="9 positions exceed context_length=8"):
        model(torch.randint(V, (B, 9)))
    with torch.no_grad():
        cache = model.new_cache(B, capacity=20)
        model(torch.randint(V, (B, 6)), cache=cache)
        with pytest.raises(ValueError, match="10 positions exceed context_length=8"):
            model(torch.randint(V, (B, 4)), cache=cache)


# --- precision and storage


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_autocast_to_bfloat16_is_close_to_float32(backend):
    model = tiny_gpt(backend=backend, n_kv_heads=2, bias=True, norm="layernorm")
    ids = torch.randint(V, (B, T))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
    # Two layers of about ten roundings each, with random signs, and logits of a few units.
    assert_close(out, model(ids), roundings=4)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dropout", ["embd_dropout", "attn_dropout", "resid_dropout"])
@torch.no_grad()
def test_every_dropout_acts_in_training_only(dropout):
    model, ids = tiny_gpt(**{dropout: 0.5}), torch.randint(V, (B, T))
    plain = tiny_gpt()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(ids), plain(ids))
    model.train(), plain.train()
    assert torch.equal(plain(ids), plain(ids))
    assert not torch.equal(model(ids), model(ids))


@torch.no_grad()
def test_residual_dropout_acts_on_both_branches():
    block = tiny_gpt(resid_dropout=0.5).blocks[0].train()
    x = torch.randn(B, T, 32)
    for branch in (block.attn, block.mlp):
        zeros = (branch(x) == 0).float().mean().item()
        assert abs(zeros - 0.5) < 0.11  # 5 standard deviations of 576 draws


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_under_autocast_are_finite_float32(backend):
    model = tiny_gpt(backend=backend, attn_dropout=0.1).train()
    ids, targets = torch.randint(V, (2, B, T))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.nll(ids, targets).mean()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
