"""The check that no row of a batch changes with another, on functions whose dependencies are known."""

import math

import pytest
import torch

from tril.model.causality.case import Case
from tril.model.causality.checks import check_rows
from tril.model.causality.subject import Subject

V = 7


def run_check(function):
    subject = Subject(function, vocab_size=V, context_length=5, exact=True)
    case = Case(subject, {}, [5], budget=math.inf)
    [result] = check_rows(case, case.random_tokens(3, 5))
    return result


def one_hot(ids):
    return torch.nn.functional.one_hot(ids, V).float()


def test_independent_rows_pass():
    assert run_check(one_hot).passed


def test_a_row_that_reads_the_row_before_it_fails():
    result = run_check(lambda ids: one_hot(ids) + 1e-6 * one_hot(ids).roll(1, 0))
    assert not result.passed and "row" in result.where


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # after the unchanged run
def test_one_nan_fails_whatever_comes_after_it(call):
    calls = []

    def function(ids):
        calls.append(ids)
        return one_hot(ids) * (math.nan if len(calls) - 1 == call else 1.0)

    assert not run_check(function).passed
