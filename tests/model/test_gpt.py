"""The GPT against formulas; decoding, documents and gates as properties over all its parts; its initialization.

B batch, T queries, H query heads, D head size, C width, V vocabulary, L layers.
"""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from tests.conftest import MODEL_CHOICES, TRAINABLE, assert_close, randomize, tiny_gpt
from tril.model.gpt import GPT, IGNORE, GPTConfig
from tril.model.masks import document_options

B, T, V, H, L = 2, 9, 31, 4, 2  # V, H and L are those of tiny_gpt
PARTS = {name: st.sampled_from(values) for name, values in MODEL_CHOICES.items() if name != "backend"}
PARTS |= {
    **{name: st.booleans() for name in ("bias", "tie_embeddings")},
    **{name: st.sampled_from([None, 1, 2]) for name in ("n_kv_heads",)},
    "window": st.sampled_from([None, 3]),
    "head_dim": st.sampled_from([None, 6]),
    "logit_softcap": st.sampled_from([None, 15.0]),
    "backend": st.sampled_from(TRAINABLE),
}
MODELS = st.fixed_dictionaries(PARTS)
DRAWN = settings(deadline=None, max_examples=25, derandomize=True)


@torch.no_grad()
@DRAWN
@given(
    MODELS, st.lists(st.integers(1, 4), min_size=4, max_size=9), st.sampled_from([{}, {"n_heads": 0}, {"mlp": "none"}])
)
def test_decoding_in_chunks_and_packed_documents_equal_one_full_pass(parts, chunks, missing):
    if "n_heads" in missing:
        parts = parts | {"n_kv_heads": None, "head_dim": None, "window": None, "mlp": "relu2"}
    model = tiny_gpt(**parts | missing, context_length=16)
    ids = torch.randint(1, V, (B, min(sum(chunks), 16)))
    full, cache = model(ids), model.new_cache(B)
    pieces = [model(piece, cache=cache) for piece in ids.split(min(chunks), dim=1)]
    assert_close(torch.cat(pieces, 1), full)
    assert cache.length == ids.shape[1]
    assert_close(model.logits(model.hidden(ids, last_only=True)), full[:, -1:])
    ids[:, 3:4] = 0  # a document begins
    packed = model(ids, **document_options(ids, 0))
    assert_close(packed[:, 3:], model(ids[:, 3:]))
    with pytest.raises(ValueError, match="positions exceed context_length=16"):
        model(torch.zeros(B, 17, dtype=torch.long))


@DRAWN
@given(MODELS)
def test_every_parameter_is_trained(parts):
    model = GPT(GPTConfig(V, context_length=T, n_layers=2, dim=32, n_heads=4, **parts)).train()
    ids, targets = torch.randint(V, (2, B, T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # with zero_out, the first step changes the head only, and the second the output projections
        optimizer.zero_grad()
        model.nll(ids, targets).mean().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all(), name
        if not (name.endswith("k_proj.bias") and parts["qk_norm"] == "none" and parts["pos"] != "rope"):
            assert p.grad.abs().max() > 0, name  # that bias shifts all scores of a query equally


def test_nll_is_the_negative_log_softmax_at_the_target():
    model, (ids, targets) = tiny_gpt(logit_softcap=0.5), torch.randint(V, (2, B, T))
    plain = tiny_gpt()
    plain.load_state_dict(model.state_dict())
    logits = 0.5 * torch.tanh(plain(ids).double() / 0.5)
    assert_close(model.nll(ids, targets), -logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1))
    some = targets.clone()
    some[0, 3:] = IGNORE
    assert (model.nll(ids, some)[0, 3:] == 0).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).dtype == torch.bfloat16
        loss = model.nll(ids, targets)
    assert loss.dtype == torch.float32
    loss.mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("pos", ["rope", "learned"])
@torch.no_grad()
def test_rows_may_have_different_positions(pos):
    model, ids = tiny_gpt(pos=pos), torch.randint(V, (B, 6))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [11, 3, 4, 9, 0, 7]])
    out = model(ids, positions=positions)
    assert_close(out, torch.cat([model(ids[:1]), model(ids[1:], positions=positions[1])]))
    shifted = model(ids, positions=torch.arange(6) + 5) - model(ids)
    assert (shifted.abs().max() > 0.01) == (pos == "learned")  # rotary positions are relative


@torch.no_grad()
def test_a_gate_removes_one_head_of_a_layer_for_some_rows():
    model, ids = tiny_gpt(), torch.randint(V, (B, T))
    ungated = model(ids)
    gate = torch.ones(L, H)
    gate[1, 2] = 0.0
    gated = model(ids, head_gate=gate)
    by_row = model(ids, head_gate=torch.stack([torch.ones(L, H), gate], dim=1))  # (L, B, H)
    model.blocks[1].attn.o_proj.weight[:, 16:24] = 0.0  # D = 8
    assert_close(gated, model(ids))
    assert_close(by_row, torch.stack([ungated[0], gated[1]]))
    for shape, each in (((), model), ((L + 1, H), model), ((L, H + 1), model), ((L, 0), tiny_gpt(n_heads=0))):
        with pytest.raises(ValueError, match="head_gate of shape"):
            each(ids, head_gate=torch.ones(shape))


