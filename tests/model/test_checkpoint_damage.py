"""Damaged checkpoints: none is accepted whose tensors or other values differ, and the message says what to use."""

import os
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from tests.model.damage import BYTES, KINDS, edited, lose_checksums
from tests.model.test_checkpoint import language_model, rewrite
from tril.model.checkpoint import DamagedCheckpoint, load, payload, read, write

FIXTURE = Path(__file__).parents[1] / "fixtures" / "checkpoint_v1.ckpt"
N_DAMAGED = 200


def training_content():
    """What Lightning saves: weights, optimizer, schedule, progress and random states."""
    lm = language_model()
    weights = {f"model.{name}": tensor for name, tensor in lm.model.state_dict().items()}
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-3)
    lm.model(torch.arange(12)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": 10,
        "state_dict": weights,
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1, "completed": 0}}}},
        "callbacks": {"Checkpoint": {"best_model_score": torch.tensor(2.5), "dirpath": "/runs/1"}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 10, "_last_lr": [1e-3]}],
        "random_states": {"cpu": torch.get_rng_state()},
        "tril": payload(lm.model, lm.tokenizer, lm.eot, {"name": "test"}),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint file that no test changes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole") / "last.ckpt"
    write(path, training_content())
    return path


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def sampled(path):
    """All that sampling uses."""
    lm = load(path)
    return [dict(lm.model.state_dict()), lm.config.to_dict(), lm.tokenizer.to_str(), lm.eot]


def outcome(function, path, expected):
    """refused, harmless, or accepted with other values."""
    try:
        found = function(path)
    except (ValueError, OSError) as error:
        text = str(error)
        assert str(path) in text and "\n" not in text and "weights_only" not in text, text
        return "refused"
    return "harmless" if same(found, expected) else "WRONG"


def outcomes(source, kinds, n, path, functions):
    """How often n files with random damage were refused, harmless or accepted with other values, per function."""
    data = source.read_bytes()
    expected = {function: function(source) for function in functions}
    counts = {function.__name__: Counter() for function in functions}
    for i in range(n):
        damaged = kinds[i % len(kinds)](data, Random(i))
        path.unlink(missing_ok=True)  # a new file, since the one before may be mapped
        path.write_bytes(damaged)
        for function in functions:
            counts[function.__name__][outcome(function, path, expected[function])] += 1
    return counts


def in_memory(path):
    return read(path, mmap=False)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_damage(kind, whole, tmp_path):
    counts = outcomes(whole, [kind], 1, tmp_path / "a.ckpt", [read])
    harmless = kind.__name__ in ("flip_bit_of_pickle", "flip_bit_of_directory", "flip_bit", "repeat_tail")
    assert counts["read"]["WRONG"] == 0 and (harmless or counts["read"]["refused"] == 1)


@pytest.mark.slow
def test_200_damaged_checkpoints(whole, tmp_path):
    counts = outcomes(whole, KINDS, N_DAMAGED, tmp_path / "a.ckpt", [read, in_memory, sampled])
    print(counts)
    for count in counts.values():
        assert count["WRONG"] == 0 and sum(count.values()) == N_DAMAGED
    # The test damages what it should: most files are refused, and sampling does not need the optimizer.
    assert counts["read"]["refused"] > 0.9 * N_DAMAGED and counts["sampled"]["refused"] > 0.5 * N_DAMAGED


@pytest.mark.slow
def test_200_damaged_checkpoints_of_the_first_version(tmp_path):
    """They have no checksums of their own, but those of the zip archive."""
    counts = outcomes(FIXTURE, BYTES, N_DAMAGED, tmp_path / "a.ckpt", [sampled])
    print(counts)
    assert counts["sampled"]["WRONG"] == 0 and counts["sampled"]["refused"] > 0.9 * N_DAMAGED


