"""Windows against literal arrays; every target exactly once, resumable, the same for any number of ranks."""

import numpy as np
import pytest
import torch

from tril.data import batches as windows
from tril.data.batches import IGNORE, TrainWindows, ValWindows, gather, on_device


def tokens(n):
    """Token i is 100 + i, so that a target tells where it stands."""
    return (100 + np.arange(n)).astype(np.uint16)


def counted(batches):
    """All targets that count, sorted; checks that each follows its input."""
    seen = []
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        counts = targets != IGNORE
        assert (targets - inputs)[counts].eq(1).all()
        seen += targets[counts].tolist()
    return sorted(seen)


def test_gather_literally():
    inputs, targets = gather(tokens(8), np.array([1, 2]), context_length=3)
    assert inputs.tolist() == [[103, 104, 105], [106, 100, 101]]
    assert targets.tolist() == [[104, 105, 106], [107, IGNORE, IGNORE]]
    inputs, targets = gather(tokens(8), np.array([0, 2]), context_length=3, offset=5)
    assert inputs.tolist() == [[105, 106, 100], [104, 105, 106]]
    assert targets.tolist() == [[106, 107, 101], [105, IGNORE, IGNORE]]


def test_gather_keeps_large_ids():
    inputs, targets = gather(np.array([65535, 70000, 3], dtype=np.uint32), np.array([0]), context_length=2)
    assert (inputs.tolist(), targets.tolist()) == ([[65535, 70000]], [[70000, 3]])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("batch_size", [3, 20])
def test_tokens_that_lie_on_a_device_give_the_same_batches(monkeypatch, dtype, world_size, batch_size):
    """Over several epochs, from any place on, with ids up to the largest; copied in several pieces."""
    monkeypatch.setattr(windows, "COPY_TOKENS", 30)
    ids = np.random.default_rng(0).integers(0, 2**16, 101).astype(dtype)
    ids[[0, 50, 100]] = np.iinfo(np.uint16).max if dtype == "uint16" else 100_000
    resident = on_device(ids, "cpu")
    assert resident.element_size() == ids.itemsize
    for rank in range(world_size):
        place = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        pairs = [
            [kind(tokens, 7, **place, **more) for tokens in (ids, resident)]
            for kind, more in ((TrainWindows, {"seed": 4}), (ValWindows, {}))
        ]
        for loader in pairs[0]:
            loader.load_state_dict({"consumed": 3})
        for on_host, there in pairs:
            for _ in range(3):
                for ours, theirs in zip(on_host, there, strict=True):
                    assert all(torch.equal(a, b) and b.dtype == torch.int64 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("n_tokens", "context_length"), [(13, 4), (14, 4), (12, 4), (5, 4), (101, 7), (9, 1)])
