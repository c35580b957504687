"""A loaded checkpoint computes the same; a file is written whole or not at all; what its certificate belongs to."""

import json
import os
import signal
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_gpt
from tests.model.generation.test_language_model import byte_level
from tril.model.binding import compare, describe, sources_sha256
from tril.model.checkpoint import Checkpoint, load, read_state, save, write_state
from tril.model.generation.language_model import LanguageModel

PARTS = {
    "pos": ["rope", "learned", "alibi", "none"],
    "norm": ["rmsnorm", "layernorm"],
    "bias": [True, False],
    "mlp": ["relu2", "swiglu"],
    "tie_embeddings": [True, False],
    "n_kv_heads": [None, 2],
}


def language_model(**parts) -> LanguageModel:
    return LanguageModel(tiny_gpt(**{"vocab_size": 257, **parts}), byte_level())


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "run" / "some.ckpt", language_model(), name="test")
    return tmp_path / "run" / "some.ckpt"


def rewrite(path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    write_state(path, content)


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


def test_the_file_and_its_attributes(saved):
    lm, content = language_model(), torch.load(saved, weights_only=True)
    assert content.keys() == {"state_dict", "tril", "digests"} and content["digests"].keys() == {"state_dict", "tril"}
    assert content["state_dict"].keys() == {f"model.{name}" for name in lm.model.state_dict()}
    assert json.loads(json.dumps(content["tril"])) == content["tril"]  # plain values only
    stored = Checkpoint.read(saved)
    assert (stored.config, stored.data, stored.step, stored.path) == (lm.config, {"name": "test"}, None, saved)
    assert stored.weights.keys() == lm.model.state_dict().keys() and Checkpoint.read(saved, weights=False).weights == {}
    stored.step, stored.lineage, stored.settings, stored.code = 3, {"source": "a"}, {"seed": 1}, "0"
    stored.certificate = {"passed": True}
    stored.write(saved.with_name("b.ckpt"))
    again = Checkpoint.read(saved.with_name("b.ckpt"))
    assert again.entry() == stored.entry() and again.step == 3 and again.certificate == {"passed": True}


def test_weights_of_another_precision_are_converted(saved):
    rewrite(saved, lambda c: c.update(state_dict={name: x.bfloat16() for name, x in c["state_dict"].items()}))
    expected = torch.load(saved, weights_only=True)["state_dict"]
    for name, tensor in load(saved).model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[f"model.{name}"].float())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_does_not_copy_the_weights(saved):
    """Lightning's checkpoints contain the optimizer state too, which sampling should not read."""
    tensors = Checkpoint.read(saved).weights.values()
    maps = [
        range(*(int(x, 16) for x in line.split()[0].split("-")))
        for line in open("/proc/self/maps")
        if line.rstrip().endswith(str(saved))
    ]
    assert maps and all(any(x.data_ptr() in m for m in maps) for x in tensors)


def assert_kept(path, before, message) -> None:
    with pytest.raises(OSError) as error:
        write_state(path, {"state_dict": {"a": torch.zeros(1_000_000)}})
    assert str(error.value) == f"cannot write {path}: {message} another folder with hydra.run.dir"
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="POSIX only")
def test_a_file_that_cannot_be_written_leaves_the_earlier_one(saved):
    import resource

    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert_kept(saved, saved.read_bytes(), "File too large; choose")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_named_with_its_remedy(saved, monkeypatch):
    def fail_half_way(content, file):
        file.write(b"half")
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos") from None  # as torch does

    monkeypatch.setattr(torch, "save", fail_half_way)
    assert_kept(saved, saved.read_bytes(), "No space left on device; free space, or choose")


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="it has a float64, and must have plain values and tensors"):
        write_state(tmp_path / "a.ckpt", {"score": torch.tensor(1.0).numpy().astype("float64")[()]})
    assert os.listdir(tmp_path) == []


def certified(path, *, step=4, **certificate) -> dict:
    """A checkpoint of step 4 with a certificate, as training writes it."""
    lm = language_model(n_layers=1)
    of = describe(lm.config.to_dict(), data="of the text", step=step)
    checkpoint = Checkpoint(lm.config, dict(lm.model.state_dict()), lm.tokenizer.to_str(), lm.eot, step=step)
    checkpoint.data, checkpoint.certificate = {"fingerprint": "of the text"}, {"passed": True, "of": of} | certificate
    checkpoint.write(path)
    return verdict(path)


def verdict(path) -> dict:
    return compare(Checkpoint.read(path))


def flip_the_last_bit(content) -> None:
    content["state_dict"]["model.blocks.0.attn.q_proj.weight"].view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize(
    "change, differs",
    [
        (flip_the_last_bit, "the weights differ"),
        (lambda content: content["tril"]["config"].update(window=5), "the config differs"),
        (lambda content: content["tril"]["data"].update(fingerprint="other"), "the data differ"),
        (lambda content: content["tril"]["causality"]["of"].update(code="0"), "the code differs"),
        (lambda content: content.update(global_step=5), None),  # the step of the file is not what was tested
        (lambda content: content["tril"].pop("causality"), "none"),
        (lambda content: content["tril"]["causality"].update(passed="yes"), "none that can be read"),
    ],
)
def test_a_certificate_belongs_to_the_weights_config_data_and_code_that_it_tested(change, differs, tmp_path):
    before = certified(path := tmp_path / "a.ckpt", certified_at_step=4)
    assert before["text"] == "passed at step 4; belongs to these weights, config, data and code"
    assert before["belongs"] and before["differs"] == [] and before["passed"] is True
    rewrite(path, change)
    after = verdict(path)
    assert after["differs"] == ([differs] if differs else []) and after["belongs"] is (differs is None)


@pytest.mark.parametrize(
    "certificate, text",
    [
        ({"certified_at_step": 3}, "passed at step 3; does not belong to this file: the weights are of step 4, which"),
        ({"certified_at_step": None}, "passed before training, with random weights; does not belong to this file: the"),
        ({"certified_at_step": 4, "passed": False}, "FAILED at step 4; belongs to these weights"),
        (
            {"certified_at_step": 4, "of": [1]},
            "passed at step 4; does not belong to this file: the weights differ; the",
        ),
    ],
)
def test_the_verdict_in_words(certificate, text, tmp_path):
    assert certified(tmp_path / "a.ckpt", **certificate)["text"].startswith(text)


def test_the_code_is_that_of_the_files():
    assert sources_sha256("model/digest.py") != sources_sha256("model/digest.py", "model/gpt.py")


def test_read_state_gives_only_what_is_asked_for(saved):
    assert read_state(saved, entries=("tril", "absent")).keys() == {"tril"}
