"""The first call of a model of another project: whether it returns logits at all.

B batch, T positions, V vocabulary.
"""

import torch
from torch import Tensor

from tril.model.causality.case import ModelError, one_line
from tril.model.causality.subject import Subject


class WrongLogits(ModelError):
    """The model returns no logits, or logits of another shape."""


def checked_logits(name: str, logits: object, ids: Tensor, vocab_size: int) -> Tensor:
    """The logits, if they are floats (B, T, V). Raises WrongLogits."""
    shape = (*ids.shape, vocab_size)
    if isinstance(logits, Tensor) and tuple(logits.shape) == shape and logits.is_floating_point():
        return logits
    got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    raise WrongLogits(f"{name} must return floats (B, T, V) = {shape} for ids {tuple(ids.shape)}, and returned {got}")


@torch.no_grad()
def check_calls(name: str, subject: Subject, longest: int) -> None:
    """Calls the subject at the longest length.

    Raises:
        ModelError: a call raises any exception or returns no finite logits (B, T, V); one line.
    """
    shape = (2, longest)
    ids = torch.randint(subject.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(subject.device)
    where = f"{name} with ids {shape} below {subject.vocab_size}"
    try:
        logits = subject(ids)
    except WrongLogits:
        raise
    except Exception as error:  # code of other projects may raise anything
        raise ModelError(f"{where} ends in {one_line(error.__cause__ or error)}") from error
    if not logits.isfinite().all():
        raise ModelError(f"{where} returns nan or infinite logits, which cannot be compared; return finite ones")
