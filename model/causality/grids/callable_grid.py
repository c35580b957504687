"""The grid of any Python callable from ids to logits, of which nothing but its output is known.

A function is tested by changed tokens; an `nn.Module` also by gradients, with random weights, in training mode and by
the canary test.

B batch, T positions, V vocabulary.
"""

import copy
import functools
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from tril.model.causality.case import MAX_LENGTH, ODD_LENGTH, Case, lengths_to_test
from tril.model.causality.grids.first_call import check_calls, checked_logits
from tril.model.causality.grids.gpt_grid import LARGE_BUDGET, SMALL_BUDGET
from tril.model.causality.receptive_field import embeddings_as_leaves
from tril.model.causality.subject import Subject, float64_device, randomize
from tril.model.validation import strict_settings

FLOAT64_ROUNDING = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps  # relative to that of float32


@dataclass(frozen=True, config=strict_settings())
class Sizes:
    """What a callable does not tell about itself.

    Attributes:
        vocab_size: V, at least 3: one token for end-of-text, and two to change one into the other.
        context_length: largest T.
        receptive_field: number of positions before its own that each output depends on, no more and no fewer; None:
            all.
    """

    vocab_size: Annotated[int, Field(ge=3)]
    context_length: Annotated[int, Field(ge=1)]
    receptive_field: Annotated[int, Field(ge=0)] | None = None


class CallableSubject(Subject):
    """The callable named by `spec`, with its logits checked."""

    def __init__(self, spec: str, function: Callable, *, vocab_size: int, precision: str = "32-true", **options):
        module = function if isinstance(function, nn.Module) else None
        # A bound method instead of a closure, so that a deep copy runs the copied module.
        super().__init__(self._logits, vocab_size=vocab_size, module=module, precision=precision, **options)
        self.spec, self.function, self.options = spec, function, options

    def _logits(self, ids: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's RNNs have no backward in evaluation mode
            return checked_logits(f"call={self.spec}", self.function(ids), ids, self.vocab_size)

    @functools.cached_property
    def differentiable(self) -> bool:
        """False for a function, and for a module that looks up no token in an `nn.Embedding`."""
        if self.module is None:
            return False
        shape = (2, min(2, self.context_length))  # a norm over a single number has no variance
        ids = torch.ones(shape, dtype=torch.long, device=self.device)
        with embeddings_as_leaves(self.module, ids) as leaves:
            self(ids)
        return bool(leaves)

    def in_float64(self) -> "CallableSubject | None":
        if self.module is None:
            return None
        options = self.options | {"vocab_size": self.vocab_size, "device": float64_device(self.device)}
        return CallableSubject(self.spec, self._float64_copy(self.module), precision="64-true", **options)


def callable_cases(spec: str, sizes: Sizes, *, device: str = "cpu", exhaustive: bool = False) -> Iterator[Case]:
    """The grid of a function from ids (B, T) int64 to logits (B, T, V).

    A function has no gradient, so a dependency that is smaller than its rounding is not found.

    Args:
        spec: package.module:function, a function or an `nn.Module` instance; also searched in the working directory.
        exhaustive: test every pair of positions in every case, at any cost.

    Raises:
        ValueError: before the first case, for a callable that cannot be certified.
    """
    function, longest = load(spec), min(MAX_LENGTH, sizes.context_length)
    lengths = lengths_to_test(longest)
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(device).eval()
    subject = CallableSubject(
        spec,
        function,
        vocab_size=sizes.vocab_size,
        context_length=sizes.context_length,
        device=torch.device(device),
        windows=(None if sizes.receptive_field is None else sizes.receptive_field + 1,),
    )
    check_calls(f"call={spec}", subject, longest)
    if exact := subject.in_float64():
        check_calls(f"call={spec}, its parameters in float64,", exact, longest)

    def case(subject: Subject, lengths: list[int], budget: float = SMALL_BUDGET, **labels: object) -> Case:
        labels |= {"precision": subject.precision}
        full_past = subject.module is None or subject.precision == "64-true"
        budget = math.inf if exhaustive else budget
        return Case(subject, labels, lengths, budget=budget, full_past=full_past, equivalence=False)

    def cases() -> Iterator[Case]:
        if subject.module is None:
            yield case(subject, lengths, LARGE_BUDGET)
            return
        yield case(subject, lengths, LARGE_BUDGET, weights="own")
        random, training = copy.deepcopy(subject), copy.deepcopy(subject)
        assert random.module is not None and training.module is not None
        randomize(random.module.cpu(), torch.Generator().manual_seed(0)).to(device)
        rounding, exact = case(random, lengths).measured_rounding(), random.in_float64()
        if exact and math.isfinite(rounding):  # some modules return NaN with random weights
            # In float64, because a recurrence forgets so fast that float32 shows no effect of the far past.
            yield replace(case(exact, lengths, weights="random"), rounding=rounding * FLOAT64_ROUNDING)
        training.module.train()
        yield case(training, [min(ODD_LENGTH, longest)], weights="own", training=True)

    return cases()


def load(spec: str) -> Callable:
    """Imports package.module:function; the working directory is searched first."""
    if not re.fullmatch(r"\w[\w.]*:[\w.]+", spec):
        raise ValueError(f"call={spec} must read package.module:function, such as call=mymodels.bigram:logits")
    (module, name), folder = spec.split(":"), str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = pkgutil.resolve_name(spec)
    except ImportError as error:
        raise ValueError(f"call={spec} cannot be imported: {error}; searched from {folder}") from error
    except AttributeError as error:
        raise ValueError(f"call={spec}: {error}; name a function of {module}") from error
    if isinstance(function, type) or not callable(function):
        what = f"the class {name}" if isinstance(function, type) else type(function).__name__
        raise ValueError(f"call={spec} is {what} and not callable on ids; name a function or a module instance")
    return function
