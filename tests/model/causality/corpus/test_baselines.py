"""Scores of checkers, and the two simple checkers on entries whose verdict follows from what they do."""

import math

import pytest

from tril.model.causality import corpus
from tril.model.causality.corpus.baselines import last_token, one_gradient
from tril.model.causality.corpus.scoring import Finding, by_family, chosen, judge, names_place, score

ENTRIES = {entry.name: entry for entry in corpus.entries()}


@pytest.mark.parametrize(
    ("name", "by_token", "by_gradient"),
    [
        ("no_mask", True, True),
        ("lstm", False, False),
        ("returns_a_dictionary", False, False),
        ("plain_function", False, False),  # without an embedding
        ("without_gradients", False, False),
        ("cached_attention", False, False),
        ("shifted_by_one", False, False),
        ("validation_windows_in_training", False, False),  # texts have no logits
        ("mask_open_at_one_boundary", False, False),  # query 31 sees key 32; the middle of 64 is query 32
        ("second_to_last_position_sees_the_last", True, False),
        ("detached_next_token", True, False),
        ("straight_through_next_token", False, True),
        ("unmasked_in_training", False, False),
        ("encoder", True, True),  # they know no pattern
    ],
)
def test_baselines(name, by_token, by_gradient):
    assert last_token(ENTRIES[name]) == Finding(by_token)
    assert one_gradient(ENTRIES[name]) == Finding(by_gradient)


def test_score():
    leak, other, correct = ENTRIES["no_mask"], ENTRIES["rows_rolled"], ENTRIES["lstm"]
    pairs = [
        (leak, Finding(True, "blocks.0.attn.q_proj", 1.0)),
        (other, Finding(True, "blocks.0.attn", 2.0)),
        (ENTRIES["fourth_row_sees_the_future"], Finding(True)),  # without a place
        (ENTRIES["mask_inverted"], Finding(False)),
        (ENTRIES["mask_transposed"], Finding(None, error="crashed")),
        (correct, Finding(True)),
        (ENTRIES["gru"], Finding(False)),
    ]
    total = score(pairs)
    assert (total.leaks, total.caught, total.places, total.placed) == (5, 3, 2, 1)
    assert (total.correct, total.false_alarms, total.undecided, total.seconds) == (2, 1, 1, 3.0)
    families = dict(by_family(pairs))
    assert list(families) == ["masks", "rows of the batch", "look-alike: recurrent"]
    assert (families["masks"].leaks, families["masks"].caught) == (3, 1)


def test_a_place_is_right_if_it_is_the_submodule_or_a_part_of_it():
    entry = ENTRIES["no_mask"]
    places = ["blocks.0.attn", "blocks.0.attn.k_proj", "blocks.0", "blocks.0.attn2", ""]
    assert [names_place(entry, Finding(True, place)) for place in places] == [True, True, False, False, False]


def test_a_checker_that_fails_gives_no_verdict():
    def checker(entry):
        raise RuntimeError("two\nlines")

    finding = judge(checker, ENTRIES["lstm"])
    assert finding.leak is None and finding.error == "RuntimeError: two lines"
    assert 0 < finding.seconds < math.inf


def test_chosen_entries():
    entries = corpus.entries()
    assert chosen(entries, None, None) == entries
    assert [entry.name for entry in chosen(entries, None, ["lstm", "no_mask"])] == ["no_mask", "lstm"]
    assert {entry.family for entry in chosen(entries, ["length", "data"], None)} == {"length", "data"}
    assert chosen(entries, ["length"], ["lstm"]) == ()
    with pytest.raises(ValueError, match="families='lenght' is not in the corpus; use any of cache, convolution,"):
        chosen(entries, ["lenght"], None)
    with pytest.raises(ValueError, match="only='nomask' is not in the corpus"):
        chosen(entries, None, ["nomask"])
