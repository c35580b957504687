"""How much the loss rises without each head: removed one at a time, and one after another.

A head is removed in two ways: its output is set to zero, or to its mean over the text. The mean keeps the constant part
that later layers are used to, and removes only what depends on the tokens.

Letters: G clusters of targets (documents), B batch, T tokens, L layers, H heads, D head size, C width, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT, IGNORE, GPTConfig
from tril.model.heads.attention_maps import TokenWindows
from tril.model.intervals import ClusteredMean, Interval
from tril.model.text_clusters import TextClusters

METHODS: tuple[str, ...] = ("zero", "mean")
CONFIDENCE = 0.95

Head = tuple[int, int]  # layer, head
Removal = tuple[str, Sequence[Head]]  # method, and the heads to remove one after another


def head_name(head: Head) -> str:
    return "L{}H{}".format(*head)


def all_heads(config: GPTConfig) -> list[Head]:
    return [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]


def head_gate(config: GPTConfig, names: Sequence[str]) -> Tensor:
    """The gate that removes the named heads ("L0H3": layer 0, head 3): (L, H) float32, 0 for those and 1 for others.

    Raises:
        ValueError: the model has no such head.
    """
    if config.n_heads == 0:
        raise ValueError("model.n_heads=0: a model without attention has no heads to remove")
    heads = {head_name(head): head for head in all_heads(config)}
    unknown = [name for name in names if name not in heads]
    if unknown:
        valid = f"L0H0 to {head_name((config.n_layers - 1, config.n_heads - 1))}"
        shape = f"{config.n_layers} layers of {config.n_heads} heads"
        raise ValueError(f"the model has no head {', '.join(map(repr, unknown))}; with {shape}, use {valid}")
    gate = torch.ones(config.n_layers, config.n_heads)
    for name in names:
        gate[heads[name]] = 0
    return gate


def obstacle(model: GPT) -> str | None:
    """Why the heads of a model cannot be ablated: a sentence whose subject is the model; None if they can."""
    if model.config.n_heads == 0:
        return "has model.n_heads=0, blocks without attention heads"
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        return "has weights that are not finite, as its run diverged"
    return None


@dataclass(frozen=True)
class Change:
    """Rise of the mean loss, in nats per token, with intervals over the documents of the text.

    Attributes:
        interval: at CONFIDENCE, for this head alone.
        corrected: at 1 - (1 - CONFIDENCE) / (L * H), Bonferroni's correction: all heads' intervals hold at once.
    """

    interval: Interval
    corrected: Interval

    @property
    def verdict(self) -> str:
        """One of: rises, falls, not distinguishable (from no change, as the corrected interval includes 0)."""
        low, high = limits(self.corrected)
        if low <= 0 <= high:
            return "not distinguishable"
        return "rises" if self.corrected.mean > 0 else "falls"


@dataclass(frozen=True)
class Ablation:
    """Sums of the losses of each cluster: float64, in nats. The dictionaries have the keys METHODS.

    Attributes:
        clusters: the documents of the text.
        whole: (G,), the whole model.
        single: (L, H, G), each head removed alone.
        orders: the heads from the least to the most important, by `single`.
        removal: (1 + L*H, G), with the first 0, 1, 2, ... of `orders` removed.
    """

    clusters: TextClusters
    whole: Tensor
    single: dict[str, Tensor]
    orders: dict[str, list[Head]]
    removal: dict[str, Tensor]

    @property
    def loss(self) -> float:
        """The mean loss of the whole model, in nats per token."""
        return self.clusters.mean(self.whole).mean

    def changes(self, method: str) -> dict[Head, Change]:
        """The change of the loss for each head removed alone."""
        rises = [self.rise(sums) for sums in self.single[method].flatten(0, 1)]  # of L*H heads
        corrected = 1 - (1 - CONFIDENCE) / len(rises)
        return {
            head: Change(rise.interval(CONFIDENCE), rise.interval(corrected))
            for head, rise in zip(sorted(self.orders[method]), rises, strict=True)
        }

    def curve(self, method: str) -> list[Interval]:
        """The rise of the loss with 0, 1, 2, ... of `orders` removed."""
        return [self.rise(sums).interval(CONFIDENCE) for sums in self.removal[method]]

    def rise(self, sums: Tensor) -> ClusteredMean:
        """The rise of the mean loss above that of the whole model, paired: what both find hard cancels.

        Args:
            sums: (G,), of the model without some heads.
        """
        return self.clusters.mean(sums - self.whole)

    def table(self) -> list[list[str]]:
        """The changes as rows of a table, of which the first is the header."""
        rows = [["head"], *([head_name(head)] for head in sorted(self.orders[METHODS[0]]))]
        for method in METHODS:
            rows[0] += [f"removed by {method}", "corrected", "the loss"]
            for row, change in zip(rows[1:], self.changes(method).values(), strict=True):
                rise = f"{change.interval.mean:+.4f} ± {change.interval.half_width:.4f}"
                row += [rise, f"± {change.corrected.half_width:.4f}", change.verdict]
        return rows


def limits(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None and interval.high is not None, "an interval needs two clusters with finite losses"
    return interval.low, interval.high


def ablate(model: GPT, text: TokenWindows, clusters: TextClusters) -> Ablation:
    """Removes every head alone, then one after another, with both methods. The model stays unchanged.

    Args:
        clusters: of the targets of `text`.
    """
    heads = all_heads(model.config)
    with inference(list(model.modules())):
        means = mean_outputs(model, text)  # (L, H, D)
        each = [(method, [head]) for method in METHODS for head in heads]
        alone = losses_without(model, text, clusters, each, means)
        whole, shape = alone[0], (len(METHODS), model.config.n_layers, model.config.n_heads, -1)
        single = dict(zip(METHODS, alone[1:].view(shape), strict=True))  # (L, H, G) each
        ranks = {method: sums.sum(-1).flatten().argsort(stable=True) for method, sums in single.items()}
        orders = {method: [heads[i] for i in rank] for method, rank in ranks.items()}
        chains = losses_without(model, text, clusters, list(orders.items()), means)[1:]  # (number of METHODS * L*H, G)
        removal = {
            method: torch.cat([whole[None], sums])
            for method, sums in zip(METHODS, chains.split(len(heads)), strict=True)
        }
    return Ablation(clusters, whole, single, orders, removal)


def mean_outputs(model: GPT, text: TokenWindows) -> Tensor:
    """The mean output of every head over all positions of the text, before the output projection: (L, H, D)."""
    sums, n = [torch.zeros(1, dtype=torch.float64)] * len(model.blocks), 0
    with contextlib.ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):

            def add(module, args, layer=layer):
                sums[layer] = sums[layer] + args[0].cpu().double().sum((0, 1))  # (B, T, H*D) -> (H*D,)

            hooks.enter_context(block.get_submodule("attn.o_proj").register_forward_pre_hook(add))
        for ids, _, options in text.batches(model.embed.weight.device):
            model.hidden(ids, **options)
            n += ids.numel()
    means = torch.stack(sums) / n
    return means.to(model.embed.weight).unflatten(-1, (model.config.n_heads, -1))


def losses_without(
    model: GPT, text: TokenWindows, clusters: TextClusters, removals: Sequence[Removal], means: Tensor
) -> Tensor:
    """The losses of each cluster: of the whole model, then for each removal without its first 1, 2, ... heads.

    With each further head, the layers below it keep their outputs, so the model runs from that layer on. It must be in
    evaluation mode.

    Args:
        means: (L, H, D), from `mean_outputs`.

    Returns:
        Sums in nats, (1 + number of heads in all removals, G) float64.
    """
    n_rows, first = 1 + sum(len(heads) for _, heads in removals), 0
    sums = torch.zeros(n_rows, len(clusters.targets), dtype=torch.float64)
    for ids, targets, options in text.batches(model.embed.weight.device):
        whole, shared = _block_inputs(model, ids, options)
        sums[0] += clusters.sums(_losses(model, whole[-1], targets), first)
        row = 1
        for method, heads in removals:
            inputs, gate = whole, torch.ones_like(means[..., 0])  # (L, H)
            for layer, head in heads:
                gate[layer, head] = 0
                fills = (1 - gate)[..., None] * means if method == "mean" else None  # (L, H, D)
                inputs = _run_from(model, layer, inputs, shared, gate, fills)
                sums[row] += clusters.sums(_losses(model, inputs[-1], targets), first)
                row += 1
        first += len(ids)
    return sums


def _losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target from the input of the final norm, x (B, T, C): (B, T), 0 where it is IGNORE."""
    logits = model.logits(model.norm(x)).float()  # (B, T, V)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")  # (B*T,)
    return nll.view_as(targets)


