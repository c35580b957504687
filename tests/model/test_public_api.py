"""The names that `tril.model` exports, which are imported on first use."""

import importlib
import inspect
import sys
import types

import pytest
import torch

import tril.model

EXPORTS = ["GPT", "GPTConfig", "MultiHeadAttention", "attention", "attention_weights", "causal_mask", "load"]
EARLIER_IMPORTS = [
    "pass",
    "import tril.model.attention",
    "from tril.model.gpt import GPT",
    "from tril.model.attention import attention",
    "from tril.model import MultiHeadAttention",
    "from tril.model import attention",
]


def loaded_modules():
    return [name for name in sys.modules if f"{name}.".startswith("tril.model.")]


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """`tril.model` as in a new process. The modules of the other tests are restored afterwards."""
    monkeypatch.setattr(tril, "model", tril.model)
    for name in loaded_modules():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in loaded_modules():
        del sys.modules[name]


def test_importing_the_package_does_not_import_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing torch now raises ImportError
    package = importlib.import_module("tril.model")
    assert sorted(package.__all__) == sorted(EXPORTS)
    with pytest.raises(ImportError):
        getattr(package, EXPORTS[0])


def test_the_arguments_of_attention():
    """Positional arguments, then those that are given by name."""
    from tril.model.attention import MultiHeadAttention, attention

    by_name = ["mask", "bias", "causal", "window", "dropout_p", "backend", "need_weights"]
    module = ["n_kv_heads", "head_dim", "v_head_dim", "out_dim", "kv_dim", "causal", "window", "qkv_bias", "out_bias"]
    module += ["out_proj", "qk_norm", "norm_eps", "attn_dropout", "resid_dropout", "backend"]
    forward = ["mask", "bias", "rope", "cache", "head_gate", "last_only", "need_weights"]
    assert arguments(attention) == (["query", "key", "value"], by_name)
    assert arguments(MultiHeadAttention) == (["dim", "n_heads"], module)
    assert arguments(MultiHeadAttention.forward) == (["self", "query", "key", "value"], forward)


def arguments(function):
    kinds = inspect.signature(function).parameters.values()
    return tuple(
        [p.name for p in kinds if p.kind is kind]
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    )


@pytest.mark.parametrize("statement", EARLIER_IMPORTS)
def test_attention_is_a_function_and_a_module_whatever_was_imported_before(statement):
    exec(statement)
    from tril.model import attention

    q, k, v = torch.randn(3, 1, 2, 4, 8)
    out = attention(q, k, v, causal=True)

    import tril.model.attention as module

    assert isinstance(module, types.ModuleType) and inspect.isfunction(module.attention)
    assert torch.equal(out, module.attention(q, k, v, causal=True))
    assert torch.equal(module(q, k, v, causal=True), out)
    assert sys.modules["tril.model.attention"] is module and "explicit" in module.BACKENDS
