"""How much the loss rises without each head: removed one at a time, and one after another. Its output is set to zero.

Letters: G clusters of targets (documents), B batch, T tokens, L layers, H heads, C width, V vocabulary.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tril.model.comparison import Bound, Comparison, compare
from tril.model.generation.generate import inference
from tril.model.gpt import GPT, IGNORE
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.gate import Head, all_heads, head_name
from tril.model.text_clusters import TextClusters


def obstacle(model: GPT) -> str | None:
    """Why the heads of a model cannot be ablated: a sentence whose subject is the model; None if they can."""
    if model.config.n_heads == 0:
        return "has model.n_heads=0, blocks without attention heads"
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        return "has weights that are not finite, as its run diverged"
    return None


@dataclass(frozen=True)
class Ablation:
    """Sums of the losses of each cluster: float64, in nats.

    Attributes:
        clusters: the documents of the text.
        whole: (G,), the whole model.
        single: (L, H, G), each head removed alone.
        order: the heads from the least to the most important, by `single`.
        removal: (1 + L*H, G), with the first 0, 1, 2, ... of `order` removed.
    """

    clusters: TextClusters
    whole: Tensor
    single: Tensor
    order: list[Head]
    removal: Tensor

    @property
    def loss(self) -> float:
        """The mean loss of the whole model, in nats per token."""
        return self.clusters.mean(self.whole).mean

    def changes(self) -> dict[Head, Comparison]:
        """The model without each head, compared with the whole one; the intervals of all heads hold together."""
        return dict(zip(sorted(self.order), self._compare(self.single.flatten(0, 1)), strict=True))

    def head_rows(self) -> list[dict[str, Any]]:
        """One row per head, by layer: its name, and the change of the loss without it."""
        return [{"head": head_name(head), **_row(change)} for head, change in self.changes().items()]

    def removal_rows(self) -> list[dict[str, Any]]:
        """One row per number of removed heads, from 0 on; the intervals of all rows hold together."""
        first = {"n_removed": 0, "removed_last": None, "loss": self.loss, "change": 0.0, "low": 0.0, "high": 0.0}
        rows = [first]
        for head, change in zip(self.order, self._compare(self.removal[1:]), strict=True):
            row = {"n_removed": len(rows), "removed_last": head_name(head)}
            rows.append(row | {"loss": self.loss + change.difference.mean} | _row(change))
        return rows

    def _compare(self, without: Tensor) -> list[Comparison]:
        """Sums (n, G) of the model without some heads, compared with the whole one."""
        kept = self.clusters.targets.numpy() > 0
        sizes = self.clusters.targets.numpy()[kept]
        losses = np.concatenate([self.whole[None].numpy(), without.numpy()])[:, None, kept] / sizes  # (1 + n, 1, G)
        return compare(losses, sizes, bound=Bound.MODELS)


def _row(change: Comparison) -> dict[str, Any]:
    interval = change.difference
    return {"change": interval.mean, "low": interval.low, "high": interval.high, "verdict": change.verdict}


def ablate(model: GPT, text: TokenWindows, clusters: TextClusters) -> Ablation:
    """Removes every head alone, then one after another. The model stays unchanged.

    Args:
        clusters: of the targets of `text`.
    """
    heads = all_heads(model.config)
    with inference(list(model.modules())):
        alone = losses_without(model, text, clusters, [[head] for head in heads])  # (1 + L*H, G)
        order = [heads[i] for i in alone[1:].sum(-1).argsort(stable=True)]
        removal = losses_without(model, text, clusters, [order])
    single = alone[1:].view(model.config.n_layers, model.config.n_heads, -1)  # (L, H, G)
    return Ablation(clusters, alone[0], single, order, removal)


def average(ablations: Sequence[Ablation]) -> dict[str, Comparison]:
    """What is comparable over the seeds of a configuration, such as "layer 0" or "rank 1" -> compared with the whole
    model.

    Heads have no identity across seeds, so what is averaged does not depend on their numbers: the rise of the loss
    summed over the heads of a layer, each removed alone, and the sorted rises. Both are losses of documents like any
    others, so `compare` gives their intervals over seeds and text.
    """
    first, losses = ablations[0], []
    kept = first.clusters.targets.numpy() > 0
    sizes = first.clusters.targets.numpy()[kept]
    n_layers, n_heads, _ = first.single.shape
    for ablation in ablations:  # losses of documents: of the whole model, by layer, by rank
        whole, single = ablation.whole.numpy()[kept], ablation.single.numpy()[..., kept]  # (G,), (L, H, G)
        layers = whole + (single - whole).sum(1)  # (L, G)
        ranked = [single[head] for head in reversed(ablation.order)]
        losses.append(np.stack([whole, *layers, *ranked]) / sizes)
    names = [*(f"layer {layer}" for layer in range(n_layers)), *(f"rank {n}" for n in range(1, n_layers * n_heads + 1))]
    return dict(zip(names, compare(np.stack(losses, 1), sizes), strict=True))


def losses_without(
    model: GPT, text: TokenWindows, clusters: TextClusters, removals: Sequence[Sequence[Head]]
) -> Tensor:
    """The losses of each cluster: of the whole model, then for each removal without its first 1, 2, ... heads. On a
    terminal, a progress bar shows the time left.

    With each further head, the layers below it keep their outputs, so the model runs from that layer on. It must be in
    evaluation mode.

    Returns:
        Sums in nats, (1 + number of heads in all removals, G) float64.
    """
    n_rows, first = 1 + sum(map(len, removals)), 0
    sums = torch.zeros(n_rows, len(clusters.targets), dtype=torch.float64)
    bar = tqdm(total=n_rows * len(text.ids), desc="removing heads", disable=None, leave=False)
    for ids, targets, options in text.batches(model.embed.weight.device):
        whole, shared = _block_inputs(model, ids, options)
        sums[0] += clusters.sums(_losses(model, whole[-1], targets), first)
        row = 1
        for heads in removals:
            inputs, gate = whole, torch.ones(model.config.n_layers, model.config.n_heads, device=ids.device)  # (L, H)
            for layer, head in heads:
                gate[layer, head] = 0
                inputs = _run_from(model, layer, inputs, shared, gate)
                sums[row] += clusters.sums(_losses(model, inputs[-1], targets), first)
                row += 1
                bar.update(len(ids))
        first += len(ids)
    bar.close()
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


def _run_from(model: GPT, first: int, inputs: list[Tensor], shared: dict, gate: Tensor) -> list[Tensor]:
    """Recomputes `inputs`, as from `_block_inputs`, above layer `first` with the gate (L, H)."""
    inputs = inputs[: first + 1]
    for layer, block in enumerate(model.blocks[first:], first):
        layer_gate = None if gate[layer].all() else gate[layer]  # (H,)
        inputs.append(block(inputs[-1], **(shared | {"head_gate": layer_gate})))
    return inputs
