"""Damaged and hostile checkpoints: none is used, none runs code or takes memory, and the message is one line."""

import contextlib
import io
import os
import resource
import shutil
import time
import zipfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from tests.model.damage import KINDS
from tests.model.generation.test_language_model import characters
from tests.model.test_checkpoint import language_model
from tril.model.checkpoint import Checkpoint, DamagedCheckpoint, load, read_state, save, write_state

N_DAMAGED = 200


def training_content() -> dict:
    """What Lightning saves: weights, optimizer, schedule, progress and random states."""
    lm = language_model()
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-3)
    lm.model(torch.arange(12)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    checkpoint = Checkpoint(lm.config, {}, lm.tokenizer.to_str(), lm.eot, data={"name": "test"})
    return {
        "epoch": 1,
        "global_step": 10,
        "state_dict": {f"model.{name}": tensor for name, tensor in lm.model.state_dict().items()},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1, "completed": 0}}}},
        "callbacks": {"Checkpoint": {"best_model_score": torch.tensor(2.5), "dirpath": "/runs/1"}},
        "optimizer_states": [optimizer.state_dict()],
        "random_states": {"cpu": torch.get_rng_state()},
        "tril": checkpoint.entry(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint file that no test changes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole") / "last.ckpt"
    write_state(path, training_content())
    return path


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def sampled(path: Path) -> list:
    """All that sampling uses."""
    lm = load(path)
    return [dict(lm.model.state_dict()), lm.config.to_dict(), lm.tokenizer.to_str(), lm.eot]


def outcome(function, path: Path, expected) -> str:
    """refused, harmless, or accepted with other values."""
    try:
        found = function(path)
    except (ValueError, OSError) as error:
        text = str(error)
        assert str(path) in text and "\n" not in text and "weights_only" not in text, text
        return "refused"
    return "harmless" if same(found, expected) else "WRONG"


@pytest.mark.parametrize("function", [read_state, sampled])
def test_no_damaged_copy_is_used(function, whole, tmp_path):
    """Bit flips, truncations, zeroed and swapped pages, and edits of values in a whole archive."""
    data, expected, counts = whole.read_bytes(), function(whole), Counter()
    for i in range(N_DAMAGED):
        damaged = KINDS[i % len(KINDS)](data, Random(i))
        assert damaged != data  # the damage is real
        (tmp_path / f"{i}.ckpt").write_bytes(damaged)  # a new file, since the one before may be mapped
        counts[outcome(function, tmp_path / f"{i}.ckpt", expected)] += 1
        (tmp_path / f"{i}.ckpt").unlink()
    assert counts["WRONG"] == 0 and counts.total() == N_DAMAGED
    # Most damage matters; sampling does not need the optimizer, and a few bytes of an archive mean nothing.
    assert counts["refused"] > (0.9 if function is read_state else 0.5) * N_DAMAGED


def test_what_was_written_is_read_and_can_be_written_again(whole, tmp_path):
    torch.manual_seed(0)
    content = training_content()
    assert same(read_state(whole), content)
    for mmap in (True, False):
        write_state(tmp_path / "a.ckpt", read_state(whole, mmap=mmap))
        assert same(read_state(tmp_path / "a.ckpt"), content)
    resumed = read_state(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt").write_bytes(bytes(1000))  # tensors in memory do not need the file
    assert same(resumed, content)


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


@contextlib.contextmanager
def limits():
    """The block takes a few seconds, and what would take much memory fails in it."""
    started, before = time.perf_counter(), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 10**6, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.perf_counter() - started < 5


def assert_one_line(path: Path, message: str) -> None:
    with limits(), pytest.raises(ValueError, match=message) as error:
        load(path)
    text = str(error.value)
    assert str(path) in text and text.isprintable() and len(text) <= 610
    assert "weights only" not in text.lower() and "allocate" not in text


def config(**values):
    return lambda content: content["tril"]["config"].update(values)


def entry(**values):
    return lambda content: content["tril"].update(values)


def state(**values):
    return lambda content: content["state_dict"].update({f"model.{key}": value for key, value in values.items()})


def many_blocks(content) -> None:
    for i in range(2, 1000):
        content["state_dict"][f"model.blocks.{i}.norm1.weight"] = torch.zeros(1)
    content["tril"]["config"]["n_layers"] = 1000


SIZES = r"its tensors have [\d,]+ elements, and its config has [\d,]+ parameters; it is damaged"
LIES = [  # with right digests, which anyone can compute
    (config(vocab_size=10**11), SIZES),
    (config(vocab_size=None), "its config no vocab_size"),
    (config(n_layers=10**4), SIZES),
    (config(dim=10**10), SIZES),
    (config(mlp_hidden=10**12), SIZES),
    (config(context_length=10**7, pos="learned"), SIZES),
    (config(context_length=10**12), "model.context_length=1000000000000 must be at most 33554432"),
    (config(context_length=10**12, pos="none"), "model.context_length=1000000000000 must be at most"),
    (config(n_heads=10**9, head_dim=2, n_kv_heads=1), SIZES),
    (config(window=10**30), "model.window=1000000000000000000000000000000 must be less than"),
    (config(n_heads=5), "model.n_heads=5 must divide model.dim=32"),
    (config(depth=2), "model.depth is unknown"),
    (config(**{"vocab\n_size": 1}), "model.vocab _size is unknown"),
    (lambda content: content["tril"]["config"].update({3: 1}), "keywords must be strings"),
    (many_blocks, SIZES),
    (lambda content: content["state_dict"].pop("model.norm.weight"), SIZES),
    (state(extra=torch.zeros(0)), r"model.extra has the shape \(0,\), and needs None"),
    (state(**{"norm.weight": torch.ones(4, 8)}), r"model.norm.weight has the shape \(4, 8\), and needs \(32,\)"),
    (state(**{"norm.weight": torch.ones(32).long()}), "norm.weight is no floating-point tensor"),
    (state(**{"norm.weight": "text"}), "norm.weight is no floating-point tensor"),
    (state(**{"\n\x1b[31m\u202e": 1}), r" \[31m is no floating-point tensor"),
    (entry(config=[1]), "has no config in its tril entry"),
    (entry(eot=3, causality=True), "has no eot, causality in its tril entry"),
    (lambda content: content["tril"].pop("tokenizer"), "has no tokenizer in its tril entry"),
    (entry(eot="</s>"), "the tokenizer has no token '</s>'"),
    (entry(tokenizer=characters().to_str().replace('"a":', '"a":400000000', 1)), "exceed the model's vocab_size=257"),
    (lambda content: content.pop("tril"), "has no state_dict and tril entries; use a .ckpt file that train.py wrote"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "a.ckpt"
    save(path, language_model())
    return path


@pytest.mark.parametrize("change, message", LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_lies_are_refused_before_memory_is_taken(change, message, original, tmp_path):
    content = torch.load(original, weights_only=True)
    change(content)
    write_state(tmp_path / "a.ckpt", content)
    assert_one_line(tmp_path / "a.ckpt", message)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "value, message",
    [
        (torch.ones(32).to_sparse(), "torch.sparse_coo that is not dense"),
        (torch.ones(32).to("meta"), "not dense"),
        (torch.ones(32).to(torch.complex64), "torch.complex64 and torch.strided that is not dense and real"),
        (torch.ones(1).expand(10**9, 10**9), r"bytes, more than the \d+ of the file"),
        (torch.ones(32).untyped_storage(), "it has a TypedStorage, and must have plain values"),
        ({1}, "it has a set, and must have plain values"),
    ],
    ids=str,
)
def test_what_is_not_plain_is_refused(value, message, original, tmp_path):
    content = torch.load(original, weights_only=True)
    content["state_dict"]["model.norm.weight"] = value
    torch.save(content, tmp_path / "a.ckpt")
    assert_one_line(tmp_path / "a.ckpt", message)


def test_code_is_never_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    torch.save({"state_dict": {}, "tril": Attack()}, tmp_path / "a.ckpt")
    assert_one_line(tmp_path / "a.ckpt", rf"it refers to {os.name}.mkdir, which no checkpoint needs")
    assert not (tmp_path / "attacked").exists()


def with_pickle(change, compression=zipfile.ZIP_STORED):
    """The archive with another pickle."""

    def make(data: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, change(old.read(name)) if name.endswith("data.pkl") else old.read(name))
        return file.getvalue()

    return make


ARCHIVES = {
    "a record is compressed": with_pickle(lambda code: bytes(50_000_000), zipfile.ZIP_DEFLATED),
    "is not a checkpoint, or is truncated; restore": with_pickle(lambda code: b"\x80\x02\xff."),
    "has no state_dict and tril entries": with_pickle(lambda code: b"\x80\x02" + b"]" * 10**5 + b"a" * 99_999 + b"."),
    "is not a checkpoint, or is truncated": with_pickle(
        lambda code: b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + b"\xff" * 5 + b"\x7f\x85R."
    ),
}


@pytest.mark.parametrize("message", ARCHIVES)
def test_archives_that_lie_about_sizes(message, original, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(ARCHIVES[message](original.read_bytes()))
    assert_one_line(tmp_path / "a.ckpt", message)


def test_containers_that_are_nested_too_deeply(original, tmp_path):
    content = torch.load(original, weights_only=True)
    content["tril"]["data"] = nested = {}
    for _ in range(200):
        nested["a"] = nested = {}
    torch.save(content, tmp_path / "a.ckpt")
    assert_one_line(tmp_path / "a.ckpt", "its containers have more than 100 levels")
