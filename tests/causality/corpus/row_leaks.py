"""Leaks across the rows of a batch, and outputs that depend on the size of the batch.

B batch, T positions, H heads, C width.
"""

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, next_token, steps
from tests.causality.corpus.entry import Trigger, leak

ROWS, FFN, ATTENTION = {"trigger": Trigger(batch=4)}, {"place": "blocks.0.mlp"}, {"place": "blocks.0.attn"}


def before_mlp(function) -> Backbone:
    return Backbone(mlp=nn.Sequential(Mix(function), MLP()))


@leak("rows of the batch", **FFN, **ROWS)
def rows_rolled():
    """Each row gets a tenth of the row before it."""
    return before_mlp(lambda x: x + 0.1 * x.roll(1, 0))


@leak("rows of the batch", **FFN, **ROWS)
def centered_over_the_batch():
    """The mean over the rows is taken off."""
    return before_mlp(lambda x: x - x.mean(0, keepdim=True))


@leak("rows of the batch", place="blocks.0.norm2", **ROWS)
def batch_norm_without_stored_statistics():
    """Batch norm takes its statistics over rows and positions in every mode."""
    model = Backbone()
    norm = nn.BatchNorm1d(DIM, track_running_stats=False)
    model.block().norm2 = nn.Sequential(Mix(lambda x: x.mT), norm, Mix(lambda x: x.mT))
    return model


@leak("rows of the batch", **ATTENTION, **ROWS)
def attention_over_the_flattened_batch():
    """All rows are one sequence for attention, so a row attends to the rows before it."""

    class Flattened(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, 1)[None]).view_as(x)

    return Backbone(attn=Flattened())


@leak("rows of the batch", **ATTENTION)
def mask_dropped_by_squeezing_a_batch_of_one():
    """`squeeze` takes the batch dimension off a single row, whose mask then applies to no dimension."""

    class Squeezed(Attention):
        def visible(self, x: Tensor) -> Tensor:
            mask = super().visible(x)
            return torch.ones_like(mask) if x.squeeze(0).dim() == 2 else mask

    return Backbone(attn=Squeezed())


@leak("rows of the batch", **ATTENTION, **ROWS)
def mask_of_the_wrong_dimension():
    """The rows of the mask are used for the rows of the batch, so row b sees the first b + 1 tokens of all."""

    class ByRow(Attention):
        def visible(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
            return super().visible(x) | (steps(x) <= rows)

    return Backbone(attn=ByRow())


@leak("rows of the batch", **FFN, **ROWS)
def scaled_by_the_batch_size():
    """The output is divided by the number of rows."""
    model = Backbone()
    model.block().mlp = Mix(lambda x: x / x.shape[0], model.block().mlp)
    return model


@leak("rows of the batch", **FFN, **ROWS)
def small_change_by_the_batch_size():
    """The output depends on the number of rows by 1e-3, which could be taken for rounding."""
    model = Backbone()
    model.block().mlp = Mix(lambda x: x * (1 + 1e-3 * (x.shape[0] - 1)), model.block().mlp)
    return model


@leak("rows of the batch", **FFN, **ROWS)
def first_row_used_for_all():
    """A cached mean of the first row is added to every row."""
    return before_mlp(lambda x: x + x[:1].cumsum(1) / (1 + steps(x)[:, None]))


@leak("rows of the batch", **FFN, **ROWS)
def rows_sorted_and_not_restored():
    """The rows are sorted by their first channel for packing, and the order is not restored for one part."""
    return before_mlp(lambda x: x + 0.1 * x[x[:, 0, 0].argsort()])


@leak("rows of the batch", **FFN, **ROWS)
def expert_capacity_shared_by_the_batch():
    """An expert takes 24 tokens of the batch in order, so earlier rows displace those of later ones."""

    def kept(x: Tensor) -> Tensor:
        chosen = (x[..., :1] > 0).flatten(0, 1)  # (B * T, 1)
        return x * (~chosen | (chosen.cumsum(0) <= 24)).view(*x.shape[:2], 1)

    return before_mlp(kept)


@leak("rows of the batch", place="", trigger=Trigger(batch=4))
def fourth_row_sees_the_future():
    """A plain function whose fourth row has its logits mixed with those of the next position."""
    model = Backbone()

    def call(ids: Tensor) -> Tensor:
        logits = model(ids)
        fourth = (torch.arange(len(ids), device=ids.device) == 3)[:, None, None]
        return logits + 0.5 * fourth * next_token(logits)

    return call


@leak("rows of the batch", place="", trigger=Trigger(batch=4))
def sees_the_future_in_batches_of_even_size():
    """A plain function that is causal for one row and for odd numbers of rows."""
    model = Backbone()

    def call(ids: Tensor) -> Tensor:
        logits = model(ids)
        return logits + 0.5 * next_token(logits) if len(ids) % 2 == 0 else logits

    return call


@leak("not repeatable", place="")
def function_with_noise_above_its_leak():
    """A plain function whose noise of 1e-2, new in every call, hides a leak of 1e-3."""
    model, calls = Backbone(), [0]

    def call(ids: Tensor) -> Tensor:
        calls[0] += 1
        logits = model(ids)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(calls[0])).to(logits)
        return logits + 1e-2 * noise + 1e-3 * next_token(logits)

    return call


@leak("positions", place="")
def function_of_positions_from_the_end():
    """A plain function that adds to each logit the number of tokens that follow."""
    model = Backbone()

    def call(ids: Tensor) -> Tensor:
        return model(ids) + 0.01 * (ids.shape[1] - steps(ids))[:, None]

    return call
