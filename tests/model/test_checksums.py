"""Checksums of a checkpoint's content, compared with hashlib on the bytes of numpy arrays."""

import hashlib
import json
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from tril.model.checksums import checksums, split


def sha256(array):
    return hashlib.sha256(array.tobytes()).hexdigest()  # in row-major order, whatever the memory layout


def rest(content):
    return checksums(content)["rest"]


def test_a_tensor_has_the_checksum_of_its_values():
    generator = np.random.default_rng(0)
    floats = generator.normal(size=(3, 4)).astype(np.float32)
    bits = generator.integers(0, 2**16, 5).astype(np.uint16)
    content = {
        "a": {"plain": torch.from_numpy(floats), "transposed": torch.from_numpy(floats).T, 7: torch.tensor(1.5)},
        "b": [torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), torch.tensor([True, False]), torch.empty(0)],
    }
    assert checksums(content)["tensors"] == {
        "a/plain": sha256(floats),
        "a/transposed": sha256(floats.T),
        "a/7": sha256(np.float32(1.5)),
        "b/0": sha256(bits),
        "b/1": sha256(np.array([1, 0], np.uint8)),
        "b/2": sha256(np.array([])),
    }
    assert checksums(content, ["b"])["tensors"].keys() == {"b/0", "b/1", "b/2"}
    assert checksums(content, [])["rest"] == rest(content)


def test_the_rest_does_not_depend_on_the_values_of_tensors_and_survives_a_file(tmp_path):
    content = {
        "weights": OrderedDict(a=torch.zeros(2), b=torch.zeros(3)),
        "plain": [None, True, 1, -1.5, float("nan"), "é\n\ud800", b"\0", (), (1, "a"), torch.float16, torch.Size([2])],
        "again": [shared := [1], shared, {"x": shared}],
    }
    content["weights"]._metadata = OrderedDict({"": {"version": 1}})
    torch.save(content, tmp_path / "a")
    loaded = torch.load(tmp_path / "a", weights_only=True)
    assert checksums(loaded) == checksums(content)
    loaded["weights"]["a"] += 1
    assert rest(loaded) == rest(content)
    loaded["weights"]._metadata[""]["version"] = 2
    assert rest(loaded) != rest(content)


def test_the_rest_is_the_checksum_of_a_text_that_no_version_changes():
    content = {"é": [None, True, 2, 0.1, b"\0", "a\n"], 3: OrderedDict(w=torch.zeros(2, 1), n=(torch.float16, {}))}
    content["again"] = content[3]
    lines = [
        r"dict ['\xe9', 3, 'again']",
        "list 6",
        *["NoneType None", "bool True", "int 2", "float 0.1", r"bytes b'\x00'", r"str 'a\n'"],
        "OrderedDict ['w', 'n']",
        "tensor '3/w' torch.float32 (2, 1) False",
        *["tuple 2", "dtype torch.float16", "dict []"],
        "dict []",  # the attributes of the OrderedDict
        "container 2",
    ]
    assert rest(content) == hashlib.sha256("\n".join(lines).encode()).hexdigest()


CHANGES = [
    {"a": 1, "b": [1.0, "x"]},
    {"a": 2, "b": [1.0, "x"]},
    {"a": True, "b": [1.0, "x"]},
    {"a": 1.0, "b": [1.0, "x"]},
    {"a": "1", "b": [1.0, "x"]},
    {"a": 1, "b": (1.0, "x")},
    {"a": 1, "b": ["x", 1.0]},
    {"a": 1, "b": [1.0], "c": ["x"]},
    {"a": 1, "b": [1.0, ["x"]]},
    {"a": 1, "b": [1.0 + 2**-52, "x"]},
    {"a": 1, "b": [1.0, b"x"]},
    {"b": [1.0, "x"], "a": 1},
    {"a": 1, "B": [1.0, "x"]},
    OrderedDict(a=1, b=[1.0, "x"]),
    {"a": 1, "b": [1.0, torch.zeros(2, 3)]},
    {"a": 1, "b": [1.0, torch.zeros(3, 2)]},
    {"a": 1, "b": [1.0, torch.zeros(2, 3, dtype=torch.int32)]},
    {"a": 1, "b": [1.0, torch.zeros(2, 3, requires_grad=True)]},
    {"a": torch.zeros(2, 3), "b": [1.0, torch.zeros(2, 3)]},
    {"a": 1, "b": [1.0, "x\nint 1"]},
    {"a": 1, "b": [1.0, "x", 1]},
    {1: 1, "b": [1.0, "x"]},
    {"1": 1, "b": [1.0, "x"]},
]


def test_every_difference_changes_the_rest():
    assert len({rest(content) for content in CHANGES}) == len(CHANGES)
    again = [json.loads(json.dumps(content)) for content in CHANGES[:1]]
    assert rest(again[0]) == rest(CHANGES[0])


def test_shared_containers_are_hashed_once():
    """A pickle of 200 bytes stands for 2^60 lists, which recursion would visit one by one."""
    value = [1]
    for _ in range(60):
        value = [value, value]
    assert split({"a": value})[0] != split({"a": [value]})[0]
    cycle = [1]
    cycle.append(cycle)
    assert split({"a": cycle})[0] != split({"a": [1, [1]]})[0]


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: torch.ones(3).to_sparse(), "x/y is of the layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "x/y is of the layout torch.sparse_csr"),
        (lambda: torch.ones(3, device="meta"), "x/y is on the device meta"),
        (
            lambda: torch.ones(3, dtype=torch.complex64),
            "x/y is a quantized, complex or negated tensor of torch.complex64",
        ),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "negated tensor of torch.float32"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "quantized.*quint8"),
        (lambda: torch.ones(1).expand(5), r"x/y is of the strides \(0,\)"),
        (lambda: torch.ones(9).as_strided((3, 3), (1, 1)), r"x/y is of the strides \(1, 1\)"),
        (lambda: torch.ones(2).as_subclass(Subclass), "x/y is a Subclass with other content"),
        (lambda: np.float64(1), "x/y is of type float64, and must be a plain value or a tensor"),
        (lambda: {1, 2}, "x/y is of type set"),
        (lambda: Counter(), "x/y is of type Counter"),
        (lambda: torch.ones(2).untyped_storage(), "x/y is of type UntypedStorage"),
        (lambda: {(1, 2): 3}, "x/y has a key of type tuple"),
        (lambda: deep(200), "its containers have more than 100 levels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning", "ignore:Sparse:UserWarning")
def test_what_is_not_plain_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        checksums({"x": {"y": make()}})


def test_names_that_look_the_same_are_refused():
    with pytest.raises(ValueError, match="it has two tensors a/1"):
        checksums({"a": {1: torch.zeros(2), "1": torch.ones(2)}})


def test_a_limit_of_bytes_counts_shared_memory_once():
    weight = torch.zeros(100)
    tied = {"a": weight, "b": weight.detach(), "c": torch.zeros(1)}
    assert len(checksums(tied, max_bytes=404)["tensors"]) == 3
    with pytest.raises(ValueError, match="its tensors have 404 bytes, more than the 403 of the file"):
        checksums(tied, max_bytes=403)
    with pytest.raises(ValueError, match="its tensors have 796 bytes"):
        checksums({"a": weight, "b": weight[1:]}, max_bytes=400)
