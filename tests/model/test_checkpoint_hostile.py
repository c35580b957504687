"""Hostile checkpoints: each is refused in one line, at once, and without taking memory.

Most of them have valid checksums, which anyone can compute: those of a file that somebody else wrote prove nothing.
"""

import contextlib
import io
import os
import pickle
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused
from tests.model.generation.test_language_model import characters
from tests.model.test_checkpoint import change_config, change_entry, change_state, language_model, refused
from tril.model.checkpoint import load, save, write
from tril.scripts.sample import main as sample

SECONDS, MEGABYTES = 5, 500  # limits of time and of additional memory


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("hostile") / "a.ckpt"
    save(path, language_model())
    return path


class Call:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@contextlib.contextmanager
def limits():
    """The block takes a few seconds, and what would take much memory fails in it."""
    started = time.perf_counter()
    if sys.platform != "linux":
        yield
    else:
        import resource

        before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 10**6, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.perf_counter() - started < SECONDS


def assert_one_line(path, message):
    """`load` and scripts/sample.py refuse the file."""
    with limits():
        with pytest.raises(ValueError, match=message) as error:
            load(path)
        done = call(sample, f"ckpt={path}", "device=cpu", cwd=path.parent)
    text = str(error.value)
    assert str(path) in text and text.isprintable() and len(text) <= 610
    assert "weights_only" not in text and "weights only" not in text.lower() and "allocate" not in text
    assert_refused(done, text[:200])


def change_blocks(content):
    """Sizes of the first block say nothing about those of a thousand others, which the file does not have."""
    state = content["state_dict"]
    for i in range(2, 1000):
        state[f"model.blocks.{i}.norm1.weight"] = torch.zeros(1)
    content["tril"]["config"]["n_layers"] = 1000


LIES = [
    (change_config(vocab_size=10**11), "its config has vocab_size=100000000000, and its tensors have 257"),
    (change_config(n_layers=10**7), "its config has n_layers=10000000, and its tensors have 2"),
    (change_config(dim=10**10 + 1), "its config has dim=10000000001, and its tensors have 32"),
    (change_config(context_length=10**12), "its config has context_length=1000000000000, and the limit is 33554432"),
    (change_config(context_length=10**12, pos="none"), "has context_length=1000000000000"),
    (change_config(context_length=10**12, pos="alibi"), "has context_length=1000000000000"),
    (change_config(context_length=10**7, pos="learned"), "model.pos_embed.weight is missing"),
    (change_config(n_heads=10**9, head_dim=1, n_kv_heads=1, pos="alibi"), "its config has n_heads=1000000000 with 1"),
    (
        change_config(head_dim=2**40),
        "its config has n_heads=4 with 1099511627776 elements each, and its tensors have 32",
    ),
    (change_config(mlp_hidden=10**15), "model.mlp_hidden=1000000000000000 must be less than"),
    (
        change_config(mlp_hidden=10**30),
        "its config has mlp_hidden=1000000000000000000000000000000, which exceeds 64 bits",
    ),
    (change_config(mlp_hidden=2**63 - 1), "model.mlp_hidden=9223372036854775807 must be less than"),
    (change_config(mlp_ratio=1e307), "model.mlp_ratio=1e.307 must be less than"),
    (change_config(mlp_ratio=1.7e308), "model.mlp_ratio=1.7e.308 must be less than"),
    (change_config(window=10**30), "its config has window=1000000000000000000000000000000, which exceeds 64 bits"),
    (change_config(n_kv_heads=2), r"model.blocks.0.attn.k_proj.weight has shape \(32, 32\), and needs \(16, 32\)"),
    (change_blocks, "model.blocks.2.attn.q_proj.weight is missing; .* more"),
    (change_config(**{"vocab\n_size": 1}), "its config has the unknown vocab _size"),
    (change_state(model__embed__weight=None), "model.embed.weight is missing or no matrix"),
    (change_state(model__embed__weight=torch.zeros(3)), "model.embed.weight is missing or no matrix"),
    (change_state(model__embed__weight="text"), "model.embed.weight is missing or no matrix"),
    (change_state(model__blocks__0__attn__q_proj__weight=torch.zeros(())), "its tensors have 0 elements"),
    (change_state(**{"model__\n\x1b[31m\u202e": torch.ones(1)}), r"model. \[31m does not belong"),
    (lambda content: content["state_dict"].update({3: torch.ones(1)}), "3 does not belong to the model"),
    (change_state(**{f"model__{i}" * 100: torch.ones(1) for i in range(9)}), " ... "),
    (change_state(model__norm__weight=torch.ones(32, dtype=torch.int64)), "weight is torch.int64, and must be a float"),
    (change_state(model__norm__weight=torch.ones(32) > 0), "model.norm.weight is torch.bool"),
    (change_state(model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn)), "weight is torch.float8_e4m3fn"),
    (change_entry(format=3), "has format 3; this version of Tril reads 1 to 2; use the version that wrote it"),
    (change_entry(format="\n" * 1000), "has format ;"),
    (change_entry(config=[1]), "has no config in its tril entry"),
    (change_entry(eot=3), "has no eot in its tril entry"),
    (change_entry(eot="\ud800\n"), r"can't encode character '\\ud800'"),
]


