"""Answers to requests of lm-evaluation-harness, against plain forward passes of one text up to one token at a time."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.evaluation import scores, task_model
from tril.model.evaluation.task_model import TaskModel, windows
from tril.model.generation.language_model import LanguageModel

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
    total, greedy, ids, done = 0.0, True, [*context, *targets], 0
    while done < len(targets):
        n = min(L, len(targets) - done)
        end = len(context) + done + n
        start = max(0, end - 1 - L)  # the first id of the window
        for position in range(len(context) + done, end):
            logs = next_token(lm, ids[start:position])
            total += logs[ids[position]].item()
            greedy &= logs[: lm.n_ids].argmax().item() == ids[position]
        done += n
    return total, greedy


def test_windows_of_a_long_text():
    """The example of lm_eval.api.model.LM.loglikelihood_rolling, with -1 as the prefix."""
    assert windows([-1], range(10), 4) == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert windows([-1], range(4), 4) == [([-1, 0, 1, 2, 3], 4)]
    assert windows([-1], [], 4) == []


def test_a_long_context_is_cut_from_the_left():
    assert windows([1, 2, 3], [4, 5], 8) == [([1, 2, 3, 4, 5], 2)]
    assert windows([1, 2, 3], [4, 5], 3) == [([2, 3, 4, 5], 2)]
    assert windows([1, 2, 3], [4, 5], 2) == [([3, 4, 5], 2)]
    assert windows([1, 2, 3], [4, 5, 6], 2) == [([3, 4, 5], 2), ([4, 5, 6], 1)]


PAIRS = {  # (context, continuation) -> the two texts that are encoded, where they differ
    ("the line", " is"): None,
    ("the line ", "is"): ("the line", " is"),
    ("the line \n", " is"): ("the line", " \n is"),
    ("", "the word"): None,
    (" ", "the word"): ("", " the word"),
    ("the line", ""): None,
    ("", ""): None,
    (LONG, " and"): None,
    ("the", " " + LONG): None,
    (LONG, LONG + LONG): None,
    ("the", "<|endoftext|>"): None,  # in a text it is text
    ("th", "e line"): ("th", "e line"),
}


@pytest.mark.parametrize("tokens_per_batch", [2048, 24])
def test_log_likelihoods(tokens_per_batch, monkeypatch):
    monkeypatch.setattr(scores, "TOKENS_PER_BATCH", tokens_per_batch)
    lm = lm_of("bpe")
    assert lm.encode("the line is") == [*lm.encode("the line"), *lm.encode(" is")]
    assert lm.encode("the line is") != [*lm.encode("the line "), *lm.encode("is")]  # a space belongs to the word after
    assert lm.encode("the line")[:1] != lm.encode("th")  # one token, which no split between both texts may cut
    found = TaskModel(lm).loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for ((before, after), texts), (value, greedy) in zip(PAIRS.items(), found, strict=True):
        before, after = texts or (before, after)
        ids = [lm.encode(text) if text else [] for text in (before, after)]
        expected = score(lm, ids[0] or [lm.eot_id], ids[1])
        assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1]), (before, after)
    assert found[5] == found[6] == (0.0, True)
    assert max(map(len, (lm.encode(text) for pair in PAIRS for text in pair if text))) > 2 * L  # three windows


def test_log_likelihoods_of_whole_texts():
    lm, texts = lm_of("bpe"), ["the line", "", LONG, "0.1", " the word ", LONG + LONG]
    found = TaskModel(lm).loglikelihood_rolling(requests(*((text,) for text in texts)), disable_tqdm=True)
    for text, value in zip(texts, found, strict=True):
        assert value == pytest.approx(score(lm, [lm.eot_id], lm.encode(text) if text else [])[0], abs=1e-4), text
    assert found[1] == 0.0 and len(set(found)) == len(found)


def greedy(lm, prompt, n_tokens) -> str:
    ids = lm.encode(prompt)
    text = ""
    for _ in range(n_tokens):
        ids.append(next_token(lm, ids)[: lm.n_ids].argmax().item())
        if ids[-1] == lm.eot_id:
            break
        text += lm.tokenizer.decode(ids[-1:])
    return text


def test_the_greedy_continuation_is_flagged():
    lm = lm_of("char")
    best = greedy(lm, "the w", 5)
    assert len(best) == 5 and not best[0].isspace()
    other = best[:4] + next(c for c in "thewordis" if c != best[4])
    found = TaskModel(lm).loglikelihood(requests(("the w", best), ("the w", other), ("the", best)), disable_tqdm=True)
    assert [flag for _, flag in found] == [True, False, best == greedy(lm, "the", 5)]
    wrong = "h" * L  # a window that is not greedy, before one that is
    end = greedy(lm, wrong, 1)
    assert end and greedy(lm, "the w", 1) != "h"
    assert [flag for _, flag in TaskModel(lm).loglikelihood(requests(("the w", wrong + end)), disable_tqdm=True)] == [
        False
    ]
    ids = lm.encode("the w" + best)
    assert any(next_token(lm, ids[:n]).argmax() >= lm.n_ids for n in range(5, 10))  # rows without a token are ignored


def test_generated_texts(monkeypatch):
    pytest.importorskip("lm_eval", reason='pip install "tril[eval]"')
    monkeypatch.setattr(task_model, "TOKENS_PER_BATCH", 2 * L)  # two prompts
    lm = lm_of("char")
    prompts, n_tokens = ["word", "the", "a", "square", "is", ""], 5
    whole = {prompt: greedy(lm, prompt, n_tokens) for prompt in prompts}
    stop = whole["the"][2]
    arguments = [(prompt, {"until": [], "max_gen_toks": n_tokens}) for prompt in prompts]
    arguments += [(prompt, {"until": stop, "max_gen_toks": n_tokens, "temperature": 0.0}) for prompt in prompts]
    arguments += [("the", {"until": ["", stop], "do_sample": False, "max_new_tokens": 2})]
    found = TaskModel(lm).generate_until(requests(*arguments), disable_tqdm=True)
    assert found[:6] == [whole[prompt] for prompt in prompts] and len(set(found[:6])) > 3
    assert found[6:12] == [whole[prompt].split(stop)[0] for prompt in prompts] != found[:6]
    assert found[12] == whole["the"][:2].split(stop)[0]


def test_sampled_texts_depend_on_the_temperature_and_options_are_checked(monkeypatch):
    monkeypatch.setattr(task_model, "TOKENS_PER_BATCH", L)  # one prompt, so each has draws of its own
    pytest.importorskip("lm_eval", reason='pip install "tril[eval]"')
    lm = lm_of("char")
    best = greedy(lm, "the", 8)
    drawn = {"until": [], "max_gen_toks": 8, "do_sample": True}
    arguments = [("the", drawn | {"temperature": 5.0})] * 3 + [("the", drawn | {"top_k": 1})]
    *found, last = TaskModel(lm).generate_until(requests(*arguments), disable_tqdm=True)
    assert len({*found, best}) == 4 and last == best
    with pytest.raises(ValueError, match="generation_kwargs.num_beams of a task is not supported; use until, max_gen"):
        TaskModel(lm).generate_until(requests(("the", {"num_beams": 2})), disable_tqdm=True)


def test_characters_that_the_tokenizer_lacks_are_refused():
    with pytest.raises(ValueError, match="'Q', which the tokenizer does not know"):
        TaskModel(lm_of("char")).loglikelihood(requests(("the", " Q")), disable_tqdm=True)
