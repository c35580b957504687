"""Checkpoints: what is loaded computes the same, and no file that is damaged or that lies is used."""

import json
import os
import pickle
import re
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_gpt
from tests.model.tokenizers import byte_tokenizer
from tril.model.checkpoint import Checkpoint, code_sha256, read_state, save, verdict, write_state
from tril.model.generation.language_model import LanguageModel
from tril.model.runs import load

PARTS = {
    "pos": ["rope", "learned", "alibi", "none"],
    "norm": ["rmsnorm", "layernorm"],
    "bias": [True, False],
    "mlp": ["relu2", "swiglu"],
    "tie_embeddings": [True, False],
    "n_kv_heads": [None, 2],
}
RANDOM = "passed before training, with random weights"


def language_model(**parts) -> LanguageModel:
    return LanguageModel(tiny_gpt(**{"vocab_size": 257, **parts}), byte_tokenizer())


def training_content() -> dict:
    """What Lightning saves: weights, optimizer, progress and random states."""
    lm = language_model()
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-3)
    lm.model(torch.arange(12)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    values = {"data": {"name": "test"}, "lineage": {"source": "a"}, "settings": {"seed": 1}, "code": code_sha256()}
    return {
        "global_step": 4,
        "state_dict": {f"model.{name}": tensor for name, tensor in lm.model.state_dict().items()},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1, "completed": 0}}}},
        "optimizer_states": [optimizer.state_dict()],
        "random_states": {"cpu": torch.get_rng_state()},
        "tril": Checkpoint(lm.config, {}, lm.tokenizer.to_str(), lm.eot, **values).entry(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint file that no test changes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole") / "last.ckpt"
    write_state(path, training_content())
    return path


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    """A copy of it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "some.ckpt").write_bytes(whole.read_bytes())
    return tmp_path / "run" / "some.ckpt"


def rewrite(path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    write_state(path, content)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in PARTS.items()}))
def test_what_is_loaded_computes_the_same(tmp_path, parts):
    lm, ids, path = language_model(**parts), torch.randint(257, (2, 12)), tmp_path / "a.ckpt"
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


def test_a_loaded_model_says_what_it_is(saved):
    lm = load(saved)
    counts = f"{lm.model.n_parameters():,} parameters, 2 layers, width 32, 4 heads, context 12, tokenizer of 257 tokens"
    assert repr(lm) == f"LanguageModel({saved}: {counts}, on cpu)"


def test_a_file_has_plain_values_only_and_can_be_written_again(whole, saved):
    torch.manual_seed(0)
    content, stored = training_content(), Checkpoint.read(saved)
    for training in (True, False):
        write_state(saved, read_state(whole, training=training))
        assert same(read_state(saved), content)
    assert json.loads(json.dumps(content["tril"])) == content["tril"] == stored.entry()
    assert (stored.data, stored.step, stored.path) == ({"name": "test"}, 4, saved)
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
        (lambda content: None, "passed at step 4; belongs"),
        (lambda content: content["tril"]["certificate"].update(passed=False), "FAILED at step 4; belongs"),
        (lambda content: content["tril"].update(code="0"), "passed at step 4; does not belong"),
        (lambda content: content.update(global_step=5), "passed at step 4; does not belong"),
        (lambda content: content["tril"]["certificate"].update(certified_at_step=None), f"{RANDOM}; does not belong"),
        (lambda content: content["tril"]["certificate"].update(passed="yes"), "none"),
    ],
)
def test_a_certificate_belongs_to_the_step_and_the_code_that_it_tested(change, text, saved):
    rewrite(saved, lambda c: c["tril"].update(certificate={"passed": True, "certified_at_step": 4}))
    rewrite(saved, change)
    assert verdict(Checkpoint.read(saved)).removesuffix(" to this step and code") == text


DAMAGE = {  # what happens to the bytes of a file
    "a bit of a tensor": lambda data: flipped(data, len(data) // 2),
    "a bit of the structure": lambda data: flipped(data, data.index(b"data.pkl") + 200),
    "the table of contents": lambda data: flipped(data, data.rindex(b"PK\x01\x02") + 30),
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a pickle": lambda data: pickle.dumps({"state_dict": {}, "tril": {}}),
}


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("function", [read_state, load])
def test_a_damaged_file_is_named_in_one_line_that_does_not_advise_to_run_code(function, damage, saved):
    saved.write_bytes(DAMAGE[damage](saved.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(str(saved))) as error:
        function(saved)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


# --- files that lie


def config(**values):
    return lambda content: content["tril"]["config"].update(values)


def entry(**values):
    return lambda content: content["tril"].update(values)


def weight(name, tensor):
    return lambda content: content["state_dict"].update({f"model.{name}": tensor})


LIES = [
    (config(vocab_size=10**9), "embed.weight is missing, unknown, of another shape"),
    (config(**{"vocab\n_size": 1}), "vocab _size"),
    (lambda content: content["tril"]["config"].pop("key_offset"), "it has no model.key_offset, so another version"),
    (weight("norm.weight", torch.ones(32).long()), "norm.weight .* no floating-point tensor"),
    (weight("norm.weight", torch.ones(1).expand(10**9, 10**9)), "norm.weight is missing, unknown, of another shape"),
    (entry(eot=3, certificate=True), "eot=3 must be .*; certificate=true must be"),
    (lambda content: content["tril"].pop("tokenizer"), "tokenizer is missing"),
    (entry(tokenizer=byte_tokenizer().to_str().replace('"a":', '"a":4000000', 1)), "exceed the model's vocab_size=257"),
    (lambda content: content.pop("tril"), "has no state_dict and tril entries; use a .ckpt file that train.py wrote"),
]


@pytest.mark.parametrize(("change", "message"), LIES, ids=lambda value: value if isinstance(value, str) else "")
def test_lies_are_refused_before_memory_is_taken(change, message, saved, tmp_path):
    path, before = tmp_path / "a.ckpt", resource.getrlimit(resource.RLIMIT_AS)
    content = torch.load(saved, weights_only=True)
    change(content)
    torch.save(content, path)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 500 * 10**6, before[1]))
    try:
        with pytest.raises(ValueError, match=message) as error:
            load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    text = str(error.value)
    assert str(path) in text and text.isprintable() and len(text) <= 610
    assert "weights only" not in text.lower() and "allocate" not in text
