"""The variants of a model that are certified: other weights, modes and precisions of the same module."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from tril.model.causality.model import Model, randomize

SHARPENING = 10.0  # factor on random weights: scores become so large that a mask of -40 or a clipped one has no effect


@dataclass(frozen=True)
class Variant:
    """Another state of the model.

    Attributes:
        name: in words.
        apply: model -> a changed copy of it; None where this model has no such variant.
        sharp: the weights are so large that rounding is amplified.
        ways: with the other ways to compute the outputs.
        thorough: with these, at every length, with gradients, and with its receptive field.
    """

    name: str
    apply: Callable[[Model], Model | None]
    sharp: bool = False
    ways: bool = False
    thorough: bool = False


UNCHANGED = Variant("weights=own", lambda model: model, thorough=True)


def module_variants(model: Model) -> Iterator[Variant]:
    """The variants of any module; none of a function."""
    if model.module is None:
        return
    yield Variant("weights=random", random_weights, thorough=True)
    yield Variant("mode=training", lambda model: model.changed(nn.Module.train))
    yield Variant("weights=large", lambda model: random_weights(model, SHARPENING, raised=False), sharp=True)
    yield Variant("buffers=1 for 0", filled_buffers)
    yield Variant("mode=with gradients", lambda model: replace(model, grad_mode="grad"))
    yield Variant("mode=inference", lambda model: replace(model, grad_mode="inference"))
    for precision in ("bf16-mixed", "16-mixed"):
        yield Variant(f"precision={precision}", lambda model, p=precision: replace(model, precision=p))
    for precision, dtype in (("bf16-true", torch.bfloat16), ("16-true", torch.float16)):
        yield Variant(
            f"precision={precision}",
            lambda model, p=precision, dtype=dtype: model.changed(lambda module: module.to(dtype), precision=p),
        )


def random_weights(model: Model, scale: float = 1.0, raised: bool = True) -> Model:
    """With random weights: zeros hide leaks. In float64 where the module has a twin: a recurrence forgets so fast that
    float32 shows nothing."""
    generator = torch.Generator().manual_seed(0)
    change = lambda module: randomize(module.cpu(), generator, scale).to(model.device)  # noqa: E731
    random = model.changed(change)
    if not raised:
        return random
    try:
        twin = random.in_float64()
        if twin is not None:
            twin(torch.zeros(model.batch_size or 1, min(37, model.context_length), dtype=torch.long))
        return twin or random
    except Exception:  # code of other projects may raise anything in float64
        return random


def filled_buffers(model: Model) -> Model | None:
    """A factor that is still 0 hides what it is multiplied with."""
    n_filled = 0

    def fill(module: nn.Module) -> nn.Module:
        nonlocal n_filled
        for buffer in module.buffers():
            if buffer.is_floating_point() and not buffer.any():
                buffer.fill_(1.0)
                n_filled += 1
        return module

    changed = model.changed(fill)
    return changed if n_filled else None
