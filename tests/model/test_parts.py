"""The parts of a block against their formulas, and models without attention (n_heads=0) or without FFN (mlp="none").

B batch, T queries, C width, V vocabulary, L layers.
"""

import itertools
import math

import pytest
import torch

from tests.conftest import MODEL_CHOICES, assert_close, randomize, tiny_gpt
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT, MLP, GPTConfig
from tril.model.masks import document_mask, split_documents
from tril.model.training.optim import OptimConfig, param_groups

B, T, V, L = 2, 9, 31, 2  # V and L are those of tiny_gpt
PARTS = {"no attention": {"n_heads": 0}, "no FFN": {"mlp": "none"}}
GREEDY = SamplingConfig(max_new_tokens=6, temperature=0.0)


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def part(request):
    return request.param


def rms(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain


@pytest.mark.parametrize("norm_eps", [None, 0.5])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_block_equals_its_formula(norm, norm_eps):
    """Pre-norm residual branches with a squared relu."""
    block = tiny_gpt(norm=norm, norm_eps=norm_eps, mlp_hidden=50, qk_norm=False, pos="none").blocks[0]
    x = torch.randn(B, T, 32)
    eps = {"layernorm": 1e-5, "rmsnorm": torch.finfo(torch.float32).eps}[norm] if norm_eps is None else norm_eps

    def normalized(x, gain):
        x = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain

    assert block.mlp.up.weight.shape == (50, 32)
    h = x + block.attn(normalized(x, block.norm1.weight))
    h = h + (normalized(h, block.norm2.weight) @ block.mlp.up.weight.T).clamp(min=0) ** 2 @ block.mlp.down.weight.T
    assert_close(block(x), h)


@pytest.mark.parametrize(
    "kind, formula",
    [
        ("relu", lambda up, gate: up.clamp(min=0)),
        ("relu2", lambda up, gate: up.clamp(min=0) ** 2),
        ("gelu", lambda up, gate: up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))),
        ("gelu_erf", lambda up, gate: up / 2 * (1 + torch.erf(up / math.sqrt(2)))),
        ("swiglu", lambda up, gate: up * gate / (1 + (-gate).exp())),
    ],
)
def test_each_kind_of_ffn_equals_its_formula(kind, formula):
    mlp, x = randomize(MLP(8, 20, kind=kind, bias=True, dropout=0.0)), torch.randn(B, T, 8)
    up = x @ mlp.up.weight.T + mlp.up.bias
    gate = None if mlp.gate is None else x @ mlp.gate.weight.T + mlp.gate.bias
    assert_close(mlp(x), formula(up, gate) @ mlp.down.weight.T + mlp.down.bias)


@torch.no_grad()
def test_biases_of_qkv_alone_equal_those_of_a_model_whose_other_biases_are_0():
    model, ids = tiny_gpt(qkv_bias=True), torch.randint(V, (B, T))
    biased = {name.split(".")[-2] for name in model.state_dict() if name.endswith("bias")}
    assert biased == {"q_proj", "k_proj", "v_proj"}
    full = tiny_gpt(bias=True)
    result = full.load_state_dict(model.state_dict(), strict=False)
    assert not result.unexpected_keys
    for name in result.missing_keys:
        full.get_parameter(name).zero_()
    assert_close(model(ids), full(ids))


@pytest.mark.parametrize("norm_eps", [None, 0.5])
@pytest.mark.parametrize("qk_norm", ["none", "rmsnorm", "layernorm"])
@torch.no_grad()
def test_each_head_normalizes_q_and_k(qk_norm, norm_eps):
    """The scores of one query, as formulas."""
    attn = tiny_gpt(qk_norm=qk_norm, norm_eps=norm_eps, pos="none").blocks[0].attn
    x = torch.randn(1, T, 32)
    eps = {"none": 0.0, "rmsnorm": torch.finfo(torch.float32).eps, "layernorm": 1e-5}[qk_norm]
    eps = eps if norm_eps is None else norm_eps

    def normalized(vector, gain):
        if qk_norm == "none":
            return vector
        vector = vector - vector.mean() if qk_norm == "layernorm" else vector
        return vector / (vector.square().mean() + eps).sqrt() * gain.weight

    _, weights = attn(x, need_weights=True)
    q, k = attn.q_proj(x)[0].view(T, 4, 8), attn.k_proj(x)[0].view(T, 4, 8)
    for head in range(4):
        query = normalized(q[-1, head], attn.q_norm)
        scores = torch.stack([query @ normalized(key, attn.k_norm) for key in k[:, head]]) / math.sqrt(8)
        assert_close(weights[0, head, -1], scores.softmax(-1))


@torch.no_grad()
def test_a_model_without_attention_applies_its_ffns_to_each_token():
    model, ids = tiny_gpt(n_heads=0), torch.randint(V, (B, T))
    x = model.embed.weight[ids]
    for block in model.blocks:
        assert block.attn is None and block.norm1 is None
        x = x + (rms(x, block.norm2.weight) @ block.mlp.up.weight.T).clamp(min=0) ** 2 @ block.mlp.down.weight.T
    assert_close(model(ids), rms(x, model.norm.weight) @ model.head.weight.T)


