"""The windows of training and validation, against their definition written as a loop over one window at a time."""

import numpy as np
import pytest
import torch

from tril.data.batches import IGNORE, TrainWindows, ValWindows, on_device

SEEDS = range(8)


def window(text, length, seed, index):
    """Inputs and targets of one window of the endless sequence."""
    ids, n_targets = text.tolist(), len(text) - 1
    epoch, i = divmod(index, -(-n_targets // length))
    random = np.random.default_rng([seed, epoch])
    offset, first = random.integers(n_targets), random.permutation(-(-n_targets // length))[i] * length
    at = [((first + t + offset) % n_targets, first + t < n_targets) for t in range(length)]
    return [ids[p] for p, _ in at], [ids[p + 1] if inside else IGNORE for p, inside in at]


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_are_those_of_the_definition_for_any_start_rank_and_device(seed):
    random = np.random.default_rng(seed)
    length, size, world = (int(random.integers(*limits)) for limits in ((2, 20), (1, 7), (1, 4)))
    dtype, largest = [(np.uint16, 1 << 16), (np.uint32, 1 << 20)][seed % 2]
    text = random.integers(0, largest, int(random.integers(length + 1, 300))).astype(dtype)
    start = int(random.integers(200))
    for rank in range(world):
        arguments = length, size, seed, rank, world, int(random.integers(1, 4))
        loaders = [TrainWindows(x, *arguments) for x in (text, on_device(text, "cpu"))]
        for loader in loaders:
            loader.load_state_dict({"consumed": start})
        for i, batch, same in zip(range(30), *loaders, strict=False):
            assert all(map(torch.equal, batch, same))
            rows = [window(text, length, seed, start + (i * size + j) * world + rank) for j in range(size)]
            assert batch[0].tolist() == [row[0] for row in rows] and batch[1].tolist() == [row[1] for row in rows]
        assert loaders[0].state_dict()["consumed"] == start + (i + (len(loaders[0]) > 30)) * size * world or i < 30


@pytest.mark.parametrize("seed", SEEDS)
def test_the_validation_of_all_ranks_has_each_window_once_in_batches_of_one_shape(seed):
    """Windows that fill up the last batches have no targets."""
    random = np.random.default_rng(seed)
    length, size, world = (int(random.integers(*limits)) for limits in ((2, 20), (1, 7), (1, 4)))
    ids = np.arange(int(random.integers(length + 1, 300)), dtype=np.uint16)
    ranks = [list(ValWindows(ids, length, size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert {batch[0].shape for batches in ranks for batch in batches} == {(size, length)}
    parts = zip(*(map(torch.cat, zip(*batches, strict=True)) for batches in ranks), strict=True)
    inputs, targets = (torch.stack(part, 1).flatten(0, 1) for part in parts)  # (windows, length), in order
    is_target = targets != IGNORE
    assert targets[is_target].tolist() == ids[1:].tolist() and inputs[is_target].tolist() == ids[:-1].tolist()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_pass_has_complete_steps_and_the_next_one_goes_on(accumulate):
    """So that Lightning, which ends a step with the pass, never makes a smaller one."""
    text = np.arange(150, dtype=np.uint16)
    loader = TrainWindows(text, 4, 2, 0, 1, 2, accumulate)
    assert loader.n_windows == 38 and len(loader) == 38 // (2 * 2 * accumulate) * accumulate
    twice = [inputs for _ in range(2) for inputs, _ in loader]
    assert len(twice) == 2 * len(loader) and loader.consumed == len(twice) * 4
    loader = TrainWindows(text, 4, 2, 0, 1, 2, accumulate)
    first = [inputs for inputs, _ in loader]
    loader = TrainWindows(text, 4, 2, 0, 1, 2, accumulate)
    loader.load_state_dict({"consumed": len(first) * 4})
    assert all(map(torch.equal, twice, [*first, *(inputs for inputs, _ in loader)]))
    assert len(TrainWindows(text[:50], 16, 100, 0, accumulate=accumulate)) == accumulate  # more than the text has


def test_too_little_text():
    with pytest.raises(ValueError, match="has 8 tokens, a window needs context_length .* = 9; give more text"):
        TrainWindows(np.zeros(8), 8, 1, 0)
    with pytest.raises(ValueError, match=r"has 1 tokens, at least 2 are needed; raise data.val_fraction"):
        ValWindows(np.zeros(1), 8, 1)


def test_shorter_windows_are_the_long_ones_cut_and_continue_at_their_step():
    """Each rank counts optimizer steps, of several batches."""
    text = np.arange(200, dtype=np.uint16)
    for rank in range(2):
        arguments = text, 8, 3, 0, rank, 2, 2
        cut, whole = TrainWindows(*arguments, length_at=lambda step: 2 if step < 1 else 8), TrainWindows(*arguments)
        batches = [*zip(cut, whole, strict=True)]
        assert [len(x[0]) for x, _ in batches] == [12, 12, 3, 3]
        assert all(torch.equal(a.view(3, 8), b) for x, y in batches for a, b in zip(x, y, strict=True))
        cut.load_state_dict({"consumed": 6})
        assert [len(inputs) for inputs, _ in cut][:2] == [12, 3]
