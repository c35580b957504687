"""Filters against literal arrays and a slow reference in Python; draws against the distribution they should follow."""

import math

import pytest
import torch
from pydantic import ValidationError

from tril.data.settings import explain
from tril.model.generation.sampling import (
    Choice,
    SamplingConfig,
    apply_filters,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)

P = [0.5, 0.25, 0.125, 0.0625, 0.0625]
OFF = {"temperature": 1.0, "top_k": None}


def logits_of(*rows):
    return torch.tensor(rows).log()


def kept(logits):
    return [[i for i, x in enumerate(row) if x > -math.inf] for row in logits.tolist()]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def next_token(logits, config, source=None, seen=None):
    """One step of logits (B, V)."""
    choice = Choice.of(config, *logits.shape, device=logits.device, seen=seen)
    choice.draw(source)
    return choose(logits, choice)


def reference(logits, config):
    """The kept tokens of one row, by sorted lists: temperature, top-k, top-p, min-p, renormalized after each."""
    weights = {i: math.exp(x / config.temperature) for i, x in enumerate(logits)}
    if config.top_k is not None:
        kth = sorted(weights.values(), reverse=True)[: config.top_k][-1]
        weights = {i: w for i, w in weights.items() if w >= kth}
    if config.top_p is not None:
        total, reached, kept = sum(weights.values()), 0.0, {}
        for i, w in sorted(weights.items(), key=lambda item: -item[1]):
            if reached < config.top_p * total:
                kept[i] = w
            reached += w
        weights = kept
    if config.min_p is not None:
        weights = {i: w for i, w in weights.items() if w >= config.min_p * max(weights.values())}
    return sorted(weights)


@pytest.mark.parametrize(
    "k, expected", [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_the_k_greatest_and_ties(k, expected):
    assert kept(keep_top_k(logits_of(P, P[::-1]), k)) == [expected, sorted(4 - i for i in expected)]


@pytest.mark.parametrize("p, n", [(1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (0.99, 5)])
def test_top_p_keeps_the_shortest_list_that_reaches_p(p, n):
    falling = [0.4, 0.3, 0.2, 0.07, 0.03]
    assert kept(keep_top_p(logits_of(falling, falling[::-1]), p)) == [list(range(n)), list(range(5 - n, 5))]


def test_top_p_stops_exactly_at_p():
    assert kept(keep_top_p(logits_of(P), 0.75)) == [[0, 1]]  # powers of two: sums without rounding


@pytest.mark.parametrize("share, n", [(1.0, 1), (0.51, 1), (0.49, 2), (0.24, 3), (0.12, 5)])
def test_min_p_keeps_a_share_of_the_greatest(share, n):
    assert kept(keep_min_p(logits_of(P, P[::-1]), share)) == [list(range(n)), list(range(5 - n, 5))]


def test_kept_logits_stay_as_they_are():
    logits = torch.randn(3, 20)
    for out in (keep_top_k(logits, 4), keep_top_p(logits, 0.5), keep_min_p(logits, 0.3)):
        assert torch.equal(out[out > -math.inf], logits[out > -math.inf])


@pytest.mark.parametrize(
    "row", [[0.0] * 6, [-1e30, -2e30, -3e30, -4e30, -5e30, -6e30], [1e30, 0.0, 0.0, 0.0, 0.0, 1e30]]
)
def test_the_strictest_filters_leave_the_most_probable_token(row):
    config = SamplingConfig(temperature=0.001, top_k=1, top_p=1e-6, min_p=1.0)
    for seed in range(10):
        [token] = next_token(torch.tensor([row]), config, generator(seed))
        assert row[token] == max(row)


@pytest.mark.parametrize(
    "choices",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7},
        {"top_p": 0.8, "min_p": 0.1},
        {"top_k": 12, "min_p": 0.3},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.15},
        {"temperature": 0.3, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 3.0, "top_p": 0.5},
    ],
)
def test_filters_together_equal_the_reference(choices):
    config = SamplingConfig(**{**OFF, **choices})
    logits = 2 * torch.randn(200, 30)
    out = apply_filters(logits / config.temperature, config)
    assert kept(out) == [reference(row, config) for row in logits.tolist()]


