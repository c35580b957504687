"""Generation token by token: against `LanguageModel.generate`, a full forward pass and the equation of attention."""

import math

import numpy as np
import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tests.model.generation.test_language_model import byte_level
from tests.model.test_checkpoint import language_model
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.attention_maps import attention_maps
from tril.model.heads.live import N_CANDIDATES, live_tokens, prompt_tokens

PLAIN = {"temperature": 1.0, "top_k": None, "top_p": None}
SETTINGS = [
    {"temperature": 0.0, "top_k": None, "top_p": None},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.6},
    pytest.param({"temperature": 0.8, "top_k": 50, "top_p": None}, marks=pytest.mark.slow),
    pytest.param({"temperature": 0.5, "top_k": None, "top_p": 0.9}, marks=pytest.mark.slow),
]
GATE = torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 1]])


def ids_of(lm, prompt):
    return lm.split(prompt).ids


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt, n", [("def ", 6), ("", 30), ("é🙂 ", 30), ("a prompt longer than the context", 20)])
@pytest.mark.parametrize("gate", [None, GATE], ids=["all heads", "two heads removed"])
def test_text_and_tokens_are_those_of_sampling(settings, prompt, n, gate):
    lm = language_model()
    tokens = list(live_tokens(lm, prompt, max_new_tokens=n, seed=3, head_gate=gate, **settings))
    shown = "".join(text for _, text in prompt_tokens(lm, prompt)) + "".join(token.text for token in tokens)
    assert shown == prompt + lm.generate(prompt, max_new_tokens=n, seed=3, head_gate=gate, **settings)


def forced(lm, text):
    """The model becomes one that continues with this text, whatever comes before."""
    queue = iter([*lm.encode(text), lm.eot_id])
    lm.model.logits = lambda hidden: 100 * torch.eye(257)[next(queue)].expand(1, hidden.shape[1], 257)
    return lm


def test_a_character_of_several_tokens_appears_with_its_last_one():
    tokens = list(live_tokens(forced(language_model(), "aé🙂b"), "x", max_new_tokens=50, seed=0, **PLAIN))
    assert [token.text for token in tokens] == ["a", "", "é", "", "", "", "🙂", "b", ""]
    assert [token.name for token in tokens] == ["a", *["\ufffd"] * 6, "b", "<|endoftext|>"]
    tokens = list(live_tokens(forced(language_model(), "aé🙂"), "x", max_new_tokens=5, seed=0, **PLAIN))
    assert [token.text for token in tokens] == ["a", "", "é", "", "\ufffd"]  # the end: no token completes it


