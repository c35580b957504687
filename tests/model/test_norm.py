"""The normalization layers against their formulas.

B batch, T positions, C width.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import assert_close, randomize
from tril.model.attention import MultiHeadAttention
from tril.model.norm import NORMS, RMSNorm, make_norm, norm_kind

C = 12


def rms_formula(x, norm, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()


def layer_formula(x, norm, eps):
    x = x.double() - x.double().mean(-1, keepdim=True)
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    return out if norm.bias is None else out + norm.bias.double()


@pytest.mark.parametrize("scale", [1.0, 1e-3])  # for small x, eps matters
@pytest.mark.parametrize("eps", [None, 1e-6, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_layernorm_equals_its_formula(bias, eps, scale):
    norm, x = randomize(make_norm("layernorm", C, eps=eps, bias=bias)), scale * torch.randn(3, 5, C)
    assert {name for name, _ in norm.named_parameters()} == ({"weight", "bias"} if bias else {"weight"})
    assert_close(norm(x), layer_formula(x, norm, 1e-5 if eps is None else eps))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.1])
def test_rmsnorm_equals_its_formula(eps, scale):
    norm, x = randomize(make_norm("rmsnorm", C, eps=eps)), scale * torch.randn(3, 5, C)
    assert {name for name, _ in norm.named_parameters()} == {"weight"}
    assert_close(norm(x), rms_formula(x, norm, torch.finfo(torch.float32).eps if eps is None else eps))


@pytest.mark.parametrize("eps", [None, 0.1])
def test_without_normalization_nothing_changes(eps):
    norm, x = make_norm("none", C, eps=eps), torch.randn(3, C)
    assert isinstance(norm, nn.Identity) and norm(x) is x


def test_booleans_mean_rmsnorm_and_none():
    assert (norm_kind(True), norm_kind(False)) == ("rmsnorm", "none")
    assert [norm_kind(kind) for kind in NORMS] == list(NORMS)
    assert isinstance(make_norm(True, C), RMSNorm) and isinstance(make_norm(False, C), nn.Identity)


@pytest.mark.parametrize("kind", ["batchnorm", "RMSNorm", "", None, 1, 0, 1.0])
def test_unknown_kinds_are_refused_with_the_valid_ones_in_one_line(kind):
    with pytest.raises(ValueError) as error:
        make_norm(kind, C)
    message = f"normalization {kind!r} must be one of rmsnorm, layernorm, none, or True (rmsnorm) or False (none)"
    assert str(error.value) == message


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_input(kind, dtype):
    """The weights stay float32. Also under autocast, where torch's own modules return float32."""
    norm, x = randomize(make_norm(kind, C, bias=True)), torch.randn(3, 5, C).to(dtype)
    formula, eps = {"rmsnorm": (rms_formula, torch.finfo(dtype).eps), "layernorm": (layer_formula, 1e-5)}[kind]
    expected = formula(x, norm, eps)
    for context in (torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False)):
        with context:
            out = norm(x)
        assert out.dtype == dtype
        assert_close(out, expected, roundings=4)
    assert norm(x.float()).dtype == torch.float32
    assert norm.weight.dtype == torch.float32


def test_on_a_gpu_the_output_has_the_dtype_of_the_input_too(monkeypatch):
    """Simulated on a CPU: autocast on CUDA computes layer norms in float32 and returns that dtype."""
    norm, x = randomize(make_norm("layernorm", C)), torch.randn(3, C).bfloat16()
    kernel, expected = F.layer_norm, make_norm("layernorm", C)
    expected.load_state_dict(norm.state_dict())
    monkeypatch.setattr(F, "layer_norm", lambda x, *arguments: kernel(x.float(), *arguments))
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected(x.float()).bfloat16())


def test_rmsnorm_takes_a_weight_of_the_dtype_of_the_input(monkeypatch):
    """Of two dtypes, torch's kernel is slow, with a warning."""
    norm, x, kernel, dtypes = randomize(make_norm("rmsnorm", C)), torch.randn(3, C).bfloat16(), F.rms_norm, []

    def recorded(x, shape, weight, eps):
        dtypes.append(weight.dtype)
        return kernel(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", recorded)
    assert norm(x).dtype == torch.bfloat16 and dtypes == [torch.bfloat16]


@pytest.mark.parametrize("qk_norm", ["rmsnorm", "layernorm", "none"])
@pytest.mark.parametrize("backend", ["fused", "explicit", "stacked"])
def test_attention_under_autocast_computes_in_bfloat16(qk_norm, backend):
    """A norm that returns float32 would bring q and k to float32, and v stays bfloat16: the kernels refuse that."""
    attn = randomize(MultiHeadAttention(24, 4, qk_norm=qk_norm, n_kv_heads=2, v_head_dim=5, backend=backend))
    x, bias = torch.randn(2, 6, 24), torch.randn(4, 6, 6)
    exact = attn(x, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = attn(x, bias=bias, need_weights=True)
        without = attn(x, bias=bias)
    assert (out.dtype, without.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    scale = exact.abs().max().item()
    for result in (out, without):  # products, norms, scores, weights and sums are rounded
        assert (result.float() - exact).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * max(1.0, scale)
    without.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in attn.parameters())