@torch.no_grad()
def test_a_model_without_ffn_applies_its_attention_layers():
    model, ids = tiny_gpt(mlp="none", pos="none"), torch.randint(V, (B, T))
    x = model.embed.weight[ids]
    for block in model.blocks:
        assert block.mlp is None and block.norm2 is None
        x = x + block.attn(rms(x, block.norm1.weight))
    assert_close(model(ids), rms(x, model.norm.weight) @ model.head.weight.T)


@pytest.mark.parametrize("pos", MODEL_CHOICES["pos"])
@torch.no_grad()
def test_without_attention_each_output_depends_on_its_token_only(pos):
    model, ids = tiny_gpt(n_heads=0, pos=pos), torch.randint(V, (B, T))
    logits = model(ids)
    for t in range(T):
        assert_close(logits[:, t : t + 1], model(ids[:, t : t + 1], positions=torch.tensor([t])))
    if pos != "learned":  # the position of a token has no effect
        assert_close(model(ids.flip(1)).flip(1), logits)


@pytest.mark.parametrize("pos", MODEL_CHOICES["pos"])
@torch.no_grad()
def test_decoding_in_chunks_equals_the_full_pass(part, pos):
    model, ids = tiny_gpt(**part, pos=pos), torch.randint(V, (B, T))
    full = model(ids)
    for size in (1, 4):
        cache = model.new_cache(B, T)
        logits = [model(chunk, cache=cache) for chunk in ids.split(size, dim=1)]
        assert_close(torch.cat(logits, dim=1), full)
        assert cache.length == T
    assert (sum(keys.numel() for keys in cache.keys) == 0) is ("n_heads" in part)


@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_with_unequal_prompts_beyond_the_context(part, pos, use_cache):
    """With greedy sampling, each new token has the largest logit of a forward pass over the row without padding."""
    model = tiny_gpt(**part, pos=pos, context_length=8)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [7]]
    steps = list(generate_ids(model, prompts, GREEDY, use_cache=use_cache))
    rows = [prompt + [step[i].item() for step in steps] for i, prompt in enumerate(prompts)]
    for row, prompt in zip(rows, prompts, strict=True):
        context = list(prompt)
        for token in row[len(prompt) :]:
            context = context if len(context) <= 8 else context[-4:]  # the last half
            assert token == model(torch.tensor([context]))[0, -1].argmax().item()
            context.append(token)
    assert max(map(len, rows)) > 8


@torch.no_grad()
def test_packed_documents_equal_the_documents_alone(part):
    model, ids = tiny_gpt(**part, pos="learned"), torch.randint(1, V, (1, T))
    ids[0, 4] = 0
    documents, positions = split_documents(ids, 0)
    packed = model(ids, mask=document_mask(documents), positions=positions)
    assert_close(packed, torch.cat([model(ids[:, :4]), model(ids[:, 4:])], dim=1))


def test_a_gate_needs_heads():
    model, ids = tiny_gpt(n_heads=0), torch.randint(V, (B, T))
    for gate in (torch.ones(L, 0), torch.ones(L, 4)):
        with pytest.raises(
            ValueError, match=r"head_gate needs heads, and this model has none \(n_heads=0\); leave it out"
        ):
            model(ids, head_gate=gate)


def test_a_gate_without_ffn_can_remove_all_of_the_blocks():
    model, ids = tiny_gpt(mlp="none"), torch.randint(V, (B, T))
    assert torch.equal(model(ids, head_gate=torch.ones(L, 4)), model(ids))
    assert_close(model(ids, head_gate=torch.zeros(L, 4)), model.logits(model.norm(model.embed(ids))))


@pytest.mark.parametrize(
    "norm, bias, pos", list(itertools.product(["rmsnorm", "layernorm"], [False, True], ["rope", "learned"]))
)
def test_every_parameter_is_trained(part, norm, bias, pos):
    parts = {"norm": norm, "bias": bias, "pos": pos, "resid_dropout": 0.1, **part}
    model = GPT(GPTConfig(V, context_length=T, n_layers=2, dim=32, **parts)).train()
    ids, targets = torch.randint(V, (2, B, T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # with zero_out, the first step changes the head only
        optimizer.zero_grad()
        model.nll(ids, targets).mean().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    missing = "attn" if "n_heads" in part else "mlp"
    assert not any(missing in name for name in model.state_dict())


def test_the_optimizer_groups_the_matrices_of_the_remaining_parts(part):
    model = GPT(GPTConfig(V, n_layers=2, dim=32, tie_embeddings=False, **part))
    groups = {group["name"]: group["params"] for group in param_groups(model, OptimConfig())}
    matrices, gains = (2, 0) if "n_heads" in part else (4, 2)  # per block, without the gain of its norm
    assert len(groups["muon"]) == 2 * matrices and len(groups["no_decay"]) == 2 + 1 + 2 * gains
