"""Batches of a mixture: exact shares, the sequence of each source alone, and the same windows whatever came before."""

import numpy as np
import pytest
import torch

from tril.data.batches import IGNORE, TrainWindows, on_device

T = 4
SIZES = (101, 30, 9)  # tokens: 25, 8 and 2 windows an epoch
COUNTS = (6, 3, 1)  # windows in a block of 10


def tokens():
    """Token i of source s is 1000 s + i, so that a token tells where it stands."""
    return [(1000 * source + np.arange(size)).astype(np.uint16) for source, size in enumerate(SIZES)]


def make(**options):
    arguments = {"batch_size": 1, "seed": 3} | options
    return TrainWindows(arguments.pop("tokens", tokens()), T, counts=COUNTS, **arguments)


def windows(loader, n):
    """Inputs and targets of the first n windows, (n, T) each."""
    batches = []
    while sum(len(inputs) for inputs, _ in batches) < n:
        batches += list(loader)
    inputs, targets = (torch.cat(part)[:n] for part in zip(*batches, strict=True))
    return inputs, targets


def sources_of(inputs):
    return inputs[:, 0] // 1000


def test_every_block_has_the_exact_shares_in_an_order_of_its_own():
    sources = sources_of(windows(make(), 400)[0]).view(40, 10)
    assert all(torch.bincount(block, minlength=3).tolist() == list(COUNTS) for block in sources)
    orders = {tuple(block.tolist()) for block in sources}
    assert len(orders) > 30  # of 840
    other = sources_of(windows(make(seed=4), 400)[0]).view(40, 10)
    assert not torch.equal(sources, other)


def test_no_window_crosses_two_sources():
    inputs, targets = windows(make(), 400)
    source = sources_of(inputs)[:, None]
    assert (inputs // 1000 == source).all() and ((targets // 1000 == source) | (targets == IGNORE)).all()


@pytest.mark.parametrize("source", [0, 1, 2])
def test_the_windows_of_a_source_are_those_of_a_run_on_it_alone(source):
    """600 windows: 14, 22 and 30 epochs, hence each target once per epoch, as `test_batches.py` has it."""
    inputs, targets = windows(make(), 600)
    own = sources_of(inputs) == source
    n = 60 * COUNTS[source]
    assert own.sum() == n
    expected = windows(TrainWindows(tokens()[source], T, 1, seed=3), n)
    assert torch.equal(inputs[own], expected[0]) and torch.equal(targets[own], expected[1])


def test_each_target_of_a_source_occurs_once_per_epoch():
    inputs, targets = windows(make(), 400)
    for source, size in enumerate(SIZES):
        own = targets[sources_of(inputs) == source]
        n_windows = -(-(size - 1) // T)
        for epoch in own.split(n_windows)[: len(own) // n_windows]:
            found = epoch[epoch != IGNORE] - 1000 * source
            assert sorted(found.tolist()) == list(range(1, size))


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 137, 399])
def test_windows_depend_on_the_counter_alone(start):
    """Whatever the loader yielded before, and in which batches."""
    expected = windows(make(), 460)
    fresh, used = make(batch_size=7), make(batch_size=3)
    windows(used, 200)
    for loader in (fresh, used):
        loader.load_state_dict({"consumed": start})
        found = windows(loader, 60)
        assert loader.state_dict()["consumed"] >= start + 60
        assert all(torch.equal(a, b[start : start + 60]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 12, 23])
def test_ranks_share_the_sequence_of_one(world_size):
    expected = windows(make(), 12 * world_size)
    for rank in range(world_size):
        found = windows(make(batch_size=3, rank=rank, world_size=world_size), 12)
        assert all(torch.equal(a, b[rank::world_size]) for a, b in zip(found, expected, strict=True))


def test_a_pass_has_complete_steps():
    assert len(make()) == 25 + 8 + 2
    assert len(make(batch_size=3, accumulate=2)) == 10
    assert len(make(batch_size=3, accumulate=2, world_size=2)) == 4
    assert len(make(batch_size=50, accumulate=2)) == 2


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_that_lie_on_a_device_give_the_same_batches(dtype):
    ids = [np.random.default_rng(s).integers(0, 2**16, size).astype(dtype) for s, size in enumerate(SIZES)]
    ids[1][[0, 29]] = np.iinfo(np.uint16).max if dtype == "uint16" else 100_000
    for rank in range(2):
        place = {"batch_size": 7, "rank": rank, "world_size": 2}
        found = windows(make(tokens=[on_device(text, "cpu") for text in ids], **place), 210)
        expected = windows(make(tokens=ids, **place), 210)
        assert all(torch.equal(a, b) and a.dtype == torch.int64 for a, b in zip(found, expected, strict=True))


def test_a_source_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="the training part has 4 tokens, a window needs context_length \\+ 1 = 5"):
        make(tokens=[*tokens()[:2], np.arange(4)])
