"""Generated text against a loop of full forward passes, draws against their distribution, and recorded texts."""

import copy
from collections import Counter

import pytest
import torch

from tests.contract.harness import assert_golden, run
from tests.oracles import most_probable
from tril.model import load

PROMPTS = ["The dog", "A", "", "Under the old tree it sings and then the red cat finds a small bird near the house"]
FILTERS = [
    {"top_k": 3, "temperature": 2.0},
    {"top_k": None, "top_p": 0.5},
    {"top_k": None, "min_p": 0.3, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 3.0},
]


@pytest.fixture(scope="module")
def lm(run_of):
    """A model with random matrices, because after a short training it predicts the same after every text."""
    steps = "trainer.max_steps=2", "trainer.val_check_interval=2", "optim.betas=[0.9,0.95]"
    lm = load(run_of("model.key_offset=false", *steps), device="cpu")
    torch.manual_seed(16)
    for matrix in (parameter for parameter in lm.model.parameters() if parameter.dim() > 1):
        matrix.data.normal_(0, 0.5)
    return lm


def predicted(lm, window, seen, temperature=0.8, top_k=50, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """The probabilities of the next token, by one full pass and the filters in their documented order."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([window]))[0, -1, : lm.tokenizer.get_vocab_size()].double()
    for token in seen:
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    order = logits.argsort(descending=True)
    kept = (logits[order] / temperature).softmax(0)[:top_k]
    kept = kept[(kept.cumsum(0) - kept) / kept.sum() < top_p]
    kept = kept[kept >= min_p * kept[0]]
    return torch.zeros_like(logits).index_copy(0, order[: len(kept)], kept / kept.sum())


def greedy(lm, prompt, n, **options):
    """The text after the prompt by full passes, and its number of tokens."""
    end = lm.tokenizer.token_to_id("<|endoftext|>")
    start = lm.tokenizer.encode(prompt).ids or [end]
    scores = lambda window, new: predicted(lm, window, {*start, *new}, **options)  # noqa: E731
    new = most_probable(scores, start, n, lm.config.context_length, end)
    return lm.tokenizer.decode(start + new)[len(prompt) :], len(new)


def test_texts_past_the_context_are_those_of_a_loop_of_full_passes(lm):
    texts, lengths = zip(*(greedy(lm, prompt, 70, repetition_penalty=1.6) for prompt in PROMPTS), strict=True)
    assert min(lengths) < 50 and max(lengths) == 70, "a text ends, and one goes far beyond the context of 32 tokens"
    options = {"max_new_tokens": 70, "temperature": 0.0, "repetition_penalty": 1.6}
    assert [lm.generate(prompt, **options) for prompt in PROMPTS] == list(texts)
    assert lm.generate(PROMPTS, **options) == list(texts), "as a batch, padded on the left"
    assert lm.generate(PROMPTS, **options, use_cache=False) == list(texts)
    drawn = {seed: str(lm.generate(PROMPTS, 70, seed=seed)) for seed in (3, 4, None)}
    assert len({*drawn.values()}) == 3 and drawn[3] == str(lm.generate(PROMPTS, 70, seed=3, use_cache=False))


@pytest.mark.slow
def test_the_compiled_step_gives_the_same_texts(lm):
    """Of one layer and one graph: with padding, and within the context."""
    lm = copy.deepcopy(lm)
    del lm.model.blocks[1]
    assert lm.generate(PROMPTS[:2], 20, seed=3, compile=True) == lm.generate(PROMPTS[:2], 20, seed=3)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_are_drawn_from_the_filtered_distribution(lm, options):
    prompt, n = "then", 2000
    ids, counts = lm.tokenizer.encode(prompt).ids, Counter(lm.generate([prompt] * n, 1, seed=1, **options))
    expected = predicted(lm, ids, set(ids), **options)
    kept = expected.nonzero().flatten().tolist()
    chances = Counter(
        {lm.tokenizer.decode([*ids, token]).removeprefix(prompt): expected[token].item() for token in kept}
    )
    assert len(chances) == len(kept) > 1, "the kept tokens have different texts"
    for text in counts | chances:
        p = chances[text]
        assert abs(counts[text] - n * p) <= 5 * (n * p * (1 - p)) ** 0.5 + (p > 0), text


def test_the_command_prints_the_text_of_python_which_is_the_recorded_one(trained, tmp_path):
    lm, without = load(trained, device="cpu"), {"repetition_penalty": 1.0}
    options = {"max_new_tokens": 24, "seed": 1, "temperature": 0.9, "stop": "tree"} | without
    text = lm.generate("The dog ", **options)
    assert_golden("generation", "The dog, seed 1", text)
    three = lm.generate(["The dog ", "The", "The"], 24, top_p=0.9, **without)
    assert_golden("generation", "three prompts, seed 0", three)
    settings = [f"{name}={value}" for name, value in options.items()]
    settings.append("device=cpu")  # a GPU draws other random numbers
    done = run("sample", f"ckpt={trained}", "prompt=The dog ", *settings, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"The dog {text}\n"
