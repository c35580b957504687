"""Models of `transformers` that fail in float64, return other structures, or cannot be called."""

import functools

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from tests.model.causality.test_transformers_grid import SHAPE, config
from tril.model.causality.case import UNITS
from tril.model.causality.certificate import certify
from tril.model.causality.grids.transformers_grid import transformers_cases

ROFORMER = SHAPE | {"intermediate_size": 64, "embedding_size": 32}
XGLM = {"vocab_size": 61, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}
ONE = {"precisions": ("32-true",)}


@pytest.fixture
def described(tmp_path):
    """Writes a config and returns its path."""

    def write(made):
        made.bos_token_id = made.eos_token_id = made.pad_token_id = None
        made.to_json_file(tmp_path / "config.json")
        return str(tmp_path / "config.json")

    return write


def certificate(path):
    """Of the first case alone, which is the model itself."""
    return certify("model", [next(transformers_cases(path, **ONE))])


def test_roformer_passes_as_a_decoder(described, short_canary):
    """Its position table takes a shape, and is a constant that random weights must not replace."""
    test = certificate(described(transformers.RoFormerConfig(**ROFORMER, is_decoder=True)))
    assert test.passed, test.summary()["failed"]
    assert test.dependencies["gradient"].isnan().sum() == 0 and test.notes == []


def test_roformer_fails_as_an_encoder(described):
    failures = certificate(described(transformers.RoFormerConfig(**ROFORMER, is_decoder=False))).failures_by_check()
    assert {"attention", "no future", "padding", "canary"} <= set(failures)


def test_a_model_that_fails_in_float64_is_certified_in_float32(described, short_canary):
    """XGLM masks with a constant that float64 weights cannot hold in float32."""
    path = described(transformers.XGLMConfig(**XGLM, max_position_embeddings=12))
    test = certificate(path)
    assert test.passed, test.summary()["failed"]
    (note,) = test.notes
    assert note.startswith("float64 is left out (RuntimeError: ") and "\n" not in note
    assert f"note: {note}" in test.table() and test.to_dict()["notes"] == [note]


def test_units_in_the_last_place_bound_a_model_without_float64(described, monkeypatch):
    """Differences between runs do not: a leak that depends on the batch would raise its own bound."""
    forward = LlamaForCausalLM.forward

    def only_float32(self, *args, **kwargs):
        if self.dtype != torch.float32:
            raise RuntimeError("constants\nof float32")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", only_float32)
    case = next(transformers_cases(described(config("llama", max_position_embeddings=9)), **ONE))
    ids = case.random_tokens(1, 9)
    with torch.no_grad():
        largest = case.subject(ids).abs().max().item()
    case.generator.manual_seed(0)
    assert case.measured_rounding() == UNITS * torch.finfo(torch.float32).eps * largest > 0
    assert case.subject.note.startswith("float64 is left out (RuntimeError: constants of float32); ")


def test_tuples_with_the_logits_first_are_accepted(described, short_canary, monkeypatch):
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def as_tuple(*args, **kwargs):
        return (forward(*args, **kwargs).logits,)

    monkeypatch.setattr(LlamaForCausalLM, "forward", as_tuple)
    test = certificate(described(config("llama", max_position_embeddings=9)))
    assert test.passed and test.checks()["padding"] == 5
    assert "decoding" not in test.checks()  # a tuple names no cache


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, input_ids, **_: 1 / 0, " with ids (2, 48) below 61 ends in ZeroDivisionError: division by zero"),
        (
            lambda self, input_ids, **_: None,
            "LlamaForCausalLM must return floats (B, T, V) = (2, 48, 61) for ids (2, 48)",
        ),
        (lambda self, input_ids, **_: (input_ids,), "and returned torch.int64 (2, 48)"),
    ],
)
def test_a_model_that_cannot_be_called_is_one_line(forward, message, described, monkeypatch):
    path = described(config("llama"))
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(ValueError) as caught:
        transformers_cases(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_failure_in_a_later_call_is_one_line(described, monkeypatch):
    cases = transformers_cases(described(config("llama")), **ONE)

    def fail(self, *args, **inputs):
        raise RuntimeError("several\nlines")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    with pytest.raises(ValueError, match="^LlamaForCausalLM ends in RuntimeError: several lines$"):
        certify("model", cases)
