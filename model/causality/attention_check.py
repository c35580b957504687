"""The check of the attention weights, which names layer and head.

B batch, T queries, S keys, H heads, D head size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from tril.model.causality.attention_probe import formula, used_weights
from tril.model.causality.case import Case, Result, first_true
from tril.model.causality.subject import Subject

FORMULA = ", but softmax(q k / sqrt(D)) = {:.2g}"


def check_attention(case: Case, ids: Tensor, run: Callable[[Subject, Tensor], object]) -> Iterator[Result]:
    """In each layer and head: no weight on a hidden key, and softmax(q k^T / sqrt(D) + bias) on the visible ones.

    Args:
        ids: (T,).
        run: one pass of the subject over ids (1, T), at once or in chunks.
    """
    subject, length = case.subject, len(ids)
    layers = subject.probed_layers(length)
    if not layers:
        used = [weights[0] for weights in subject.attention_weights(ids[None]) or ()]
        yield from _no_hidden_weight(case, length, used, [subject.visible(length, i) for i in range(len(used))])
        return

    def once():
        return run(subject, ids[None])

    names, visible = [layer.name for layer in layers], [layer.visible for layer in layers]
    sizes = [seen.shape[-2:] for seen in visible]
    used = [used_weights(layer.module, once, s, t)[0] for layer, (t, s) in zip(layers, sizes, strict=True)]
    yield from _no_hidden_weight(case, length, used, visible, names)
    if case.full_past and subject.precision == "32-true":  # otherwise there is no useful bound
        expected = ([x[0] for x in formula(layer, once)] for layer in layers)
        yield _compare(case, length, used, expected, sum(w.numel() for w in used), FORMULA, names)


def _no_hidden_weight(
    case: Case, length: int, used: Sequence[Tensor], visible: Sequence[Tensor], names: Sequence[str] = ()
) -> Iterator[Result]:
    visible = [seen.to(weights.device).expand_as(weights) for seen, weights in zip(visible, used, strict=True)]
    n_hidden = sum(int((~seen).sum()) for seen in visible)
    expected = ((weights * seen, weights.new_zeros(())) for weights, seen in zip(used, visible, strict=True))
    if used:
        yield _compare(case, length, used, expected, n_hidden, " on a hidden key", names)


def _compare(
    case: Case,
    length: int,
    used: Sequence[Tensor],
    expected: Iterable[Sequence[Tensor]],
    tested: int,
    remark: str,
    names: Sequence[str] = (),
) -> Result:
    """Compares the weights (H, T, S) of each layer.

    Args:
        expected: weights and the rounding error of each, by layer.
        remark: on the first wrong weight, with a field for the expected one.
        names: of the layers; their numbers by default.
    """
    worst, bound, where = 0.0, 0.0, ""
    leak: dict[str, int] = {}
    for layer, (weights, (correct, margin)) in enumerate(zip(used, expected, strict=True)):
        difference = (weights.to(correct.device).to(correct.dtype) - correct).abs()
        if (wrong := first_true(~(difference <= margin))) and not where:
            name, (head, query, key) = names[layer] if names else f"layer {layer}", wrong
            leak = {"layer": layer, "head": head, "query": query, "key": key}
            where = f"{name}, head {head}, query {query}, key {key}: weight {weights[head, query, key]:.2g}"
            where += remark.format(correct[head, query, key])
        worst, bound = max(worst, difference.max().item()), max(bound, margin.max().item())
    return case.result("attention", length, worst, bound, tested, where, **leak)
