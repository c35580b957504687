"""Certifies any model in one call: `certify`, and `assert_causal` for tests.

B batch, T positions, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tril.data.settings import explain
from tril.model.causality.certificate import Certificate
from tril.model.causality.certificate import certify as run_cases
from tril.model.causality.grids.callable_grid import Sizes, module_cases
from tril.model.causality.receptive_field import expected_dependencies
from tril.model.causality.subject import attention_windows
from tril.model.gpt import GPT

Pattern = Callable[[int], Tensor] | Tensor  # bool (T, T), True = may be seen


def certify(
    model: Callable[..., Any],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    expected: Pattern | None = None,
    receptive_field: int | None = None,
    special_ids: Sequence[int] = (),
    device: str | torch.device | None = None,
    budget_seconds: float = 10.0,
    exhaustive: bool = False,
    name: str | None = None,
) -> Certificate:
    """Tests that no output of a model depends on the future, and that each depends on all of its past.

    The model is not changed: a module is copied, and the random state is restored. Of a `GPT` of Tril, this instance is
    tested as it is, with the windows of its config; `scripts/certify.py` tests its config on all backends.

    Args:
        model: an `nn.Module` or a function from ids (B, T) int64 to logits (B, T, V); the logits may also be the first
            element of a tuple, or the entry or attribute `logits`.
        vocab_size: V; None: that of `model.config`.
        context_length: largest T; None: that of `model.config`.
        expected: what each output may see, as a function of T or as a matrix for the largest T; None: its own position
            and all before.
        receptive_field: number of positions before its own that each output depends on; None: all.
        special_ids: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        device: None: that of the parameters, else the CPU.
        budget_seconds: about what it takes for a small model; larger models and longer texts are tested at fewer
            positions, and the canary test and gradients come in addition.
        exhaustive: test every pair of positions in every case, at any cost.
        name: of the model in the certificate; None: its class or function.

    Returns:
        The certificate; `passed` is the verdict, `failures` are the failed results, `str()` is all of it as text.

    Raises:
        ValueError: invalid arguments. `ModelError`, a ValueError: the model raises an exception, or returns no logits.
    """
    name = name or str(getattr(model, "__qualname__", type(model).__name__))
    sizes = {"vocab_size": vocab_size, "context_length": context_length, "receptive_field": receptive_field}
    for key, names in CONFIG_NAMES.items():
        if sizes[key] is None:
            sizes[key] = next((n for n in map(_config_of(model), names) if isinstance(n, int)), None)
    try:
        checked = Sizes(**sizes)  # pyright: ignore[reportArgumentType] None is refused with a message
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    pattern = _pattern(expected, checked.context_length)
    if pattern is None and receptive_field is None and isinstance(model, GPT):
        windows = attention_windows(model.config)
        pattern = functools.partial(expected_dependencies, windows=windows)

    return run_cases(
        name,
        module_cases(
            name,
            model,
            **vars(checked),
            expected=pattern,
            special=special_ids,
            device=device or _device_of(model),
            exhaustive=exhaustive,
            seconds=budget_seconds,
        ),
    )


def assert_causal(model: Callable[..., Any], **arguments: Any) -> None:
    """Raises AssertionError with the text of the certificate if `certify(model, ...)` does not pass."""
    certificate = certify(model, **arguments)
    if not certificate.passed:
        raise AssertionError(f"{certificate.verdict()}\n{certificate}")


CONFIG_NAMES = {
    "vocab_size": ("vocab_size",),
    "context_length": ("context_length", "max_position_embeddings", "n_positions", "block_size", "max_seq_len"),
}


def _config_of(model: object) -> Callable[[str], object]:
    config = getattr(model, "config", None)
    return lambda name: getattr(config, name, None)


def _device_of(model: object) -> torch.device:
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def _pattern(expected: Pattern | None, context_length: int) -> Callable[[int], Tensor] | None:
    if not isinstance(expected, Tensor):
        return expected
    if expected.shape != (context_length, context_length) or expected.dtype != torch.bool:
        size = f"bool ({context_length}, {context_length})"
        raise ValueError(f"expected is {expected.dtype} {tuple(expected.shape)}, and must be {size}")
    return lambda length: expected[:length, :length]