def _block_inputs(model: GPT, ids: Tensor, options: dict) -> tuple[list[Tensor], dict]:
    """The inputs of each block and of the final norm, L + 1 of (B, T, C); and the options that all blocks share."""
    inputs, shared = [], {}

    def keep(module, args, kwargs):
        inputs.append(args[0])
        shared.update(kwargs)

    with contextlib.ExitStack() as hooks:
        for module in (*model.blocks, model.norm):
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        model.hidden(ids, **options)
    return inputs, shared


def _add(constant: Tensor, module, args) -> tuple[Tensor]:
    return (args[0] + constant,)


def _run_from(
    model: GPT, first: int, inputs: list[Tensor], shared: dict, gate: Tensor, fills: Tensor | None
) -> list[Tensor]:
    """Recomputes `inputs`, as from `_block_inputs`, above layer `first` with the gate (L, H).

    `fills` (L, H, D) are added to the inputs of the output projections: where the gate is 0, they replace the output.
    """
    inputs = inputs[: first + 1]
    for layer, block in enumerate(model.blocks[first:], first):
        layer_gate = None if gate[layer].all() else gate[layer]  # (H,)
        fill = contextlib.nullcontext()
        if fills is not None:
            add = functools.partial(_add, fills[layer].flatten())  # (H*D,)
            fill = block.get_submodule("attn.o_proj").register_forward_pre_hook(add)
        with fill:
            inputs.append(block(inputs[-1], **(shared | {"head_gate": layer_gate})))
    return inputs
