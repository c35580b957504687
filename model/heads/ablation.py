"""How much the loss rises without each head: removed one at a time, and one after another. Its output is set to zero.

Letters: G clusters of targets (documents), V variants of a model, S seeds, L layers, H heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.model.comparison import Comparison, compare
from tril.model.config import GPTConfig
from tril.model.generation.generate import inference
from tril.model.gpt import GPT
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.records import all_heads, head_name
from tril.model.text_clusters import TextClusters


def head_gate(config: GPTConfig, names: Sequence[str]) -> Tensor:
    """The gate that removes the named heads ("L0H3": layer 0, head 3): (L, H) float32, 0 for those and 1 for others.

    Raises:
        ValueError: the model has no such head.
    """
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
class Ablation:
    """Sums of the losses of each cluster: float64, in nats.

    Attributes:
        clusters: the documents of the text.
        whole: (G,), the whole model.
        single: (L, H, G), each head removed alone.
    """

    clusters: TextClusters
    whole: Tensor
    single: Tensor

    @property
    def loss(self) -> float:
        """The mean loss of the whole model, in nats per token."""
        return self.clusters.mean(self.whole).mean

    def compare(self, sums: Tensor) -> list[Comparison]:
        """The model without some heads, whose losses have the sums (N, G), compared with the whole one."""
        return _compare(self.clusters, torch.cat([self.whole[None], sums])[:, None], of_models=True)

    def rows(self) -> list[dict[str, Any]]:
        """The change of the loss without each head, by layer; the intervals of all heads hold together."""
        changes, heads = self.compare(self.single.flatten(0, 1)), np.ndindex(*self.single.shape[:2])
        return [{"head": head_name(head), **change_row(change)} for head, change in zip(heads, changes, strict=True)]


def ablate(model: GPT, text: TokenWindows, clusters: TextClusters) -> Ablation:
    """Removes every head alone.

    Args:
        clusters: of the targets of `text`.
    """
    shape = (model.config.n_layers, model.config.n_heads)
    n_heads = math.prod(shape)
    gates = torch.cat([torch.ones(1, n_heads), 1 - torch.eye(n_heads)])  # (1 + L*H, L*H)
    whole, *single = losses_without(model, text, clusters, gates.unflatten(1, shape))
    return Ablation(clusters, whole, torch.stack(single).unflatten(0, shape))


def remove_in_turn(model: GPT, text: TokenWindows, ablation: Ablation) -> list[dict[str, Any]]:
    """Removes one head after another, the least important first: heads that replace each other matter only together.

    Args:
        ablation: of the model on `text`.

    Returns:
        A row for each number of removed heads, from 0 on; the intervals of all rows hold together.
    """
    shape = ablation.single.shape[:2]
    order = ablation.single.sum(-1).flatten().argsort(stable=True)  # (L*H,)
    removed = order[:, None] == torch.arange(len(order))  # (L*H, L*H): row n removes one head
    gates = 1 - removed.cumsum(0).float()
    changes = ablation.compare(losses_without(model, text, ablation.clusters, gates.unflatten(1, shape)))
    rows = [{"n_removed": 0, "removed_last": None, "loss": ablation.loss, "change": 0.0, "low": 0.0, "high": 0.0}]
    for number, (head, change) in enumerate(zip(order.tolist(), changes, strict=True), 1):
        name, loss = head_name(divmod(head, shape[1])), ablation.loss + change.difference.mean
        rows.append({"n_removed": number, "removed_last": name, "loss": loss, **change_row(change)})
    return rows


def losses_without(model: GPT, text: TokenWindows, clusters: TextClusters, gates: Tensor) -> Tensor:
    """The losses of each cluster without some heads, in evaluation mode; the model stays unchanged.

    Each row is a full forward pass over the text. Starting at the layer of the first removed head, as the layers below
    it keep their outputs, would save about half of the time. A terminal shows the time left.

    Args:
        gates: (N, L, H), 0 for the heads that a row removes, and 1 for others.

    Returns:
        Sums in nats, (N, G) float64.
    """
    sums, first = torch.zeros(len(gates), len(clusters.targets), dtype=torch.float64), 0
    bar = tqdm(total=len(gates) * len(text.ids), desc="removing heads", unit=" windows", **PROGRESS)
    with inference(model), bar:
        for ids, targets, options in text.batches(model.embed.weight.device):
            for row, gate in enumerate(gates.to(ids.device)):
                nll = model.nll(ids, targets, head_gate=gate, **options)  # (B, T)
                sums[row] += clusters.sums(nll, first)
                bar.update(len(ids))
            first += len(ids)
    return sums


def average(ablations: Sequence[Ablation]) -> dict[str, Comparison]:
    """What is comparable over the seeds of a configuration, such as "layer 0" or "rank 1" -> compared with the whole
    model.

    Heads have no identity across seeds, so what is averaged does not depend on their numbers: the rise of the loss
    summed over the heads of a layer, each removed alone, and the sorted rises. Both are losses of documents like any
    others, so `compare` gives their intervals over seeds and text.
    """
    sums, (n_layers, n_heads, _) = [], ablations[0].single.shape
    for ablation in ablations:
        layers = ablation.whole + (ablation.single - ablation.whole).sum(1)  # (L, G)
        heads = ablation.single.flatten(0, 1)  # (L*H, G)
        ranked = heads[heads.sum(-1).argsort(stable=True).flip(0)]  # the most important head first
        sums.append(torch.cat([ablation.whole[None], layers, ranked]))  # (1 + L + L*H, G)
    names = [*(f"layer {layer}" for layer in range(n_layers)), *(f"rank {n}" for n in range(1, n_layers * n_heads + 1))]
    return dict(zip(names, _compare(ablations[0].clusters, torch.stack(sums, 1), of_models=False), strict=True))


def change_row(change: Comparison) -> dict[str, Any]:
    interval = change.difference
    return {"change": interval.mean, "low": interval.low, "high": interval.high, "verdict": change.verdict}


def _compare(clusters: TextClusters, sums: Tensor, *, of_models: bool) -> list[Comparison]:
    """Sums of losses (V, S, G): each variant compared with the first one, see `compare`."""
    sizes = clusters.targets.numpy()
    kept = sizes > 0
    return compare(sums.numpy()[..., kept] / sizes[kept], sizes[kept], of_models=of_models)
