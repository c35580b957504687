"""The other states in which a model is certified: other weights, modes, precisions and arguments of the same module."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.model import Model, Way, randomize

SHARPENING = 10.0  # factor on random weights: scores become so large that a mask of -40 or a clipped one has no effect
RANDOM = "weights=random"
OUTLIERS, OUTLIER_SHARE = 1000.0, 0.1  # factor on the rows of some outputs, as trained models have them


Variant = tuple[str, Callable[[Model], Model]]  # a state in words, and what makes a copy of a model that is in it


def module_variants(model: Model) -> Iterator[Variant]:
    """The variants of any module; none of a function."""
    if model.module is None:
        return
    yield RANDOM, random_weights
    yield "mode=training", lambda model: model.changed(nn.Module.train)
    yield "weights=large", lambda model: model.changed(lambda m: redrawn(m, SHARPENING))
    if empty := [name for name, b in model.module.named_buffers() if b.is_floating_point() and not b.any()]:
        yield "buffers=1 for 0", lambda model: model.changed(lambda m: filled(m, empty))
    yield "mode=with gradients", lambda model: replace(model, grad_mode="grad")
    yield "mode=inference", lambda model: replace(model, grad_mode="inference")
    for precision in ("bf16-mixed", "16-mixed"):
        yield f"precision={precision}", lambda model, p=precision: replace(model, precision=p)
    for p, dtype in (("bf16-true", torch.bfloat16), ("16-true", torch.float16)):
        yield f"precision={p}", lambda model, p=p, d=dtype: model.changed(lambda m: m.to(d), precision=p)


def further_variants(model: Model) -> Iterator[Variant]:
    """Variants of any module in what the others hold constant; none of a function."""
    if model.module is None:
        return
    yield "weights=heavy-tailed", lambda model: model.changed(with_outliers)
    for name, call in model.calls.items():
        yield name, lambda model, call=call: replace(model, call=call)
    if hasattr(model.module, "gradient_checkpointing_enable"):
        yield "mode=gradient checkpointing", lambda model: model.changed(checkpointed)
    yield "threads=1 more", lambda model: replace(model, call=with_another_thread(model.call))
    short = lambda model: model.changed(context_length=min(3, model.context_length))  # noqa: E731
    yield "a fresh copy with a short text", short


def redrawn(module: nn.Module, scale: float = 1.0) -> nn.Module:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return randomize(module.cpu(), torch.Generator().manual_seed(0), scale).to(device)


def random_weights(model: Model) -> Model:
    """Zeros hide leaks. In float64 where that runs: a recurrence forgets so fast that float32 shows nothing."""
    random = model.changed(redrawn)
    with contextlib.suppress(Exception):  # code of other projects may raise anything in float64
        if (twin := random.in_float64()) is not None:
            twin(torch.zeros(model.batch_size or 1, min(37, model.context_length), dtype=torch.long))
            return twin
    return random


def filled(module: nn.Module, buffers: Sequence[str]) -> nn.Module:
    """A factor that is still 0 hides what it is multiplied with."""
    for name in buffers:
        module.get_buffer(name).fill_(1.0)
    return module


@torch.no_grad()
def with_outliers(module: nn.Module) -> nn.Module:
    """Random weights with some rows that are 1,000 times larger, so that clipping and guards against overflow act."""
    generator, module = torch.Generator().manual_seed(1), redrawn(module)
    for p in module.parameters():
        if p.requires_grad and p.ndim:
            rows = torch.rand(len(p), generator=generator) < OUTLIER_SHARE
            rows[torch.randint(len(p), (1,), generator=generator)] = True
            p[rows.to(p.device)] *= OUTLIERS
    return module


def checkpointed(module: nn.Module) -> nn.Module:
    module.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue] of transformers
    return module.train()


def with_another_thread(call: Way) -> Way:
    def run(function: Any, ids: Tensor) -> Tensor:
        n = torch.get_num_threads()
        torch.set_num_threads(n + 1)
        try:
            return call(function, ids)
        finally:
            torch.set_num_threads(n)

    return run
