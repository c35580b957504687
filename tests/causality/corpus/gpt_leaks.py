"""Leaks put into our own GPT, by replacing one of its parts.

B batch, T positions, C width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import next_token
from tests.causality.corpus.entry import CONTEXT_LENGTH, VOCAB_SIZE, Trigger, leak

if TYPE_CHECKING:
    from tril.model.gpt import GPT


def gpt(**settings) -> "GPT":
    """A small GPT with weights that hide nothing."""
    from tril.model.config import GPTConfig
    from tril.model.gpt import GPT

    shape = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "backend": "explicit"}
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, **shape | settings))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def changed(model: "GPT", name: str, function) -> "GPT":
    """Passes the output of a submodule through `function`, by a hook."""
    model.get_submodule(name).register_forward_hook(lambda module, arguments, out: function(module, out))
    return model


@leak("masks", place="blocks.0.attn")
def gpt_without_a_mask():
    """`model.causal=false`: no layer has a mask."""
    return gpt(causal=False)


@leak("one head, layer or group", place="blocks.1.attn")
def gpt_without_a_mask_in_its_last_layer():
    """The causal flag of the second layer is off."""
    from tril.model.attention import MultiHeadAttention

    model = gpt()
    attn = model.get_submodule("blocks.1.attn")
    assert isinstance(attn, MultiHeadAttention)
    attn.causal = False
    return model


@leak("token shift", place="blocks.0.attn.v_proj")
def gpt_with_values_of_the_next_token():
    """The values of the first layer are mixed with those of the next position."""
    return changed(gpt(), "blocks.0.attn.v_proj", lambda module, v: v + 0.2 * next_token(v))


@leak("normalization over time", place="blocks.1.mlp")
def gpt_with_an_mlp_centered_over_time():
    """The output of the second MLP is centered over the sequence."""
    return changed(gpt(), "blocks.1.mlp", lambda module, x: x - x.mean(1, keepdim=True))


@leak("training mode", place="blocks.0.mlp", trigger=Trigger(training=True))
def gpt_with_a_mean_in_training():
    """In training mode the first MLP adds a mean over the sequence."""
    return changed(gpt(), "blocks.0.mlp", lambda module, x: x + x.mean(1, keepdim=True) * module.training)


@leak("length", place="blocks.0.attn", trigger=Trigger(length=48))
def gpt_that_scales_long_inputs():
    """Above 40 tokens the first attention is scaled by the length."""

    def scaled(module: nn.Module, x: Tensor) -> Tensor:
        return x * (x.shape[1] / 40 if x.shape[1] > 40 else 1)

    return changed(gpt(), "blocks.0.attn", scaled)


@leak("positions", place="blocks.0.mlp", trigger=Trigger(length=48, cut=41))
def gpt_with_a_leak_at_position_40():
    """Position 40 of the first MLP gets the next one."""

    def mixed(module: nn.Module, x: Tensor) -> Tensor:
        return x + (torch.arange(x.shape[1], device=x.device) == 40)[:, None] * next_token(x)

    return changed(gpt(), "blocks.0.mlp", mixed)


@leak("rows of the batch", place="blocks.0.attn", trigger=Trigger(batch=4))
def gpt_with_mixed_rows():
    """The first attention adds a twentieth of the row before."""
    return changed(gpt(), "blocks.0.attn", lambda module, x: x + 0.05 * x.roll(1, 0))


@leak("small size", place="blocks.1.attn")
def gpt_with_a_leak_of_1e_6():
    """The second attention adds a millionth of the next position."""
    return changed(gpt(), "blocks.1.attn", lambda module, x: x + 1e-6 * next_token(x))
