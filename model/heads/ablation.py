"""How much the loss rises without each head: removed one at a time. Its output is set to zero.

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

    def rows(self) -> list[dict[str, Any]]:
        """The change of the loss without each head, by layer; the intervals of all heads hold together."""
        sums = torch.cat([self.whole[None], self.single.flatten(0, 1)])  # (1 + L*H, G)
        changes = _compare(self.clusters, sums[:, None], of_models=True)
        heads = np.ndindex(*self.single.shape[:2])
        return [{"head": head_name(head), **change_row(change)} for head, change in zip(heads, changes, strict=True)]


def ablate(model: GPT, text: TokenWindows, clusters: TextClusters) -> Ablation:
    """Removes every head alone, in evaluation mode; the model stays unchanged. A terminal shows the time left.

    Each removal is a full forward pass over the text whose gate is 0 at the removed head. Starting at the layer of the
    removed head, as the layers below it keep their outputs, would save about half of the time.

    Args:
        clusters: of the targets of `text`.
    """
    shape = (model.config.n_layers, model.config.n_heads)
    n_heads, first = math.prod(shape), 0
    gates = torch.cat([torch.ones(1, n_heads), 1 - torch.eye(n_heads)]).unflatten(1, shape)  # (1 + L*H, L, H)
    sums = torch.zeros(len(gates), len(clusters.targets), dtype=torch.float64)
    bar = tqdm(total=len(gates) * len(text.ids), desc="removing heads", unit=" windows", **PROGRESS)
    with inference(model), bar:
        for ids, targets, options in text.batches(model.embed.weight.device):
            for row, gate in enumerate(gates.to(ids.device)):
                nll = model.nll(ids, targets, head_gate=gate, **options)  # (B, T)
                sums[row] += clusters.sums(nll, first)
                bar.update(len(ids))
            first += len(ids)
    return Ablation(clusters, sums[0], sums[1:].unflatten(0, shape))


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
