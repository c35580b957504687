"""The check of the attention weights, which names layer and head.

B batch, T queries, S keys, H heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tril.model.causality.attention_probe import formula, used_weights
from tril.model.causality.case import Case, Result
from tril.model.causality.subject import GPTSubject, Subject, attention_layers


def check_attention(case: Case, ids: Tensor, run: Callable[[Subject, Tensor], object]) -> Iterator[Result]:
    """In each layer and head: no weight on a hidden key, and softmax(q k^T / sqrt(D)) on the visible ones.

    Args:
        ids: (T,).
        run: one pass of the subject over ids (1, T), at once or in chunks.
    """
    subject, length = case.subject, len(ids)
    if not isinstance(subject, GPTSubject):
        returned = subject.attention_weights(ids[None])
        if returned is not None:
            yield _no_hidden_weight(case, length, [weights[0] for weights in returned])
        return
    attentions = attention_layers(subject.model)
    if subject.compiled or not attentions:  # the hooks of the probe would compile the model again
        return
    used = [used_weights(attn, lambda: run(subject, ids[None]), length)[0] for attn in attentions]  # (H, T, S) each
    yield _no_hidden_weight(case, length, used)
    if case.full_past and subject.precision == "32-true":  # lower precision or dropout leaves no useful bound
        yield _follows_the_formula(case, subject, used, lambda: run(subject, ids[None]))


def _follows_the_formula(case: Case, subject: GPTSubject, used: Sequence[Tensor], run: Callable[[], object]) -> Result:
    error, bound, where, length = 0.0, 0.0, "", used[0].shape[-1]
    for layer, (attn, weights) in enumerate(zip(attention_layers(subject.model), used, strict=True)):
        rope = subject.model.config.pos == "rope"
        expected, margin = (x[0] for x in formula(attn, run, subject.visible(length, layer), rope=rope))
        difference = (weights.to(expected.device).double() - expected).abs()
        wrong = torch.nonzero(~(difference <= margin))[:1].tolist()
        if wrong and not where:
            head, query, key = wrong[0]
            where = (
                f"layer {layer}, head {head}, query {query}, key {key}: weight {weights[head, query, key]:.2g}, "
                f"but softmax(q k / sqrt(D)) = {expected[head, query, key]:.2g}"
            )
        error, bound = max(error, difference.max().item()), max(bound, margin.max().item())
    return case.result("attention", length, error, bound, sum(w.numel() for w in used), not where, where)


def _no_hidden_weight(case: Case, length: int, weights: Sequence[Tensor]) -> Result:
    """weights: (H, T, S) of each layer."""
    worst, where, tested = 0.0, "", 0
    for layer, layer_weights in enumerate(weights):
        hidden = ~case.subject.visible(length, layer).to(layer_weights.device)
        layer_weights = layer_weights.float() * hidden
        wrong = torch.nonzero(layer_weights)[:1].tolist()  # NaN is not 0 either
        if wrong and not where:
            head, query, key = wrong[0]
            weight = layer_weights[head, query, key]
            where = f"layer {layer}, head {head}, query {query}, key {key}: weight {weight:.2g} on a hidden key"
        worst, tested = max(worst, layer_weights.abs().max().item()), tested + len(layer_weights) * int(hidden.sum())
    return case.result("attention", length, worst, 0.0, tested, not where, where)