def test_training_epoch_covers_every_target_once(n_tokens, context_length):
    loader = TrainWindows(tokens(n_tokens), context_length, batch_size=1, seed=3)
    assert len(loader) == -(-(n_tokens - 1) // context_length)
    for _ in range(3):
        assert counted(loader) == list(range(101, 100 + n_tokens))


def test_batches_run_on_across_epochs():
    """7 windows, batches of 2: three and a half batches an epoch, so seven batches are exactly two epochs."""
    loader = TrainWindows(tokens(29), 4, batch_size=2, seed=0)
    assert len(loader) == 3
    batches = [batch for _ in range(3) for batch in loader]
    assert all(inputs.shape == (2, 4) for inputs, _ in batches)
    assert counted(batches[:7]) == sorted(2 * list(range(101, 129)))


def test_a_batch_larger_than_the_epoch():
    loader = TrainWindows(tokens(9), 4, batch_size=6, seed=0)
    assert len(loader) == 1
    assert counted(loader) == sorted(3 * list(range(101, 109)))


@pytest.mark.parametrize(("accumulate", "length"), [(1, 5), (2, 4), (3, 3), (5, 5), (6, 6), (8, 8)])
def test_a_pass_has_complete_steps_and_loses_no_window(accumulate, length):
    """11 windows an epoch in batches of 2; the batches are those without accumulation."""
    loader, plain = TrainWindows(tokens(45), 4, 2, 0, accumulate=accumulate), TrainWindows(tokens(45), 4, 2, 0)
    assert len(loader) == length and length % accumulate == 0
    batches = [inputs for _ in range(6) for inputs, _ in loader]
    expected = [inputs for _ in range(10) for inputs, _ in plain][: len(batches)]
    assert len(batches) == 6 * length and torch.equal(torch.cat(batches), torch.cat(expected))


def test_ranks_share_the_complete_steps():
    ranks = [TrainWindows(tokens(103), 4, 2, 0, rank, world_size=3, accumulate=2) for rank in range(3)]
    assert [len(loader) for loader in ranks] == [4] * 3  # 26 windows, 12 per step


def order(seed, epochs=1):
    loader = TrainWindows(tokens(200), 4, batch_size=5, seed=seed)
    return torch.cat([inputs for _ in range(epochs) for inputs, _ in loader])


def test_order_depends_on_the_seed_alone():
    assert torch.equal(order(0), order(0))
    assert not torch.equal(order(0), order(1))
    first, second = order(0, epochs=2)[:, 0].split(50)
    assert set(first.tolist()) != set(second.tolist())  # the windows themselves move
    steps = (first.diff() % 199).tolist()
    assert steps.count(4) < 10  # and they are not handed out one after another


def test_resuming_continues_where_it_stopped():
    uninterrupted = TrainWindows(tokens(100), 4, batch_size=3, seed=5)
    expected = [inputs for _ in range(4) for inputs, _ in uninterrupted]
    for stop in (0, 1, 5, len(uninterrupted), 17):
        loader = TrainWindows(tokens(100), 4, batch_size=3, seed=5)
        while loader.consumed < stop * 3:
            next(iter(loader))
        state = loader.state_dict()
        assert state == {"consumed": stop * 3}
        resumed = TrainWindows(tokens(100), 4, batch_size=3, seed=5)
        resumed.load_state_dict(state)
        batches = [inputs for inputs, _ in resumed]
        assert torch.equal(torch.cat(batches), torch.cat(expected[stop : stop + len(resumed)]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("n_tokens", [103, 122, 481])
def test_a_step_has_the_same_windows_for_any_number_of_ranks(n_tokens, accumulate, world_size):
    """Of a global batch of 60 windows, rank r has r, r + W, ..."""
    size = 60
    one = TrainWindows(tokens(n_tokens), 4, size, 2, accumulate=accumulate)
    ranks = [
        TrainWindows(tokens(n_tokens), 4, size // world_size, 2, rank, world_size, accumulate)
        for rank in range(world_size)
    ]
    for _ in range(3):  # passes, over the ends of epochs
        batches, shares = list(one), [list(loader) for loader in ranks]
        assert len(batches) % accumulate == 0 and {len(share) for share in shares} == {len(batches)}
        for i, batch in enumerate(batches):
            for rank, share in enumerate(shares):
                assert all(
                    torch.equal(part, whole[rank::world_size]) for part, whole in zip(share[i], batch, strict=True)
                )
        assert {loader.consumed for loader in ranks} == {one.consumed}  # so that any number of ranks can resume


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("n_tokens", [29, 101, 102, 121])
def test_every_target_is_used_once_per_epoch_over_all_ranks(n_tokens, batch_size, world_size):
    """n epochs of n windows in batches of W * B: n * W * B windows are n batches per window of an epoch."""
    loaders = [TrainWindows(tokens(n_tokens), 4, batch_size, 3, rank, world_size) for rank in range(world_size)]
    n_windows, per_step = -(-(n_tokens - 1) // 4), batch_size * world_size
    batches = []
    while len(batches) < n_windows * world_size:  # n_windows steps of all ranks: per_step epochs
        batches += [batch for step in zip(*loaders, strict=True) for batch in step]
    first = batches[: n_windows * world_size]
    assert counted(first) == sorted(per_step * list(range(101, 100 + n_tokens)))
    whole = n_windows // per_step * world_size  # batches of the complete steps of the first epoch
    seen = counted(first[:whole])
    assert len(seen) == len(set(seen)) and len(seen) >= n_tokens - 1 - 4 * per_step


def test_validation_literally():
    batches = list(ValWindows(tokens(12), context_length=3, batch_size=3))
    assert len(batches) == 2
    assert batches[0][0].tolist() == [[100, 101, 102], [103, 104, 105], [106, 107, 108]]
    assert batches[0][1].tolist() == [[101, 102, 103], [104, 105, 106], [107, 108, 109]]
    assert batches[1][0][0, :2].tolist() == [109, 110]
    assert batches[1][1].tolist() == [[110, 111, IGNORE], [IGNORE] * 3, [IGNORE] * 3]


@pytest.mark.parametrize("n_tokens", [2, 4, 5, 12, 13, 14, 50])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_counts_every_target_once(n_tokens, world_size):
    loaders = [
        ValWindows(tokens(n_tokens), 4, batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    passes = [list(loader) for loader in loaders]
    assert {len(batches) for batches in passes} == {len(loaders[0])}
    assert all(inputs.shape == (2, 4) for batches in passes for inputs, _ in batches)
    assert counted(batch for batches in passes for batch in batches) == list(range(101, 100 + n_tokens))


def test_too_little_text():
    with pytest.raises(
        ValueError, match="has 4 tokens, a window needs context_length \\+ 1 = 5; give more text or lower"
    ):
        TrainWindows(tokens(4), 4, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="validation part has 1 tokens, at least 2"):
        ValWindows(tokens(1), 4, batch_size=1)