@pytest.mark.parametrize("dropout", ["embd_dropout", "attn_dropout", "resid_dropout"])
@torch.no_grad()
def test_every_dropout_acts_in_training_only(dropout):
    model, ids = tiny_gpt(**{dropout: 0.5}), torch.randint(V, (B, T))
    plain = tiny_gpt()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(ids), plain(ids))
    assert not torch.equal(model.train()(ids), model(ids))


QKV_UP_GATE, RESIDUAL, TABLES = r"(q_proj|k_proj|v_proj|up|gate)\.weight$", r"(o_proj|down)\.weight$", "^(pos_)?embed"
EXPECTED_STD = {  # for C = 64 and L = 2; the first pattern that fits
    ("zero_out", False): {QKV_UP_GATE: 0.5 / 8, RESIDUAL: 0.0, "^pos_embed": 0.02, "^embed": 1.0, "^head": 0.0},
    ("zero_out", True): {QKV_UP_GATE: 0.5 / 8, RESIDUAL: 0.0, TABLES: 0.02},
    ("gpt2", False): {QKV_UP_GATE: 0.02, RESIDUAL: 0.02 / 2, TABLES: 0.02, "^head": 0.02},
}


@pytest.mark.parametrize("init, tied", EXPECTED_STD)
def test_initialization_follows_its_table(init, tied):
    parts = {"mlp": "swiglu", "norm": "layernorm", "pos": "learned", "bias": True}
    model = GPT(GPTConfig(200, dim=64, n_layers=2, init=init, tie_embeddings=tied, **parts))
    assert (model.head.weight is model.embed.weight) == tied
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        std = next(std for pattern, std in EXPECTED_STD[init, tied].items() if re.search(pattern, name))
        # five standard errors of a normal sample's deviation and of its mean
        assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name
        assert abs(p.mean().item()) <= 5 * std / math.sqrt(p.numel()), name
        if init == "zero_out" and re.search(QKV_UP_GATE, name):
            assert p.abs().max() <= std * math.sqrt(3), name  # a uniform distribution has no tails


@pytest.mark.parametrize("change", [{"n_layers": 3}, {"n_heads": 1}, {"mlp": "swiglu"}, {"pos": "learned"}], ids=str)
def test_models_of_one_seed_share_the_values_of_the_matrices_that_they_share(change):
    def draw(seed=0, **choices):
        torch.manual_seed(seed)
        return GPT(GPTConfig(V, **{"dim": 32, "n_layers": 2, "n_heads": 4} | choices)).state_dict()

    first, second = draw(), draw(**change)
    shared = [name for name in first if name in second and first[name].shape == second[name].shape]
    assert len(shared) >= 9 and all(torch.equal(first[name], second[name]) for name in shared)
    matrices = [first[name] for name in shared if name != "head.weight" and first[name].ndim == 2 and first[name].any()]
    assert len({x.flatten()[:4].abs().sum().item() for x in matrices}) == len(matrices), "each has its own stream"
    assert not torch.equal(draw(1)["embed.weight"], first["embed.weight"])


def step(checkpoint: bool, **choices) -> tuple[GPT, torch.Tensor, int]:
    """The model after a backward pass, its losses, and the bytes that the forward pass kept for it."""
    shape = {"vocab_size": V, "context_length": 16, "n_layers": 4, "dim": 32, "n_heads": 4}
    config = GPTConfig(**shape | choices, checkpoint_activations=checkpoint)
    model = randomize(GPT(config), torch.Generator().manual_seed(0))
    ids, targets = torch.randint(V, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(2)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        nll = model.train().nll(ids, targets)
    nll.mean().backward()
    return model, nll.detach(), sum(kept.values())


@pytest.mark.parametrize("choices", [{"attn_dropout": 0.2, "resid_dropout": 0.1}, {"pos": "alibi"}], ids=str)
def test_checkpointed_activations_give_the_same_gradients_from_less_memory(choices):
    (kept, nll, _), (again, same_nll, _) = (step(each, **choices) for each in (False, True))
    assert torch.equal(nll, same_nll)
    for (name, p), q in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    bytes_of_a_block = [step(each, **choices)[2] - step(each, n_layers=3, **choices)[2] for each in (False, True)]
    assert bytes_of_a_block[1] == 3 * 16 * 32 * 4 < bytes_of_a_block[0] / 10  # its input, B T C float32 numbers
