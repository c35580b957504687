"""A checkpoint of the first version of the format loads, and its logits are the same to the bit.

T queries, D head size.
"""

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F

from tril.model.checkpoint import load
from tril.model.generation.language_model import EOT

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_a_checkpoint_of_an_earlier_version_loads():
    """checkpoint_v1.ckpt was written by the first version of this format; the same code computed the logits.

    The model has grouped heads, qk-norm, a window, biases and swiglu. The weights must be bitwise equal. The stored
    logits are compared in float64, as the order of sums depends on the processor.
    """
    expected = torch.load(FIXTURES / "checkpoint_v1_logits.pt", weights_only=True)
    lm = load(FIXTURES / "checkpoint_v1.ckpt")
    weights = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(lm.model.state_dict().items()))
    assert hashlib.sha256(weights).hexdigest() == expected["weights_sha256"]
    assert torch.load(FIXTURES / "checkpoint_v1.ckpt", weights_only=True)["tril"]["config"]["qk_norm"] is True
    assert lm.config.qk_norm == "rmsnorm" and lm.config.norm_eps is lm.config.mlp_hidden is lm.config.qkv_bias is None
    with torch.no_grad():
        logits = lm.model(expected["ids"])
        assert torch.equal(logits, logits_of_the_first_version(lm.model, expected["ids"]))
        logits = lm.model.double()(expected["ids"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-12)
    assert logits.std() > 0.5
    assert lm.encode("ab") == [65, 66] and lm.eot == EOT


def logits_of_the_first_version(model, ids):
    """The calls of torch that the first version made for the model of checkpoint_v1.ckpt, in their order."""
    weights, config, length = model.state_dict(), model.config, ids.shape[1]
    frequency = 10_000.0 ** -(torch.arange(0, config.head_size, 2).double() / config.head_size)  # (D/2,)
    angle = torch.arange(length)[:, None] * frequency  # (T, D/2)
    cos, sin, position = angle.cos().float(), angle.sin().float(), torch.arange(length)
    visible = (position <= position[:, None]) & (position > position[:, None] - config.window)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"])

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    x = F.embedding(ids, weights["embed.weight"])
    for i in range(config.n_layers):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.norm1")
        q, k, v = (
            linear(h, f"{block}.attn.{part}_proj").unflatten(-1, (-1, config.head_size)).transpose(1, 2)
            for part in "qkv"
        )
        q, k = rotate(norm(q, f"{block}.attn.q_norm")), rotate(norm(k, f"{block}.attn.k_norm"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{block}.attn.o_proj")
        h = norm(x, f"{block}.norm2")
        hidden = linear(h, f"{block}.mlp.up")
        x = x + linear(F.silu(linear(h, f"{block}.mlp.gate")) * hidden, f"{block}.mlp.down")
    return linear(norm(x, "norm"), "head")