def filtered(logits, temperature, top_k, top_p):
    """Temperature, top-k and top-p in the words of their papers: a loop over sorted tokens."""
    if temperature == 0:
        return {int(logits.argmax()): 1.0}
    scaled = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-scaled)[: top_k or len(scaled)]
    shares, kept, total = scaled[order] / scaled[order].sum(), {}, 0.0
    for token, share in zip(order.tolist(), shares, strict=True):
        if total >= (top_p or 1.0):
            break
        kept[token], total = share, total + share
    return {token: share / total for token, share in kept.items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("gate", [None, GATE], ids=["all heads", "two heads removed"])
def test_probabilities_are_those_of_a_full_forward_pass(settings, gate):
    lm = language_model()
    ids = ids_of(lm, "x=1")
    for token in live_tokens(lm, "x=1", max_new_tokens=9, seed=1, head_gate=gate, **settings):
        with torch.inference_mode():
            logits = lm.model(torch.tensor([ids]), head_gate=gate)[0, -1].double().numpy()
        expected = filtered(logits, **settings)
        model = np.exp(logits) / np.exp(logits).sum()
        ids_shown = [candidate.id for candidate in token.candidates]
        assert len(set(ids_shown)) == len(ids_shown) and token.id in ids_shown
        assert len(ids_shown) == N_CANDIDATES + (token.id not in ids_shown[:N_CANDIDATES])
        largest = sorted(((expected.get(i, 0.0), p) for i, p in enumerate(model)), reverse=True)
        for candidate, values in zip(token.candidates[:N_CANDIDATES], largest, strict=False):
            np.testing.assert_allclose((candidate.drawn_from, candidate.model), values, rtol=1e-4)
        for candidate in token.candidates:
            assert math.isclose(candidate.model, model[candidate.id], rel_tol=1e-4)
            assert math.isclose(candidate.drawn_from, expected.get(candidate.id, 0.0), rel_tol=1e-4)
            assert candidate.name == lm.tokenizer.decode([candidate.id], skip_special_tokens=False)
        ids.append(token.id)


def test_the_space_at_the_end_of_a_prompt_restricts_the_first_token_only():
    lm = LanguageModel(tiny_gpt(vocab_size=330), byte_level(330))
    options = {"max_new_tokens": 8, "seed": 0, **PLAIN}
    first, *others = live_tokens(lm, "the ", **options)
    assert [text for _, text in prompt_tokens(lm, "the ")] == ["the"] and first.text.startswith(" ")
    assert "the" + "".join(token.text for token in (first, *others)) == "the " + lm.generate("the ", **options)
    possible = {c.id for c in first.candidates if c.drawn_from > 0}
    assert possible <= {i for t, i in lm.tokenizer.get_vocab().items() if t.startswith("Ġ")} and len(possible) > 1
    assert any(c.drawn_from > 0 and not c.name.startswith(" ") for token in others for c in token.candidates)
    model = torch.softmax(lm.model(torch.tensor([lm.encode("the")]))[0, -1], -1)  # what the first token is chosen from
    for candidate in first.candidates:
        assert math.isclose(candidate.model, model[candidate.id].item(), rel_tol=1e-4)


PARTS = [{}, {"window": 4}, {"pos": "alibi", "n_kv_heads": 2}, {"pos": "learned"}, {"causal": False}]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_attention_is_the_last_row_of_the_maps_of_the_context(parts):
    lm = language_model(**parts)
    ids, limit = ids_of(lm, "abc"), lm.config.context_length
    n_full = 0
    for token in live_tokens(lm, "abc", max_new_tokens=25, seed=2, head_gate=GATE, **PLAIN):
        context = torch.tensor([ids[token.n_dropped :]])
        assert 1 <= context.shape[1] <= limit
        n_full += token.n_dropped > 0
        maps = attention_maps(lm.model, context, head_gate=GATE)[:, 0, :, -1]  # (L, H, S)
        assert_close(token.attention, maps)
        assert_close(token.attention.sum(-1), torch.ones(2, 4))
        ids.append(token.id)
    assert n_full >= 10  # the context was cropped


def test_attention_is_the_equation():
    lm = language_model(pos="learned", qk_norm="none", n_layers=1)
    model, ids = lm.model, ids_of(lm, "abc")
    norm, attn = model.blocks[0].norm1, model.blocks[0].attn
    for token in live_tokens(lm, "abc", max_new_tokens=6, seed=2, **PLAIN):
        with torch.inference_mode():
            x = norm(model.embed.weight[ids] + model.pos_embed.weight[: len(ids)]).double()  # (S, C)
        q, k = (x.numpy() @ layer.weight.detach().double().numpy().T for layer in (attn.q_proj, attn.k_proj))
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            scores = k[:, part] @ q[-1, part] / math.sqrt(8)
            assert_close(token.attention[0, head], torch.from_numpy(np.exp(scores) / np.exp(scores).sum()))
        ids.append(token.id)


def test_a_model_without_heads_has_no_attention():
    [token] = live_tokens(language_model(n_heads=0, pos="none"), "abc", max_new_tokens=1, seed=0, **PLAIN)
    assert token.attention.shape == (0, 0, 3)


def test_between_steps_the_model_has_no_hooks_and_its_mode():
    lm = language_model()
    lm.model.train()
    for _ in live_tokens(lm, "a", max_new_tokens=2, seed=0, **PLAIN):
        assert not any(module._forward_hooks for module in lm.model.modules()) and lm.model.training


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be greater than or equal to 1"),
        ({"seed": -1}, "seed=-1 must be greater than or equal to 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_wrong_values_are_refused_by_the_call(wrong, message):
    from tril.scripts.cli.errors import message_of

    with pytest.raises(ValueError) as error:
        live_tokens(language_model(), "a", **{"max_new_tokens": 2, "seed": 0, **PLAIN, **wrong})
    assert message in message_of(error.value)
