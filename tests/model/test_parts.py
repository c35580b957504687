"""Models without attention (n_heads=0) and without FFN (mlp="none"): what is left of a block, and that all else goes on.

B batch, T queries, C width, V vocabulary, L layers.
"""

import itertools

import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import document_mask, split_documents
from tril.model.training.optim import OptimConfig, param_groups

B, T, V, L = 2, 9, 31, 2  # V and L are those of tiny_gpt
PARTS = {"no attention": {"n_heads": 0}, "no FFN": {"mlp": "none"}}
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def part(request):
    return request.param


def rms(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain


@torch.no_grad()
def test_a_model_without_attention_is_its_ffns_on_each_token():
    model, ids = tiny_gpt(n_heads=0), torch.randint(V, (B, T))
    x = model.embed.weight[ids]
    for block in model.blocks:
        assert block.attn is None and block.norm1 is None
        x = x + (rms(x, block.norm2.weight) @ block.mlp.up.weight.T).clamp(min=0) ** 2 @ block.mlp.down.weight.T
    assert_close(model(ids), rms(x, model.norm.weight) @ model.head.weight.T)


@torch.no_grad()
def test_a_model_without_ffn_is_its_attentions():
    model, ids = tiny_gpt(mlp="none", pos="none"), torch.randint(V, (B, T))
    x = model.embed.weight[ids]
    for block in model.blocks:
        assert block.mlp is None and block.norm2 is None
        x = x + block.attn(rms(x, block.norm1.weight))
    assert_close(model(ids), rms(x, model.norm.weight) @ model.head.weight.T)


@pytest.mark.parametrize("pos", ["rope", "learned", "none"])
@torch.no_grad()
def test_without_attention_each_position_is_judged_by_its_own_token(pos):
    model, ids = tiny_gpt(n_heads=0, pos=pos), torch.randint(V, (B, T))
    logits = model(ids)
    for t in range(T):
        alone = model(ids[:, t : t + 1], positions=torch.tensor([t]))
        assert_close(logits[:, t : t + 1], alone)
    if pos != "learned":  # a token is the same wherever it stands
        assert_close(model(ids.flip(1)).flip(1), logits)


@pytest.mark.parametrize("pos", ["rope", "learned", "none"])
@torch.no_grad()
def test_pieces_through_the_cache_are_the_full_pass(part, pos):
    model, ids = tiny_gpt(**part, pos=pos), torch.randint(V, (B, T))
    full = model(ids)
    for size in (1, 4):
        cache = model.new_cache(B, T)
        pieces = [model(piece, cache=cache) for piece in ids.split(size, dim=1)]
        assert_close(torch.cat(pieces, dim=1), full)
        assert cache.length == T
    assert (sum(keys.numel() for keys in cache.keys) == 0) is ("n_heads" in part)


@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_of_unequal_prompts_past_the_context(part, pos, use_cache):
    """Greedy, so each new token is the largest logit of a plain forward pass over the row's own tokens."""
    model = tiny_gpt(**part, pos=pos, context_length=8)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [7]]
    steps = list(generate_ids(model, prompts, max_new_tokens=6, sampling=GREEDY, use_cache=use_cache))
    rows = [prompt + [step[i].item() for step in steps] for i, prompt in enumerate(prompts)]
    for row, prompt in zip(rows, prompts):
        context = list(prompt)
        for token in row[len(prompt) :]:
            context = context if len(context) <= 8 else context[-4:]  # the newer half
            assert token == model(torch.tensor([context]))[0, -1].argmax().item()
            context.append(token)
    assert max(map(len, rows)) > 8


@torch.no_grad()
def test_packed_documents_are_each_of_them_alone(part):
    model, ids = tiny_gpt(**part, pos="learned"), torch.randint(1, V, (1, T))
    ids[0, 4] = 0
    documents, positions = split_documents(ids, 0)
    packed = model(ids, mask=document_mask(documents), positions=positions)
    assert_close(packed, torch.cat([model(ids[:, :4]), model(ids[:, 4:])], dim=1))


def test_a_gate_for_heads_that_are_not_there_is_refused():
    model, ids = tiny_gpt(n_heads=0), torch.randint(V, (B, T))
    for gate in (torch.ones(L, 0), torch.ones(L, 4)):
        with pytest.raises(
            ValueError, match=r"head_gate needs heads, and this model has none \(n_heads=0\); leave the gate out"
        ):
            model(ids, head_gate=gate)
    without_ffn = tiny_gpt(mlp="none")
    assert torch.equal(without_ffn(ids, head_gate=torch.ones(L, 4)), without_ffn(ids))
    nothing = without_ffn(ids, head_gate=torch.zeros(L, 4))  # and nothing else in the blocks
    assert_close(nothing, without_ffn.logits(without_ffn.norm(without_ffn.embed(ids))))


@pytest.mark.parametrize(
    "norm, bias, pos", list(itertools.product(["rmsnorm", "layernorm"], [False, True], ["rope", "learned"]))
)
def test_every_parameter_is_trained(part, norm, bias, pos):
    model = GPT(
        GPTConfig(V, context_length=T, n_layers=2, dim=32, norm=norm, bias=bias, pos=pos, resid_dropout=0.1, **part)
    ).train()
    ids, targets = torch.randint(V, (2, B, T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # zero_out opens the model from its end
        optimizer.zero_grad()
        model.nll(ids, targets).mean().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    gone = "attn" if "n_heads" in part else "mlp"
    assert not any(gone in name for name in model.state_dict())


def test_the_optimizer_still_finds_matrices_in_the_blocks(part):
    groups = {
        group["name"]: group["params"]
        for group in param_groups(GPT(GPTConfig(V, n_layers=2, dim=32, **part)), OptimConfig())
    }
    per_block = 2 if "n_heads" in part else 4
    assert len(groups["muon"]) == 2 * per_block and len(groups["no_decay"]) == 2 + 1 + (
        0 if "n_heads" in part else 2 * 2
    )