def test_top_p_sees_what_top_k_left():
    config = SamplingConfig(
        temperature=1.0, top_k=2, top_p=0.6
    )  # 0.5 of 0.75 is two thirds: enough alone; of 1 it would not be
    assert kept(apply_filters(logits_of(P), config)) == [[0]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[4.0, -4.0, 0.0, 4.0, -4.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[2.0, -8.0, 0.0, 4.0, -4.0]]
    config = SamplingConfig(temperature=0, repetition_penalty=2.0)
    assert next_token(logits, config, seen=seen).tolist() == [3]


@pytest.mark.parametrize(
    "choices", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}]
)
def test_frequencies_follow_the_distribution(choices):
    config, n = SamplingConfig(**{**OFF, **choices}), 200_000
    logits = torch.tensor([1.5, 0.0, -1.0, 1.0, 0.2, -4.0])
    draws = next_token(logits.expand(n, -1), config, generator())
    frequency = draws.bincount(minlength=6).double() / n
    weights = {i: math.exp(logits[i] / config.temperature) for i in reference(logits.tolist(), config)}
    p = torch.tensor([weights.get(i, 0.0) / sum(weights.values()) for i in range(6)], dtype=torch.float64)
    # 5 standard deviations of a binomial: a correct sampler fails with one seed in 300,000 (6 counts at 6e-7)
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all(), (frequency, p)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])  # the limits of torch.rand
def test_a_single_kept_token_is_taken_for_every_draw(noise):
    choice = Choice(SamplingConfig(top_k=1), 5, torch.tensor(0.8), torch.full((1, 5), noise))
    assert choose(logits_of([0.1, 0.2, 0.1, 0.5, 0.1]), choice).item() == 3


def test_only_ids_of_the_vocabulary_that_are_allowed_are_chosen():
    logits = logits_of([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    allowed = torch.tensor([[True, True, False], [False, True, True]])
    assert choose(logits, Choice(SamplingConfig(temperature=0), 3, torch.tensor(0.0), allowed=allowed)).tolist() == [
        1,
        1,
    ]


def test_greedy_takes_the_greatest_and_draws_nothing():
    logits, source = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0]]), generator()
    before = source.get_state()
    assert next_token(logits, SamplingConfig(temperature=0), source).tolist() == [1, 0]
    assert torch.equal(source.get_state(), before)


def test_the_seed_decides_and_rows_are_independent():
    logits = torch.zeros(64, 1000)
    one, same, other = (next_token(logits, SamplingConfig(top_k=None), generator(seed)).tolist() for seed in (0, 0, 1))
    assert one == same != other
    assert len(set(one)) > 50  # equal rows do not share their draw


def test_bfloat16_logits_are_computed_in_float32():
    logits = torch.randn(500, 50).bfloat16()
    config = SamplingConfig(top_p=0.9, min_p=0.01)
    assert next_token(logits, config, generator()).tolist() == next_token(logits.float(), config, generator()).tolist()


@pytest.mark.parametrize(
    "choices",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"top_k": None},
        {"top_k": 1},
        {"top_p": 1},
        {"top_p": 0.1},
        {"min_p": 0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.5},
    ],
)
def test_valid_values_pass(choices):
    SamplingConfig(**choices)


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", None),
        ("temperature", "0.8"),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", "0.9"),
        ("min_p", -0.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", None),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ValidationError) as error:
        SamplingConfig(**{name: value})
    shown = {None: "null", True: "true"}.get(value, repr(value))
    assert explain(error.value).startswith(f"{name}={shown} must be ") and ";" not in explain(error.value)[:-40]


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        SamplingConfig(temperature=-1, top_k=0, top_p=2, min_p=-1, repetition_penalty=0)
    names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    assert [part.split("=")[0] for part in explain(error.value).split("; ")] == names


def test_unknown_names_are_refused():
    with pytest.raises(ValidationError, match="top_q"):
        SamplingConfig(top_q=3)
