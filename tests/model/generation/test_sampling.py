"""Filters and draws at their limits."""

import pytest
import torch

from tril.model.generation.config import SamplingConfig
from tril.model.generation.generate import Choice, choose, probabilities


def choice_of(config, prompts, vocab_size, seed=0, **changes):
    choice = Choice.of(config, prompts, vocab_size, torch.device("cpu"))._replace(**changes)
    choice.draw(torch.Generator().manual_seed(seed))
    return choice


def test_ties_with_the_last_kept_token_and_the_exact_end_of_top_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()  # powers of two: sums without rounding
    for values, n in (({"top_k": 4}, 5), ({"top_k": None, "top_p": 0.75}, 2), ({"top_k": 2, "top_p": 0.6}, 1)):
        found = probabilities(logits, choice_of(SamplingConfig(temperature=1.0, **values), [[0]], 5))
        assert (found > 0).tolist() == [[True] * n + [False] * (5 - n)]


@pytest.mark.parametrize("row", [[-4e30, -2e30, -3e30, -1e30], [0.0, 1e30, 0.0, 1e30], [0.0, 0.0, 0.0, 0.0]])
def test_the_strictest_filters_leave_the_most_probable_token(row):
    for noise in (0.0, 1 - 2**-24):  # the limits of torch.rand
        for values in (
            {"temperature": 0},
            {"temperature": 1e-300, "top_k": None},
            {"temperature": 0.001, "top_k": 1, "top_p": 1e-6, "min_p": 1.0},
        ):
            choice = choice_of(SamplingConfig(**values), [[0]], 4)
            if choice.noise is not None:
                choice.noise.fill_(noise)
            assert row[int(choose(torch.tensor([row]), choice))] == max(row)


def test_tokens_that_are_not_allowed_or_pad_the_vocabulary_are_never_chosen():
    logits, allowed = torch.tensor([[5.0, 1.0, 2.0, 9.0]] * 2), torch.tensor([[True, True, True], [False, True, False]])
    for temperature in (0.0, 5.0):
        choice = choice_of(SamplingConfig(temperature=temperature), [[0]] * 2, 3, allowed=allowed)
        draws = [choose(logits, choice).tolist() for _ in range(30) if choice.draw(None) is None]
        assert {row[1] for row in draws} == {1} and {row[0] for row in draws} <= {0, 1, 2}
    low = choice_of(SamplingConfig(top_p=0.9), [[0]] * 500, 50)
    logits = torch.randn(500, 50).bfloat16()
    assert torch.equal(choose(logits, low), choose(logits.float(), low)), "in float32, whatever the model's dtype"
