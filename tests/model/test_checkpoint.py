"""Checkpoints: what is loaded computes the same, and no file that is damaged or that lies is used.

python -m pytest -n0 tests/model/test_checkpoint.py
"""

import io
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
    return Path(shutil.copy(trained / "checkpoints" / "last.ckpt", tmp_path / "some.ckpt"))


def rewrite(path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


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
    assert torch.equal(loaded.model(ids), lm.model(ids)) and not loaded.model.training
    assert all(p.requires_grad and p.is_leaf for p in loaded.model.parameters())
    assert loaded.model.n_parameters() == lm.model.n_parameters()  # a tied head is still tied


def test_what_could_not_be_read_is_not_written(saved):
    write_state(saved, read_state(saved))  # in place of the file that its tensors are mapped from
    assert (stored := Checkpoint.read(saved)).step == 8 and stored.entry() == read_state(saved)["tril"]
    before = saved.read_bytes()
    with pytest.raises(ValueError, match="plain values"):
        write_state(saved, read_state(saved) | {"score": torch.tensor(1.0).numpy()[()]})
    assert saved.read_bytes() == before and [*saved.parent.iterdir()] == [saved]


def test_weights_of_another_precision_are_converted(saved):
    rewrite(saved, lambda c: c.update(state_dict={name: x.bfloat16() for name, x in c["state_dict"].items()}))
    expected = torch.load(saved, weights_only=True)["state_dict"]
    for name, tensor in load(saved).model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[f"model.{name}"].float())


CERTIFICATES = [  # a change of a checkpoint, and words of its verdict
    (lambda content: None, "passed at step 8; belongs"),
    (lambda content: content["tril"]["certificate"].update(passed=False), "FAILED at step 8; belongs"),
    (lambda content: content["tril"].update(code="0"), "passed at step 8; does not belong"),
    (lambda content: content.update(global_step=5), "passed at step 8; does not belong"),
    (lambda content: content["tril"]["certificate"].update(certified_at_step=None), "random weights; does not"),
    (lambda content: content["tril"]["certificate"].update(passed="yes"), "none"),
]


@pytest.mark.parametrize(("change", "text"), CERTIFICATES)
def test_a_certificate_belongs_to_the_step_and_the_code_that_it_tested(change, text, saved):
    rewrite(saved, change)
    assert text in verdict(Checkpoint.read(saved))


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def within_a_tensor(data: bytes) -> int:
    """A position in the largest record, since the padding between records has no checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
        return data.index(archive.read(record)) + record.file_size // 2


DAMAGE = {  # what happens to the bytes of a file
    "a bit of a tensor": lambda data: flipped(data, within_a_tensor(data)),
    "a bit of the structure": lambda data: flipped(data, data.index(b"data.pkl") + 200),
    "the table of contents": lambda data: flipped(data, data.rindex(b"PK\x01\x02") + 30),
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "more than its bytes": lambda data: with_zeros(data),
    "a pickle": lambda data: pickle.dumps({"state_dict": {}, "tril": {}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_in_one_line(damage, saved):
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
    """2^depth values in less than a kilobyte, which take as long to hash or to print."""
    value = kind([1])
    for _ in range(depth):
        value = kind([value, value])
    return value


def with_zeros(data: bytes) -> bytes:
    """An archive with one more record, of 100 MB of zeros, which take no space."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("last/data/zeros", bytes(10**8))
    return file.getvalue()


LIES = [  # what a file says that is not so, and what the error names
    (config(vocab_size=10**9), "embed.weight"),
    (config(**{"vocab\n_size": 1}), "vocab _size"),
    (lambda content: content["tril"]["config"].pop("key_offset"), "model.key_offset"),
    (weight("norm.weight", torch.ones(32).long()), "norm.weight"),
    (weight("norm.weight", torch.ones(1).expand(10**9, 10**9)), "norm.weight"),
    *(
        (weight("norm.weight", x), "norm.weight")
        for x in (torch.ones(32).to_sparse(), torch.ones(32, device="meta"), 1)
    ),
    (config(n_layers=10_000), "model.n_layers=10000"),
    (config(context_length=2**29), "model.context_length="),
    (lambda content: content["tril"].update(eot=3, certificate=True), "eot=3 .*certificate=true"),
    (lambda content: content["tril"].pop("tokenizer"), "tokenizer"),
    (lambda c: c["tril"].update(tokenizer=c["tril"]["tokenizer"].replace('"a":', '"a":4000000', 1)), "vocab_size=300"),
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
