"""Checkpoints: what is loaded computes the same, and no file that is damaged or that lies is used.

python -m pytest -n0 tests/model/test_checkpoint.py
"""

import io
import json
import os
import pickle
import re
import resource
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import byte_model
from tril.model.checkpoint import Checkpoint, read_state, save, verdict, write_state
from tril.model.runs import load

PARTS = {
    "pos": ["rope", "learned", "alibi", "none"],
    "norm": ["rmsnorm", "layernorm"],
    "bias": [True, False],
    "mlp": ["relu2", "swiglu"],
    "tie_embeddings": [True, False],
    "n_kv_heads": [None, 2],
}


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    """A copy of a checkpoint of a run: of step 8, certified at this step, with 300 tokens and a width of 32."""
    (tmp_path / "run").mkdir()
    return Path(shutil.copy(trained / "checkpoints" / "last.ckpt", tmp_path / "run" / "some.ckpt"))


def rewrite(path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    write_state(path, content)


def text_of(content) -> str:
    """All of it, with tensors as lists."""
    return json.dumps(content, default=torch.Tensor.tolist)


@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in PARTS.items()}))
def test_what_is_loaded_computes_the_same(tmp_path, parts):
    lm, ids, path = byte_model(**parts), torch.randint(257, (2, 12)), tmp_path / "a.ckpt"
    save(path, lm)
    random_state = torch.get_rng_state()
    loaded = load(path)
    assert torch.equal(torch.get_rng_state(), random_state)
    path.write_bytes(bytes(path.stat().st_size))  # the model no longer needs its file
    assert loaded.config == lm.config and loaded.eot == lm.eot and loaded.tokenizer.to_str() == lm.tokenizer.to_str()
    assert torch.equal(loaded.model(ids), lm.model(ids))
    assert not any(module.training for module in loaded.model.modules())
    assert all(p.requires_grad and p.is_leaf for p in loaded.model.parameters())
    assert loaded.model.n_parameters() == lm.model.n_parameters()  # a tied head is still tied


def test_a_file_has_plain_values_only_and_can_be_written_again(saved):
    before, stored = text_of(read_state(saved)), Checkpoint.read(saved)
    for training in (True, False):
        write_state(saved, read_state(saved, training=training))
        assert text_of(read_state(saved)) == before
    assert json.loads(before)["tril"] == stored.entry() and (stored.step, stored.path) == (8, saved)
    stored.write(saved)
    assert torch.load(saved, weights_only=True).keys() == {"state_dict", "global_step", "tril"}
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="UnpicklingError"):  # what could not be read is not written
        rewrite(saved, lambda content: content.update(score=torch.tensor(1.0).numpy()[()]))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_weights_of_another_precision_are_converted(saved):
    rewrite(saved, lambda c: c.update(state_dict={name: x.bfloat16() for name, x in c["state_dict"].items()}))
    expected = torch.load(saved, weights_only=True)["state_dict"]
    for name, tensor in load(saved).model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[f"model.{name}"].float())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: None, "passed at step 8; belongs"),
        (lambda content: content["tril"]["certificate"].update(passed=False), "FAILED at step 8; belongs"),
        (lambda content: content["tril"].update(code="0"), "passed at step 8; does not belong"),
        (lambda content: content.update(global_step=5), "passed at step 8; does not belong"),
        (lambda content: content["tril"]["certificate"].update(certified_at_step=None), "random weights; does not"),
        (lambda content: content["tril"]["certificate"].update(passed="yes"), "none"),
    ],
)
def test_a_certificate_belongs_to_the_step_and_the_code_that_it_tested(change, text, saved):
    rewrite(saved, change)
    assert text in verdict(Checkpoint.read(saved))


DAMAGE = {  # what happens to the bytes of a file
    "a bit of a tensor": lambda data: flipped(data, len(data) // 2),
    "a bit of the structure": lambda data: flipped(data, data.index(b"data.pkl") + 200),
    "the table of contents": lambda data: flipped(data, data.rindex(b"PK\x01\x02") + 30),
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "more than its bytes": lambda data: with_record(data, "last/data/zeros", 10**8),
    "a pickle": lambda data: pickle.dumps({"state_dict": {}, "tril": {}}),
}


def with_record(data: bytes, name: str, size: int) -> bytes:
    """An archive with one more record, of zeros, which take no space."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(size))
    return file.getvalue()


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_in_one_line_that_does_not_advise_to_run_code(damage, saved):
    saved.write_bytes(DAMAGE[damage](saved.read_bytes()))
    for function in (read_state, load):
        with pytest.raises(ValueError, match=re.escape(str(saved))) as error:
            function(saved)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


def config(**values):
    return lambda content: content["tril"]["config"].update(values)


def weight(name, tensor):
    return lambda content: content["state_dict"].update({f"model.{name}": tensor})


def shared(depth: int, kind: type):
    """2^depth values in less than a kilobyte."""
    value = kind([1])
    for _ in range(depth):
        value = kind([value, value])
    return value


def large_id(content):
    content["tril"]["tokenizer"] = content["tril"]["tokenizer"].replace('"a":', '"a":4000000', 1)


LIES = [  # what a file says that is not so, and what the error names
    (config(vocab_size=10**9), "embed.weight"),
    (config(**{"vocab\n_size": 1}), "vocab _size"),
    (lambda content: content["tril"]["config"].pop("key_offset"), "model.key_offset"),
    (weight("norm.weight", torch.ones(32).long()), "norm.weight"),
    (weight("norm.weight", torch.ones(1).expand(10**9, 10**9)), "norm.weight"),
    (lambda content: content["tril"].update(eot=3, certificate=True), "eot=3 .*certificate=true"),
    (lambda content: content["tril"].pop("tokenizer"), "tokenizer"),
    (large_id, "vocab_size=300"),
    (lambda content: content.pop("tril"), "state_dict and tril"),
    (config(dim=shared(60, list)), "some.ckpt"),
    (lambda content: content["state_dict"].update({shared(22, tuple): 1}), "some.ckpt"),
]


@pytest.mark.parametrize(("change", "named"), LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_lies_are_refused_before_memory_is_taken(change, named, saved):
    before, content = resource.getrlimit(resource.RLIMIT_AS), torch.load(saved, weights_only=True)
    change(content)
    torch.save(content, saved)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 10**6, before[1]))
    try:
        with pytest.raises(ValueError, match=named) as error:
            load(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    text = str(error.value)
    assert str(saved) in text and text.isprintable() and len(text) <= 610
    assert "weights only" not in text.lower() and "allocate" not in text
