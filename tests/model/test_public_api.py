"""The names that `tril.model` exports, which are imported on first use."""

import importlib
import inspect
import sys
import types

import pytest
import torch

import tril.model

EXPORTS = ["GPT", "GPTConfig", "MultiHeadAttention", "attention", "attention_weights", "causal_mask", "load"]


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """`tril.model` as in a new process. The modules of the other tests are restored afterwards."""

    def loaded():
        return [name for name in sys.modules if f"{name}.".startswith("tril.model.")]

    monkeypatch.setattr(tril, "model", tril.model)
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in loaded():
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

    by_name = "mask bias causal window dropout_p backend need_weights"
    module = "n_kv_heads head_dim v_head_dim out_dim kv_dim causal window qkv_bias out_bias out_proj qk_norm norm_eps"
    forward = "mask bias rope cache head_gate last_only need_weights"
    for function, positional, named in (
        (attention, "query key value", by_name),
        (MultiHeadAttention, "dim n_heads", f"{module} attn_dropout resid_dropout backend"),
        (MultiHeadAttention.forward, "self query key value", forward),
    ):
        kinds = inspect.signature(function).parameters.values()
        for kind, names in (("POSITIONAL_OR_KEYWORD", positional), ("KEYWORD_ONLY", named)):
            assert [p.name for p in kinds if p.kind.name == kind] == names.split()


@pytest.mark.parametrize(
    "earlier", ["pass", "import tril.model.attention", "from tril.model import MultiHeadAttention"]
)
def test_attention_is_a_function_and_a_module_whatever_was_imported_before(earlier):
    exec(earlier)
    from tril.model import attention

    q, k, v = torch.randn(3, 1, 2, 4, 8)
    out = attention(q, k, v, causal=True)

    import tril.model.attention as module

    assert isinstance(module, types.ModuleType) and inspect.isfunction(module.attention)
    assert torch.equal(out, module.attention(q, k, v, causal=True)) and torch.equal(module(q, k, v, causal=True), out)
    assert sys.modules["tril.model.attention"] is module
