"""What a model loses with each of its heads: removed one at a time, and one after another.

A head is removed in two ways: its output is set to zero, or to its mean over the text, which leaves the layers above what they always get
from it and takes away only what depends on the token.

N windows, B batch, T tokens, L layers, H heads, D head size, C width.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT, IGNORE, GPTConfig
from tril.model.heads.attention_maps import Text
from tril.model.intervals import Interval, mean_interval

WAYS = ("zero", "mean")
CONFIDENCE = 0.95

Head = tuple[int, int]  # layer, head
Chain = tuple[str, Sequence[Head]]  # way, and the heads that are removed one after another


def head_name(head: Head) -> str:
    return "L{}H{}".format(*head)


def every_head(config: GPTConfig) -> list[Head]:
    return [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]


def head_gate(config: GPTConfig, names: Sequence[str]) -> Tensor:
    """The gate that removes the heads called `names` ("L0H3": layer 0, head 3): float32 (L, H), 0 for those and 1 for the others.

    Raises ValueError for a head that the model does not have.
    """
    if config.n_heads == 0:
        raise ValueError("model.n_heads=0: a model without heads has none to remove")
    there = {head_name(head): head for head in every_head(config)}
    strange = [name for name in names if name not in there]
    if strange:
        legal = f"L0H0 to {head_name((config.n_layers - 1, config.n_heads - 1))}"
        shape = f"{config.n_layers} layers of {config.n_heads} heads"
        raise ValueError(f"the model has no head {', '.join(map(repr, strange))}; it has {shape}, called {legal}")
    gate = torch.ones(config.n_layers, config.n_heads)
    for name in names:
        gate[there[name]] = 0
    return gate


@dataclass(frozen=True)
class Change:
    """What the mean loss of the windows rises by, in nats per token, paired by window."""

    interval: Interval  # at CONFIDENCE, for this figure alone
    corrected: Interval  # Bonferroni's: at 1 - (1 - CONFIDENCE) / (L * H), so that those of all heads hold at once

    @property
    def verdict(self) -> str:
        """ "rises", "falls", or "not distinguishable" from nothing: the corrected interval includes 0."""
        if self.corrected.low <= 0 <= self.corrected.high:
            return "not distinguishable"
        return "rises" if self.corrected.mean > 0 else "falls"


@dataclass(frozen=True)
class Ablation:
    """Mean losses of the N windows: float64, nats per token.

    whole    (N,) of the whole model
    single   for each way (L, H, N), each head removed alone
    orders   for each way the heads from the least to the most important, by that
    removal  for each way (1 + L*H, N): with none, the first, the first two ... of `orders` removed
    """

    whole: Tensor
    single: dict[str, Tensor]
    orders: dict[str, list[Head]]
    removal: dict[str, Tensor]

    def changes(self, way: str) -> dict[Head, Change]:
        """Of the removal of each head alone."""
        differences = (self.single[way] - self.whole).flatten(0, 1)  # (L*H, N)
        corrected = 1 - (1 - CONFIDENCE) / len(differences)
        heads = sorted(self.orders[way])
        return {
            head: Change(paired(difference), paired(difference, corrected))
            for head, difference in zip(heads, differences)
        }

    def curve(self, way: str) -> list[Interval]:
        """What the loss rises by, with none, one, two ... of `orders` removed."""
        return [paired(losses - self.whole) for losses in self.removal[way]]

    def cells(self) -> list[list[str]]:
        """The changes of the loss as the cells of a table, line by line."""
        lines = [["head"], *([head_name(head)] for head in sorted(self.orders[WAYS[0]]))]
        for way in WAYS:
            lines[0] += [f"removed by {way}", "corrected", "the loss"]
            for line, change in zip(lines[1:], self.changes(way).values()):
                rise = f"{change.interval.mean:+.4f} ± {half_width(change.interval):.4f}"
                line += [rise, f"± {half_width(change.corrected):.4f}", change.verdict]
        return lines


def half_width(interval: Interval) -> float:
    return interval.high - interval.mean


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table that can also be read as it is; all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |" for line in cells
    ]
    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([lines[0], rule, *lines[1:]])


def paired(difference: Tensor, confidence: float = CONFIDENCE) -> Interval:
    """Of differences (N,) on the same windows. Student's t: a window is one observation, as its tokens are not independent."""
    return mean_interval(difference.tolist(), confidence)


