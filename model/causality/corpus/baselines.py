"""Two simple checkers, to compare others with: each does what many projects have in their tests.

B batch, T positions, C width, V vocabulary.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from tril.model.causality.corpus.entry import Entry
from tril.model.causality.corpus.pipelines import Pipeline
from tril.model.causality.corpus.scoring import Finding

TOLERANCE = 1e-6


def last_token(entry: Entry) -> Finding:
    """Changes the last token once, at the context length: a leak is an earlier logit that changes by more than 1e-6."""
    call, ids = _model(entry), _random_ids(entry)
    if call is None:
        return Finding(False)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % entry.vocab_size
    with torch.no_grad():
        difference = call(changed)[:, :-1] - call(ids)[:, :-1]
    return Finding(bool((difference.abs() > TOLERANCE).any()))


def one_gradient(entry: Entry) -> Finding:
    """A leak is a gradient of the logits at the middle position with respect to a later embedding that is not 0."""
    call, ids = _model(entry), _random_ids(entry)
    embedding = next((m for m in _modules(call) if isinstance(m, nn.Embedding)), None)
    if call is None or embedding is None:
        return Finding(False)
    middle, outputs = ids.shape[1] // 2, []
    handle = embedding.register_forward_hook(lambda module, arguments, out: outputs.append(out))
    logits = call(ids)
    handle.remove()
    if not logits.requires_grad:
        return Finding(False)
    [gradient] = torch.autograd.grad(logits[:, middle].sum(), outputs[:1], allow_unused=True)
    return Finding(gradient is not None and bool((gradient[:, middle + 1 :] != 0).any()))


def _model(entry: Entry) -> Callable[[Tensor], Tensor] | None:
    """The model of an entry as a function to logits (B, T, V), in evaluation mode; None for texts."""
    subject = entry.build()
    model = subject.model if isinstance(subject, Pipeline) else subject
    if isinstance(model, nn.Module):
        return _Logits(model.eval())
    return cast(Callable[[Tensor], Tensor], model) if callable(model) else None


def _modules(call: object) -> list[nn.Module]:
    return list(call.modules()) if isinstance(call, nn.Module) else []


class _Logits(nn.Module):
    """A model whose output may hold the logits in a dictionary, a tuple or an object."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids)
        if isinstance(out, dict):
            return out["logits"]
        return out[0] if isinstance(out, tuple) else getattr(out, "logits", out)


def _random_ids(entry: Entry) -> Tensor:
    """(1, T) at the context length."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(entry.vocab_size, (1, entry.context_length), generator=generator)
