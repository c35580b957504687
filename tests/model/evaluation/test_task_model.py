"""Answers to requests of lm-evaluation-harness, against plain forward passes of one text up to one token at a time."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tests.oracles import most_probable
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.evaluation import scores
from tril.model.evaluation import task_model as module
from tril.model.evaluation.task_model import task_model, windows
from tril.model.generation.language_model import LanguageModel

pytest.importorskip("lm_eval", reason='pip install -e ".[eval]"')
L = 12  # context length
LONG = "the square of the line is the square of the word and the line"


def lm_of(kind: str) -> LanguageModel:
    """A random model, whose vocabulary has more rows than its tokenizer has tokens."""
    tokenizer = build(TokenizerConfig(kind=kind, vocab_size=290 if kind == "bpe" else None), [LONG, "?", "  \n", "0.1"])
    model = tiny_gpt(vocab_size=300, context_length=L)
    with torch.no_grad():
        model.head.weight[290:] = 3 * model.head.weight[:10]  # rows that no token has are often the largest
    lm = LanguageModel(model, tokenizer)
    lm.tokenizer.encode_special_tokens = True
    return lm


def requests(*arguments):
    return [SimpleNamespace(args=values) for values in arguments]


@torch.no_grad()
def next_token(lm, ids) -> torch.Tensor:
    """Log-probabilities (V,) after one text."""
    assert 1 <= len(ids) <= L
    return lm.model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)


def score(lm, context, targets) -> tuple[float, bool]:
    """One forward pass for each target, after at most L ids of one window."""
    total, greedy, ids = 0.0, True, [*context, *targets]
    for done in range(0, len(targets), L):
        end = len(context) + min(done + L, len(targets))
        start = max(0, end - 1 - L)  # the first id of the window
        for position in range(len(context) + done, end):
            logs = next_token(lm, ids[start:position])
            total += logs[ids[position]].item()
            greedy &= logs[: lm.n_ids].argmax().item() == ids[position]
    return total, greedy


def greedy(lm, prompt, n_tokens) -> str:
    new = most_probable(lambda ids, _: next_token(lm, ids)[: lm.n_ids], lm.encode(prompt), n_tokens, L, lm.eot_id)
    return lm.tokenizer.decode([token for token in new if token != lm.eot_id])


def test_windows_of_a_long_text():
    """The example of lm_eval.api.model.LM.loglikelihood_rolling, with -1 as the prefix; and long contexts."""
    assert windows([-1], range(10), 4) == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert windows([-1], [], 4) == []
    assert windows([1, 2, 3], [4, 5], 8) == [([1, 2, 3, 4, 5], 2)]
    assert windows([1, 2, 3], [4, 5], 3) == [([2, 3, 4, 5], 2)]
    assert windows([1, 2, 3], [4, 5, 6], 2) == [([3, 4, 5], 2), ([4, 5, 6], 1)]


@pytest.mark.parametrize("tokens_per_batch", [2048, 24])
def test_log_likelihoods(tokens_per_batch, monkeypatch):
    monkeypatch.setattr(scores, "TOKENS_PER_BATCH", tokens_per_batch)
    lm = lm_of("bpe")
    pairs = {  # (context, continuation) -> the two texts that are encoded, where they differ
        ("the line", " is"): None,
        ("the line ", "is"): ("the line", " is"),  # a space belongs to the word after it
        ("", "the word"): None,
        (LONG, " and"): None,
        ("the", " " + LONG): None,
        ("the line", ""): None,
        ("the", "<|endoftext|>"): None,  # in a text it is text
    }
    found = task_model(lm).loglikelihood(requests(*pairs), disable_tqdm=True)
    for (pair, texts), (value, is_greedy) in zip(pairs.items(), found, strict=True):
        ids = [lm.encode(text) if text else [] for text in texts or pair]
        expected = score(lm, ids[0] or [lm.eot_id], ids[1])
        assert (value, is_greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1]), pair
    texts = ["the line", "", LONG, "0.1", " the word "]
    found = task_model(lm).loglikelihood_rolling(requests(*((text,) for text in texts)))
    for text, value in zip(texts, found, strict=True):
        assert value == pytest.approx(score(lm, [lm.eot_id], lm.encode(text) if text else [])[0], abs=1e-4), text
    lm = lm_of("char")
    best = greedy(lm, "the w", 5)
    other = best[:4] + next(c for c in "thewordis" if c != best[4])
    found = task_model(lm).loglikelihood(requests(("the w", best), ("the w", other)), disable_tqdm=True)
    assert [flag for _, flag in found] == [True, False] and len(best) == 5
    ids = lm.encode("the w" + best)
    assert any(next_token(lm, ids[:n]).argmax() >= lm.n_ids for n in range(5, 10))  # rows without a token are ignored


def test_generated_texts(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 2 * L)  # two prompts
    lm = lm_of("char")
    prompts, n_tokens = ["word", "the", "a", "square", "is", ""], 5
    whole = {prompt: greedy(lm, prompt, n_tokens) for prompt in prompts}
    stop = whole["the"][2]
    arguments = [(prompt, {"until": [], "max_gen_toks": n_tokens}) for prompt in prompts]
    arguments += [(prompt, {"until": stop, "max_gen_toks": n_tokens, "temperature": 0.0}) for prompt in prompts]
    arguments += [("the", {"until": ["", stop], "do_sample": False, "max_new_tokens": 2})]
    arguments += [("the", {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 5.0})] * 3
    found = task_model(lm).generate_until(requests(*arguments))
    assert found[:6] == [whole[prompt] for prompt in prompts] and len(set(found[:6])) > 3
    assert found[6:12] == [whole[prompt].split(stop)[0] for prompt in prompts] != found[:6]
    assert found[12] == whole["the"][:2].split(stop)[0] and len(set(found[13:])) > 1
    with pytest.raises(ValueError, match="generation_kwargs.num_beams of a task is not supported; use until, max_gen"):
        task_model(lm).generate_until(requests(("the", {"num_beams": 2})))
    with pytest.raises(ValueError, match="'Q', which the tokenizer does not know"):
        task_model(lm).loglikelihood(requests(("the", " Q")), disable_tqdm=True)
