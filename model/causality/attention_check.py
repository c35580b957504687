"""The check of the attention weights, which names layer and head.

B batch, T queries, S keys, H heads, D head size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from tril.model.causality.attention_probe import formula, used_weights
from tril.model.causality.case import Case, Result, first_true
from tril.model.causality.subject import GPTSubject, Subject, attention_layers


def check_attention(case: Case, ids: Tensor, run: Callable[[Subject, Tensor], object]) -> Iterator[Result]:
    """In each layer and head: no weight on a hidden key, and softmax(q k^T / sqrt(D)) on the visible ones.

    Args:
        ids: (T,).
        run: one pass of the subject over ids (1, T), at once or in chunks.
    """
    subject, length = case.subject, len(ids)
    if not isinstance(subject, GPTSubject):
        returned = subject.attention_weights(ids[None]) or ()
        yield from _no_hidden_weight(case, length, [weights[0] for weights in returned])
        return
    # The hooks of the probe would compile a compiled model again.
    layers = [] if subject.compiled else attention_layers(subject.model)
    used = [used_weights(attn, lambda: run(subject, ids[None]), length)[0] for attn in layers]
    yield from _no_hidden_weight(case, length, used)
    if layers and case.full_past and subject.precision == "32-true":  # otherwise there is no useful bound
        rope = subject.model.config.pos == "rope"
        expected = (
            [x[0] for x in formula(attn, lambda: run(subject, ids[None]), subject.visible(length, layer), rope=rope)]
            for layer, attn in enumerate(layers)
        )
        yield _compare(case, used, expected, sum(w.numel() for w in used), ", but softmax(q k / sqrt(D)) = {:.2g}")


def _no_hidden_weight(case: Case, length: int, used: Sequence[Tensor]) -> Iterator[Result]:
    visible = [case.subject.visible(length, layer).to(weights.device) for layer, weights in enumerate(used)]
    n_hidden = sum(len(weights) * int((~seen).sum()) for weights, seen in zip(used, visible, strict=True))
    expected = ((weights * seen, weights.new_zeros(())) for weights, seen in zip(used, visible, strict=True))
    if used:
        yield _compare(case, used, expected, n_hidden, " on a hidden key")


def _compare(
    case: Case, used: Sequence[Tensor], expected: Iterable[Sequence[Tensor]], tested: int, remark: str
) -> Result:
    """Compares the weights (H, T, S) of each layer.

    Args:
        expected: weights and the rounding error of each, by layer.
        remark: on the first wrong weight, with a field for the expected one.
    """
    worst, bound, where = 0.0, 0.0, ""
    for layer, (weights, (correct, margin)) in enumerate(zip(used, expected, strict=True)):
        difference = (weights.to(correct.device).to(correct.dtype) - correct).abs()
        if (wrong := first_true(~(difference <= margin))) and not where:
            head, query, key = wrong
            where = f"layer {layer}, head {head}, query {query}, key {key}: weight {weights[head, query, key]:.2g}"
            where += remark.format(correct[head, query, key])
        worst, bound = max(worst, difference.max().item()), max(bound, margin.max().item())
    return case.result("attention", used[0].shape[-1], worst, bound, tested, where)
