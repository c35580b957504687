"""Generation token by token: against `LanguageModel.generate`, and a full forward pass for each token."""

import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tests.model.tokenizers import byte_tokenizer, merging_tokenizer
from tril.model.generation.config import SamplingConfig
from tril.model.generation.generate import Choice, probabilities
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.attention_maps import attention_maps
from tril.model.heads.live import N_CANDIDATES, live_tokens, prompt_tokens

PLAIN = {"temperature": 1.0, "top_k": None, "top_p": None}
SETTINGS = [{"temperature": 0.0, "top_k": None, "top_p": None}, {"temperature": 1.5, "top_k": 100, "top_p": 0.6}]
SETTINGS.append({**SETTINGS[1], "repetition_penalty": 1.3})
GATE = torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 1]])


def language_model(**parts):
    return LanguageModel(tiny_gpt(**{"vocab_size": 257, **parts}), byte_tokenizer())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt, n", [("", 30), ("é🙂 ", 30), ("a prompt longer than the context", 20)])
def test_text_and_tokens_are_those_of_sampling(settings, prompt, n):
    lm = language_model()
    tokens = list(live_tokens(lm, prompt, max_new_tokens=n, seed=3, head_gate=GATE, **settings))
    shown = "".join(text for _, text in prompt_tokens(lm, prompt)) + "".join(token.text for token in tokens)
    assert shown == prompt + lm.generate(prompt, max_new_tokens=n, seed=3, head_gate=GATE, **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("parts", [{}, {"window": 4}, {"pos": "alibi", "n_kv_heads": 2}, {"causal": False}], ids=str)
def test_probabilities_and_attention_are_those_of_a_full_forward_pass(settings, parts):
    lm, cropped = language_model(**parts), 0
    ids = lm.encode("x=1")
    for token in live_tokens(lm, "x=1", max_new_tokens=20, seed=1, head_gate=GATE, **settings):
        context = torch.tensor([ids[token.n_dropped :]])
        cropped += token.n_dropped > 0
        with torch.inference_mode():
            logits = lm.model(context, head_gate=GATE)[:, -1]
        choice = Choice.of(SamplingConfig(**settings), [ids], lm.n_ids, logits.device)
        expected, model = (x[0].tolist() for x in (probabilities(logits, choice), logits.double().softmax(-1)))
        shown = [candidate.id for candidate in token.candidates]
        assert len(set(shown)) == len(shown) and token.id in shown
        assert len(shown) == N_CANDIDATES + (token.id not in shown[:N_CANDIDATES])
        largest = sorted(zip(expected, model, strict=True), reverse=True)
        for candidate, values in zip(token.candidates[:N_CANDIDATES], largest, strict=False):
            assert (candidate.drawn_from, candidate.model) == pytest.approx(values, rel=2e-4)
        for candidate in token.candidates:
            values = expected[candidate.id], model[candidate.id]
            assert (candidate.drawn_from, candidate.model) == pytest.approx(values, rel=2e-4)
            assert candidate.name == lm.tokenizer.decode([candidate.id], skip_special_tokens=False)
        assert_close(token.attention, attention_maps(lm.model, context, head_gate=GATE)[:, 0, :, -1])  # (L, H, S)
        ids.append(token.id)
    assert cropped or token.id == lm.eot_id


def test_between_steps_the_model_has_no_hooks_and_its_mode_and_without_heads_no_attention():
    lm = language_model()
    lm.model.train()
    for _ in live_tokens(lm, "a", max_new_tokens=2, seed=0, **PLAIN):
        assert not any(module._forward_hooks for module in lm.model.modules()) and lm.model.training
    [token] = live_tokens(language_model(n_heads=0, pos="none"), "abc", max_new_tokens=1, seed=0, **PLAIN)
    assert token.attention.shape == (0, 0, 3)
    with pytest.raises(ValueError, match="max_new_tokens=0"):  # by the call, not by the first token
        live_tokens(lm, "a", max_new_tokens=0, seed=0, **PLAIN)


def test_the_space_at_the_end_of_a_prompt_restricts_the_first_token_only():
    lm = LanguageModel(tiny_gpt(vocab_size=330), merging_tokenizer())
    options = {"max_new_tokens": 8, "seed": 0, **PLAIN}
    first, *others = live_tokens(lm, "the ", **options)
    assert [text for _, text in prompt_tokens(lm, "the ")] == ["the"] and first.text.startswith(" ")
    assert "the" + "".join(token.text for token in (first, *others)) == "the " + lm.generate("the ", **options)
    possible = {c.id for c in first.candidates if c.drawn_from > 0}
    assert possible <= {i for t, i in lm.tokenizer.get_vocab().items() if t.startswith("Ġ")} and len(possible) > 1
    assert any(c.drawn_from > 0 and not c.name.startswith(" ") for token in others for c in token.candidates)
