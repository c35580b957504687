"""How much the loss rises without each head: removed one at a time, and one after another.

A head is removed in two ways: its output is set to zero, or to its mean over the text. The mean keeps the constant part
that later layers are used to, and removes only what depends on the tokens.

Letters: N windows, B batch, T tokens, L layers, H heads, D head size, C width, V vocabulary.
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
from tril.model.intervals import Interval, mean_interval

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


@dataclass(frozen=True)
class Change:
    """Rise of the mean loss of the windows, in nats per token, paired by window.

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
    """Mean losses of the N windows: float64, in nats per token. The dictionaries have the keys METHODS.

    Attributes:
        whole: (N,), the whole model.
        single: (L, H, N), each head removed alone.
        orders: the heads from the least to the most important, by `single`.
        removal: (1 + L*H, N), with the first 0, 1, 2, ... of `orders` removed.
    """

    whole: Tensor
    single: dict[str, Tensor]
    orders: dict[str, list[Head]]
    removal: dict[str, Tensor]

    def changes(self, method: str) -> dict[Head, Change]:
        """The change of the loss for each head removed alone."""
        differences = (self.single[method] - self.whole).flatten(0, 1)  # (L*H, N)
        corrected = 1 - (1 - CONFIDENCE) / len(differences)
        return {
            head: Change(paired(difference), paired(difference, corrected))
            for head, difference in zip(sorted(self.orders[method]), differences, strict=True)
        }

    def curve(self, method: str) -> list[Interval]:
        """The rise of the loss with 0, 1, 2, ... of `orders` removed."""
        return [paired(losses - self.whole) for losses in self.removal[method]]

    def table(self) -> list[list[str]]:
        """The changes as rows of a table, of which the first is the header."""
        rows = [["head"], *([head_name(head)] for head in sorted(self.orders[METHODS[0]]))]
        for method in METHODS:
            rows[0] += [f"removed by {method}", "corrected", "the loss"]
            for row, change in zip(rows[1:], self.changes(method).values(), strict=True):
                rise = f"{change.interval.mean:+.4f} ± {half_width(change.interval):.4f}"
                row += [rise, f"± {half_width(change.corrected):.4f}", change.verdict]
        return rows


def limits(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None and interval.high is not None, "an interval needs two windows with finite losses"
    return interval.low, interval.high


def half_width(interval: Interval) -> float:
    return limits(interval)[1] - interval.mean


def paired(difference: Tensor, confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of differences (N,) on the same windows.

    One window is one observation, as the tokens in it are not independent.
    """
    return mean_interval(difference.tolist(), confidence)


def ablate(model: GPT, text: TokenWindows) -> Ablation:
    """Removes every head alone, then one after another, with both methods. The model stays unchanged."""
    heads = all_heads(model.config)
    with inference(list(model.modules())):
        means = mean_outputs(model, text)  # (L, H, D)
        alone = losses_without(model, text, [(method, [head]) for method in METHODS for head in heads], means)
        whole, shape = alone[0], (len(METHODS), model.config.n_layers, model.config.n_heads, -1)
        single = dict(zip(METHODS, alone[1:].view(shape), strict=True))  # (L, H, N) each
        ranks = {method: losses.mean(-1).flatten().argsort(stable=True) for method, losses in single.items()}
        orders = {method: [heads[i] for i in rank] for method, rank in ranks.items()}
        nested = losses_without(model, text, list(orders.items()), means)[1:].split(len(heads))  # (L*H, N) each
        removal = {method: torch.cat([whole[None], losses]) for method, losses in zip(METHODS, nested, strict=True)}
    return Ablation(whole, single, orders, removal)


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


def losses_without(model: GPT, text: TokenWindows, removals: Sequence[Removal], means: Tensor) -> Tensor:
    """The mean loss of each window: of the whole model, then for each removal without its first 1, 2, ... heads.

    With each further head, the layers below it keep their outputs, so the model runs from that layer on. It must be in
    evaluation mode.

    Args:
        means: (L, H, D), from `mean_outputs`.

    Returns:
        (1 + number of heads in all removals, N) float64.
    """
    batches = []
    for ids, targets, options in text.batches(model.embed.weight.device):
        whole, shared = _block_inputs(model, ids, options)
        losses = [_mean_losses(model, whole[-1], targets)]
        for method, heads in removals:
            inputs, gate = whole, torch.ones_like(means[..., 0])  # (L, H)
            for layer, head in heads:
                gate[layer, head] = 0
                fills = (1 - gate)[..., None] * means if method == "mean" else None  # (L, H, D)
                inputs = _run_from(model, layer, inputs, shared, gate, fills)
                losses.append(_mean_losses(model, inputs[-1], targets))
        batches.append(torch.stack(losses))
    return torch.cat(batches, dim=1)


def _mean_losses(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of each window from the input of the final norm, x (B, T, C): (B,) float64."""
    logits = model.logits(model.norm(x)).float()  # (B, T, V)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")  # (B*T,)
    return nll.view_as(targets).cpu().double().sum(1) / (targets != IGNORE).sum(1).cpu()


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