@pytest.mark.parametrize("change, message", LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_lies_are_refused(change, message, original, tmp_path):
    content = torch.load(original, weights_only=True)
    change(content)
    write(tmp_path / "a.ckpt", content)
    assert_one_line(tmp_path / "a.ckpt", message)


def tensor_cases():
    weight = torch.ones(32)
    return {
        "layout torch.sparse_coo": weight.to_sparse(),
        "layout torch.sparse_csr": torch.eye(32).to_sparse_csr(),
        "device meta": weight.to("meta"),
        "torch.complex64": weight.to(torch.complex64),
        r"strides \(0,\)": torch.ones(1).expand(32),
        r"strides \(0, 0\)": torch.ones(1).expand(10**9, 10**9),
        "torch.qint8": torch.quantize_per_tensor(weight, 1.0, 0, torch.qint8),
        "more than the": torch.ones(100_000)[:50_000].view(-1),
        "is of type TypedStorage": weight.untyped_storage(),
        "is of type set": {1},
    }


@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning", "ignore:Sparse:UserWarning")
@pytest.mark.parametrize("message", tensor_cases())
def test_tensors_that_are_not_dense_are_refused(message, original, tmp_path):
    content = torch.load(original, weights_only=True)
    value = tensor_cases()[message]
    content["state_dict"]["model.norm.weight"] = value
    if message == "more than the":  # windows of the same memory, a byte apart
        content["state_dict"] |= {f"views{i}": value.as_strided((40_000,), (1,), i) for i in range(1000)}
    torch.save(content, tmp_path / "a.ckpt")
    assert_one_line(tmp_path / "a.ckpt", f"is damaged: .*{message}")


def test_code_is_never_run(tmp_path):
    path, marker = tmp_path / "a.ckpt", tmp_path / "attacked"
    for value in (Call(os.mkdir, str(marker)), Call(os.system, f"mkdir {marker}"), Call(exec, "1")):
        for protocol in (2, 4):
            torch.save({"state_dict": {}, "tril": value}, path, pickle_protocol=protocol)
            refused(path, "is not a checkpoint, or is truncated")
            path.write_bytes(pickle.dumps({"tril": value}, protocol))  # torch.load reads such files as well
            refused(path, "is not a checkpoint, or is truncated")
    torch.save({"state_dict": {}, "tril": Call(os.mkdir, str(marker))}, path)
    assert_one_line(path, rf"it refers to {os.name}.mkdir, which no checkpoint needs")
    assert not marker.exists()


def replaced(data, name, content, compression=zipfile.ZIP_STORED):
    """The archive with another record."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for record in old.namelist():
            new.writestr(record, content if record.endswith(name) else old.read(record))
    return file.getvalue()


def pickled(change):
    """A file whose pickle is changed, as bytes."""

    def make(data):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            code = archive.read("archive/data.pkl")
        assert change(code) != code
        return replaced(data, "data.pkl", change(code))

    return make


SHAPE = b"M\x01\x01K \x86"  # (257, 32) in protocol 2
ARCHIVES = {
    "a record is compressed": lambda data: replaced(data, "data.pkl", bytes(50_000_000), zipfile.ZIP_DEFLATED),
    "torage": pickled(lambda code: code.replace(SHAPE, b"J\xff\xff\xff\x7fK \x86")),
    # The message of torch begins with advice to allow code, and is left out.
    r"is not a checkpoint, or is truncated; restore": pickled(lambda code: b"\x80\x02\xff."),
    "has no state_dict and tril entries": pickled(lambda code: b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
    "more than 100 levels": pickled(lambda code: b"\x80\x02}X\x04\0\0\0tril" + b"]" * 100_000 + b"a" * 99_999 + b"s."),
    "is not a checkpoint, or is truncated": pickled(
        lambda code: b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + b"\xff" * 5 + b"\x7f\x85R."
    ),
}


@pytest.mark.parametrize("message", ARCHIVES)
def test_archives_that_lie_about_sizes(message, original, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(ARCHIVES[message](original.read_bytes()))
    assert_one_line(tmp_path / "a.ckpt", message)


def test_a_tokenizer_is_checked_before_it_is_built(original, tmp_path):
    content = torch.load(original, weights_only=True)
    content["tril"]["tokenizer"] = characters().to_str().replace('"a":', '"a":400000000', 1)
    write(tmp_path / "a.ckpt", content)
    assert_one_line(tmp_path / "a.ckpt", r"the tokenizer's 400000000\d+ tokens exceed the model's vocab_size=257")