def ablate(model: GPT, text: Text) -> Ablation:
    """Removes every head in turn, then one after another, in both ways; the model is left as it was."""
    heads = every_head(model.config)
    with inference(list(model.modules())):
        means = mean_outputs(model, text)  # (L, H, D)
        alone = losses_without(model, text, [(way, [head]) for way in WAYS for head in heads], means)
        whole, shape = alone[0], (len(WAYS), model.config.n_layers, model.config.n_heads, -1)
        single = dict(zip(WAYS, alone[1:].view(shape)))  # (L, H, N) each
        orders = {way: [heads[i] for i in single[way].mean(-1).flatten().argsort(stable=True)] for way in WAYS}
        nested = losses_without(model, text, list(orders.items()), means)[1:].view(len(WAYS), len(heads), -1)
        removal = {way: torch.cat([whole[None], losses]) for way, losses in zip(WAYS, nested)}
    return Ablation(whole, single, orders, removal)


def mean_outputs(model: GPT, text: Text) -> Tensor:
    """The mean output of every head over all positions of the text, before the output projection: (L, H, D)."""
    sums, n = [0.0] * len(model.blocks), 0
    hooks = []
    for layer, block in enumerate(model.blocks):

        def add(module, args, layer=layer):
            sums[layer] = sums[layer] + args[0].cpu().double().sum((0, 1))  # (B, T, H*D) -> (H*D,)

        hooks.append(block.attn.o_proj.register_forward_pre_hook(add))
    with _until_done(hooks):
        for ids, _, options in text.batches(model.embed.weight.device):
            model.hidden(ids, **options)
            n += ids.numel()
    means = torch.stack(sums) / n
    return means.to(model.embed.weight).unflatten(-1, (model.config.n_heads, -1))


def losses_without(model: GPT, text: Text, chains: Sequence[Chain], means: Tensor) -> Tensor:
    """The mean loss of each window: first of the whole model, then chain by chain with its first head removed, its first two, and so on.
    Float64 (1 + heads in all chains, N). `means` (L, H, D) as from `mean_outputs`; the model must be in evaluation mode.

    With each further head, what lies below its layer does not change, so the model runs from there on.
    """
    parts = []
    for ids, targets, options in text.batches(model.embed.weight.device):
        whole, shared = _inputs_of_blocks(model, ids, options)
        rows = [_mean_losses(model, whole[-1], targets)]
        for way, heads in chains:
            inputs, gate = whole, torch.ones_like(means[..., 0])  # (L, H)
            for layer, head in heads:
                gate[layer, head] = 0
                with _filled(model, (1 - gate)[..., None] * means) if way == "mean" else contextlib.nullcontext():
                    inputs = _from_layer(model, layer, inputs, shared, gate)
                rows.append(_mean_losses(model, inputs[-1], targets))
        parts.append(torch.stack(rows))
    return torch.cat(parts, dim=1)


def _mean_losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Of each window, from what the final norm gets, x (B, T, C): float64 (B,)."""
    logits = model.logits(model.norm(x)).float()  # (B, T, V)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view_as(
        targets
    )
    return nll.cpu().double().sum(1) / (targets != IGNORE).sum(1).cpu()


def _inputs_of_blocks(model: GPT, ids: Tensor, options: dict) -> tuple[list[Tensor], dict]:
    """What each block and then the final norm get, L + 1 of (B, T, C); and the options that all blocks share."""
    inputs, shared = [], {}

    def keep(module, args, kwargs):
        inputs.append(args[0])
        shared.update(kwargs)

    with _until_done(
        [module.register_forward_pre_hook(keep, with_kwargs=True) for module in (*model.blocks, model.norm)]
    ):
        model.hidden(ids, **options)
    return inputs, shared


def _from_layer(model: GPT, first: int, inputs: list[Tensor], shared: dict, gate: Tensor) -> list[Tensor]:
    """`inputs` as from `_inputs_of_blocks`, computed anew above layer `first` with the `gate` (L, H)."""
    inputs = inputs[: first + 1]
    for block, its in zip(model.blocks[first:], gate[first:]):
        inputs.append(block(inputs[-1], **(shared | {"head_gate": None if its.all() else its})))
    return inputs


def _filled(model: GPT, fills: Tensor) -> contextlib.AbstractContextManager:
    """While it is open, `fills` (L, H, D) are added to what the output projections get; where the gate has made zeros, they stand alone."""
    return _until_done(
        [
            block.attn.o_proj.register_forward_pre_hook(lambda module, args, fill=fill.flatten(): (args[0] + fill,))
            for block, fill in zip(model.blocks, fills)
        ]
    )


@contextlib.contextmanager
def _until_done(hooks: list) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
