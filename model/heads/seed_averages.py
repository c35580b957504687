"""Head ablation of several trained models of one configuration, averaged over their seeds.

Heads have no identity across seeds: nothing relates head 3 of one model to head 3 of another. So only figures that stay
the same if the heads of a layer are renumbered are averaged, see QUANTITIES.
"""

from collections.abc import Sequence

from tril.model.heads.ablation import METHODS, Ablation
from tril.model.intervals import Interval, mean_interval

WHOLE = "whole"  # in place of a method, for the whole model
QUANTITIES = {  # name -> what is averaged over seeds; rises are those of the loss, in nats per token
    "loss": "loss of the whole model",
    "layer": "sum over the heads of layer `index` of the rise without each of them alone; layers count from 0",
    "sum": "the same over all layers",
    "rank": "rise without one head: the largest of a model (index 1), the second largest (2), ...; the noise of the "
    "measurement raises the first ones and lowers the last ones",
    "removed": "rise without the `index` least important heads, in each model's own order",
    "rising": "number of heads without which the loss rises: the corrected interval over the text excludes 0",
    "falling": "number of heads without which it falls",
}

Key = tuple[str, str, int]  # method or WHOLE, name of QUANTITIES, index (0 where there is one figure only)
Averages = dict[Key, Interval]


def comparable_figures(ablation: Ablation) -> dict[Key, float]:
    """The figures of one model that do not depend on the numbers of its heads."""
    figures = {(WHOLE, "loss", 0): ablation.loss}
    for method in METHODS:
        changes, layers = ablation.changes(method), {}
        for (layer, _), change in changes.items():
            layers[layer] = layers.get(layer, 0.0) + change.interval.mean
        ranked = sorted((change.interval.mean for change in changes.values()), reverse=True)
        verdicts = [change.verdict for change in changes.values()]
        figures |= {(method, "layer", layer): total for layer, total in layers.items()}
        figures |= {(method, "sum", 0): sum(layers.values())}
        figures |= {(method, "rank", rank): rise for rank, rise in enumerate(ranked, 1)}
        figures |= {(method, "removed", n): rise.mean for n, rise in enumerate(ablation.curve(method))}
        figures |= {(method, "rising", 0): verdicts.count("rises"), (method, "falling", 0): verdicts.count("falls")}
    return figures


def average(ablations: Sequence[Ablation]) -> Averages:
    """Means over models of one configuration that differ in their seed, with intervals over seeds by Student's t.

    All models are measured on the same text, so an interval says nothing about the choice of the text. One model has no
    interval.
    """
    figures = [comparable_figures(ablation) for ablation in ablations]
    assert all(other.keys() == figures[0].keys() for other in figures), "the models have different shapes"
    return {key: mean_interval([of_seed[key] for of_seed in figures]) for key in figures[0]}