def test_a_flipped_bit_of_a_checkpoint_of_the_first_version(tmp_path):
    data = bytearray(FIXTURE.read_bytes())
    data[data.index(b"data/5") + 1000] ^= 1
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: the CRC-32 of \S+/data/\d+ differs; restore it"):
        load(tmp_path / "a.ckpt")


def test_a_new_checkpoint_without_checksums_is_not_an_old_one(whole, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(edited(lose_checksums)(whole.read_bytes(), Random(0)))
    with pytest.raises(DamagedCheckpoint, match="is damaged: it has no checksums"):
        read(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.update(epoch=2), "its values other than tensors differ from their sha256"),
        (lambda content: content["checksums"].update(rest="0" * 64), "its values other than tensors differ"),
        (lambda content: content["checksums"].pop("tensors"), "it has no checksums"),
        (lambda content: content.update(checksums=[]), "it has no checksums"),
        (
            lambda content: content["state_dict"]["model.norm.weight"].mul_(-1),
            "1 tensors differ from their sha256, the first is state_dict/model.norm.weight",
        ),
        (
            lambda content: content["checksums"]["tensors"].pop("state_dict/model.norm.weight"),
            "the first is state_dict/model.norm.weight",
        ),
        (
            lambda content: content["optimizer_states"][0]["state"][3]["exp_avg"].add_(1),
            "the first is optimizer_states/0/state/3/exp_avg",
        ),
    ],
)
def test_what_differs_is_named(change, message, whole, tmp_path):
    content = torch.load(whole, weights_only=True)
    change(content)
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(DamagedCheckpoint, match=message):
        read(tmp_path / "a.ckpt")


def test_the_other_checkpoints_of_the_folder_are_offered(whole, tmp_path):
    for age, name in enumerate(["last", "previous", "best", "older", "oldest"]):
        shutil.copy(whole, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (1e9 - age, 1e9 - age))
    (tmp_path / "last.ckpt").write_bytes(whole.read_bytes()[:1000])
    os.link(tmp_path / "last.ckpt", tmp_path / "same.ckpt")  # damaged as well
    with pytest.raises(DamagedCheckpoint) as error:
        load(tmp_path / "last.ckpt")
    assert error.value.path == tmp_path / "last.ckpt"
    others = " or ".join(str(tmp_path / f"{name}.ckpt") for name in ("previous", "best", "older"))
    assert str(error.value).endswith(f"; use {others}")


def test_only_the_chosen_entries_are_verified_and_returned(whole, tmp_path):
    content = torch.load(whole, weights_only=True)
    content["optimizer_states"][0]["state"][0]["exp_avg"].add_(1)
    torch.save(content, path := tmp_path / "a.ckpt")
    chosen = read(path, entries=("state_dict", "global_step", "absent"))
    assert chosen.keys() == {"state_dict", "global_step"} and chosen["global_step"] == 10
    assert sampled(path)[0].keys() == sampled(whole)[0].keys()
    with pytest.raises(DamagedCheckpoint, match="optimizer_states"):
        read(path, entries=("optimizer_states",))
    content["epoch"] += 1
    torch.save(content, path)
    with pytest.raises(DamagedCheckpoint, match="values other than tensors"):
        read(path, entries=("state_dict",))


def test_what_was_written_is_read_and_can_be_written_again(whole, tmp_path):
    torch.manual_seed(0)
    content = training_content()
    assert same(read(whole), content) and "checksums" not in content
    for mmap in (True, False):
        write(tmp_path / "a.ckpt", read(whole, mmap=mmap))
        assert same(read(tmp_path / "a.ckpt"), content)
    rewrite(tmp_path / "a.ckpt", lambda content: content.update(epoch=5))
    assert read(tmp_path / "a.ckpt")["epoch"] == 5


def test_tensors_in_memory_do_not_need_the_file(whole, tmp_path):
    shutil.copy(whole, path := tmp_path / "a.ckpt")
    content = read(path, mmap=False)
    path.write_bytes(bytes(path.stat().st_size))
    assert same(content, read(whole))
