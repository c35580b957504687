"""Leaks that depend on earlier calls or on a buffer, leaks of small size, and outputs that are not repeatable.

B batch, T positions, C width.
"""

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import MLP, Attention, Backbone, Mix, next_token
from tests.causality.corpus.entry import Trigger, leak

ATTENTION, FFN = {"place": "blocks.0.attn"}, {"place": "blocks.0.mlp"}


class UnmaskedAfterCalls(Attention):
    """Attention whose mask depends on the number of calls so far."""

    def __init__(self, condition):
        super().__init__()
        self.condition, self.n_calls = condition, 0

    def visible(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        mask = super().visible(x)
        return torch.ones_like(mask) if self.condition(self.n_calls) else mask


@leak("state between calls", **ATTENTION, trigger=Trigger(calls=500))
def mask_that_comes_off_after_500_calls():
    """From the 501st call on there is no mask."""
    return Backbone(attn=UnmaskedAfterCalls(lambda n_calls: n_calls > 500))


@leak("state between calls", **ATTENTION, trigger=Trigger(calls=6))
def mask_missing_in_every_seventh_call():
    """Every seventh call has no mask."""
    return Backbone(attn=UnmaskedAfterCalls(lambda n_calls: n_calls % 7 == 0))


@leak("state between calls", **ATTENTION, trigger=Trigger(calls=20, training=True))
def mask_that_fades_in_training():
    """Each call in training mode opens the mask a little more; evaluation leaves it as it is."""

    class Fading(Attention):
        def __init__(self):
            super().__init__()
            self.step: Tensor
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            self.step += self.training
            value = -10 / (self.step - 5).clamp(min=0)  # -inf in the first five steps
            return self.merge((self.scores(q, k) + value.where(~self.visible(x), 0)).softmax(-1) @ v)

    return Backbone(attn=Fading())


@leak("state between calls", **FFN, trigger=Trigger(calls=1))
def state_of_the_call_before():
    """The mean of the last input of the same shape is added, as a cache that is never cleared would do."""

    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x: Tensor) -> Tensor:
            last = self.last if self.last is not None and self.last.shape == x.shape else torch.zeros_like(x)
            self.last = x.detach().mean(1, True).expand_as(x)
            return x + last.to(x.dtype)

    return Backbone(mlp=Remembering())


class Gated(nn.Module):
    """An MLP, and `gate`, of value 0, times a function that leaks."""

    def __init__(self, function, *, learned: bool):
        super().__init__()
        self.function, self.mlp = function, MLP()
        if learned:
            self.gate = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.gate * self.function(x)


GATE = Trigger(values={"blocks.0.mlp.gate": 1.0})


@leak("gated by a buffer", **FFN, trigger=GATE)
def buffer_of_zero_before_a_mean():
    """A buffer, 0 at first, multiplies the mean of the sequence; training raises it later."""
    return Backbone(mlp=Gated(lambda x: x.mean(1, True), learned=False))


@leak("gated by a buffer", **FFN, trigger=GATE)
def buffer_of_zero_before_the_next_token():
    """A buffer, 0 at first, multiplies the next token."""
    return Backbone(mlp=Gated(next_token, learned=False))


@leak("gated by a buffer", **FFN, trigger=GATE)
def learned_gate_of_zero():
    """A learned gate starts at 0 (ReZero), so the leak behind it shows only after a step of training."""
    return Backbone(mlp=Gated(next_token, learned=True))


@leak("gated by a buffer", **ATTENTION, trigger=Trigger(values={"blocks.0.attn.o_proj.weight": 1.0}))
def projection_of_zeros_behind_an_open_mask():
    """The output projection starts at 0, which makes the layer without a mask the identity."""
    attn = Attention(lambda query, key: (key >= 0) & (query >= 0))
    nn.init.zeros_(attn.o_proj.weight)
    return Backbone(attn=attn)


@leak("small size", **FFN)
def next_token_times_1e_6():
    """A millionth of the next token is added."""
    return Backbone(mlp=Mix(lambda x: x + 1e-6 * next_token(x)))


@leak("small size", **ATTENTION)
def one_head_with_a_millionth_of_the_future():
    """One head adds 1e-6 of its result without a mask."""

    class Faint(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            unmasked = self.scores(q, k).softmax(-1) @ v
            head = torch.arange(q.shape[1], device=x.device)[:, None, None] == 2
            return super().forward(x) + 1e-6 * self.merge(head * unmasked)

    return Backbone(attn=Faint())


@leak("small size", place="head")
def small_leak_below_logits_of_a_thousand():
    """A leak of 1e-3 stands beside logits of about 1000, where float32 has steps of 6e-5."""
    model = Backbone()
    model.head = Mix(lambda x: 1000 * x + 1e-3 * next_token(x), model.head)
    return model


@leak("small size", **FFN, trigger=Trigger(dtype=torch.float64))
def leak_below_the_rounding_of_float32():
    """A next token times 1e-9 is lost in float32 and shows in float64 and in the gradient."""
    return Backbone(mlp=Mix(lambda x: x + 1e-9 * next_token(x)))


class Noisy(nn.Module):
    """Adds noise that differs in every call, whatever the random state, and a leak that is smaller."""

    def __init__(self, noise: float, leak: float):
        super().__init__()
        self.noise, self.leak, self.n_calls = noise, leak, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        generator = torch.Generator().manual_seed(self.n_calls)
        noise = torch.randn(x.shape, generator=generator).to(x)
        return x + self.noise * noise + self.leak * next_token(x)


@leak("not repeatable", **FFN)
def noise_above_a_leak():
    """Noise of 1e-2 in every call hides a leak of 1e-3."""
    return Backbone(mlp=Noisy(1e-2, 1e-3))


@leak("not repeatable", **FFN)
def noise_as_large_as_the_leak():
    """Noise and leak have about the same size, so two equal calls differ as much as two inputs."""
    return Backbone(mlp=Noisy(0.5, 0.5))
