"""The batches of training and validation, against their definition written as a loop over one window at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tril.data import datamodule
from tril.data.batches import IGNORE, TrainWindows, ValWindows, on_device
from tril.data.datamodule import TextDataModule
from tril.data.sources import parse

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
        loader = TrainWindows(text if rank else on_device(text, "cpu"), *arguments)
        loader.load_state_dict({"consumed": start})
        for i, (inputs, targets) in zip(range(30), loader, strict=False):
            rows = [window(text, length, seed, start + (i * size + j) * world + rank) for j in range(size)]
            assert inputs.tolist() == [row[0] for row in rows] and targets.tolist() == [row[1] for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_validation_of_all_ranks_has_each_window_once_in_batches_of_one_shape(seed):
    """Windows that fill up the last batches have no targets."""
    random = np.random.default_rng(seed)
    length, size, world = (int(random.integers(*limits)) for limits in ((2, 20), (1, 7), (1, 4)))
    ids = np.arange(int(random.integers(length + 1, 300)), dtype=np.uint16)
    ranks = [list(ValWindows(ids, length, size, rank, world)) for rank in range(world)]
    assert {batch[0].shape for batches in ranks for batch in batches} == {(size, length)}
    parts = zip(*(map(torch.cat, zip(*batches, strict=True)) for batches in ranks), strict=True)
    inputs, targets = (torch.stack(part, 1).flatten(0, 1) for part in parts)  # (windows, length), in order
    is_target = targets != IGNORE
    assert targets[is_target].tolist() == ids[1:].tolist() and inputs[is_target].tolist() == ids[:-1].tolist()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_pass_has_complete_steps_and_the_next_one_goes_on(accumulate):
    """So that Lightning, which ends a step with the pass, never makes a smaller one."""
    text = np.arange(150, dtype=np.uint16)
    loader, resumed = (TrainWindows(text, 4, 2, 0, 1, 2, accumulate) for _ in range(2))
    assert loader.n_windows == 38 and len(loader) == 38 // (2 * 2 * accumulate) * accumulate
    twice = [inputs for _ in range(2) for inputs, _ in loader]
    assert len(twice) == 2 * len(loader) and loader.state_dict() == {"consumed": len(twice) * 4}
    resumed.load_state_dict({"consumed": len(loader) * 4})
    assert all(map(torch.equal, twice[len(loader) :], (inputs for inputs, _ in resumed)))
    assert len(TrainWindows(text[:50], 16, 100, 0, accumulate=accumulate)) == accumulate  # more than the text has


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


@pytest.fixture
def make_data(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(40)))
    text = {"source": "files", "path": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path), "val_fraction": 0.1}

    def make(context_length=16, *, device="cpu", **settings):
        source = parse(text | {"tokenizer": {"kind": "byte"}} | settings)
        data = TextDataModule(source, context_length=context_length)
        trainer = {"global_rank": 0, "world_size": 1, "accumulate_grad_batches": 1, "max_steps": 10}
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), **trainer)
        return data

    return make


@pytest.mark.parametrize(("free", "device"), [(8, "meta"), (7, "cpu")])
def test_tokens_move_to_a_gpu_where_they_fit(make_data, monkeypatch, free, device):
    """The GPU has `free` times the memory of the training part. The meta device replaces it."""
    data = make_data(device="cuda:0")
    n_bytes = data.text.tokens("train").nbytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * n_bytes, 1 << 40))
    monkeypatch.setattr(datamodule, "on_device", lambda tokens, device: on_device(tokens, "meta"))
    assert [part.device.type for part in next(iter(data.train_dataloader()))] == [device] * 2


DOUBLED = [  # context_length, settings, and the length of the windows in each of ten steps
    (512, {}, [128] * 3 + [256] * 4 + [512] * 3),
    (512, {"double_length_at": [0.5]}, [256] * 5 + [512] * 5),
    (256, {}, [128] * 7 + [256] * 3),
    (300, {}, [150] * 7 + [300] * 3),
    (301, {}, [301] * 10),  # half of it is not whole
    (254, {}, [254] * 10),  # half of it is too short
]


@pytest.mark.parametrize(("context_length", "settings", "lengths"), DOUBLED)
def test_windows_double_in_length_at_fractions_of_the_steps(make_data, context_length, settings, lengths):
    data = make_data(context_length, batch_size=100, **settings)  # more windows than the text has
    assert [data.length_at(step) for step in range(10)] == lengths
    rows = 100 * context_length // lengths[0]
    assert next(iter(data.train_dataloader()))[0].shape == (rows, lengths[0])
    data.trainer.max_steps = 20
    assert [data.length_at(step) for step in range(20)] == [each for each in lengths for _ in range(2)]
    shapes = {name: next(iter(part))[0].shape for name, part in data.windows_of(torch.arange(600)).items()}
    assert {shape[1] for shape in shapes.values()} == {*lengths} and shapes["val"] == (100, context_length)


def test_the_first_validation_windows_are_those_of_the_text_in_every_process(make_data):
    data = make_data()
    data.trainer.global_rank, data.trainer.world_size = 1, 2
    inputs, targets = data.first_val_windows(3)
    tokens = data.text.tokens("val")[:49].tolist()
    assert (inputs.flatten().tolist(), targets.flatten().tolist()) == (tokens[:-1], tokens[1:])
