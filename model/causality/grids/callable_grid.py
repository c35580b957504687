"""Any Python callable from ids to logits under the certificate: nothing is known of it but what it answers.

A function is tested by changing tokens; an `nn.Module` by gradients, with other weights, in training mode and by the canary as well.

B batch, T positions, V vocabulary.
"""

import copy
import functools
import importlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tril.model.causality.case import LONGEST, ODD, Cell, lengths_to_test
from tril.model.causality.grids.gpt_grid import LARGE, SMALL
from tril.model.causality.receptive_field import embeddings_as_leaves
from tril.model.causality.subject import Subject, randomise

IN_FLOAT64 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
SMALLEST_VOCABULARY = 3  # one token stands for end-of-text, two to change one into the other


class WrongLogits(ValueError):
    """They have another shape, or are none."""


class CallableSubject(Subject):
    """What `spec` names, its logits checked. See `callable_cells`."""

    def __init__(self, spec: str, function: Callable, *, vocab_size: int, precision: str = "32-true", **known):
        module = function if isinstance(function, nn.Module) else None
        # run is a method and not a function, so that a deep copy runs the copied module
        super().__init__(self._logits, vocab_size=vocab_size, module=module, precision=precision, **known)
        self.spec, self.function, self.known = spec, function, known

    def _logits(self, ids: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):  # its recurrences have no backward in evaluation mode
            logits = self.function(ids)
        right = (*ids.shape, self.vocab_size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != right or not logits.is_floating_point():
            got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise WrongLogits(
                f"call={self.spec} must return floats (B, T, V) = {right} for ids {tuple(ids.shape)}, and returned {got}"
            )
        return logits

    @functools.cached_property
    def differentiable(self) -> bool:
        """Not if it is a function, or a module that looks up no token in an `nn.Embedding`."""
        if self.module is None:
            return False
        ids = torch.ones(
            2, min(2, self.context_length), dtype=torch.long, device=self.device
        )  # of one number no norm has a variance
        with embeddings_as_leaves(self.module, ids) as leaves:
            self(ids)
        return bool(leaves)

    def in_float64(self) -> "CallableSubject | None":
        if self.module is None:
            return None
        known = self.known | {"device": self.float64_device}
        return CallableSubject(
            self.spec, self._module_in_float64(), vocab_size=self.vocab_size, precision="64-true", **known
        )


def callable_cells(
    spec: str,
    *,
    vocab_size: int,
    context_length: int,
    device: str = "cpu",
    reach: int | None = None,
    exhaustive: bool = False,
) -> Iterator[Cell]:
    """The grid of a function ids (B, T) int64 -> logits (B, T, V), V = vocab_size, T up to context_length.

    spec        package.module:function, a function or an `nn.Module` that is built; looked for in the working directory too
    reach       how many positions before its own each output sees, no more and no fewer; None: all
    exhaustive  every pair of positions in every cell, whatever it costs

    Of a function no gradient is to be had: what rounding swallows, it does not see. Raises ValueError before the first cell.
    """
    limits = {
        "vocab_size": (vocab_size, SMALLEST_VOCABULARY),
        "context_length": (context_length, 1),
        "reach": (reach or 0, 0),
    }
    for name, (value, least) in limits.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value} must be a whole number, at least {least}")
    function, longest = load(spec), min(LONGEST, context_length)
    known = {"context_length": context_length, "device": device, "windows": [None if reach is None else reach + 1]}
    lengths = lengths_to_test(longest)
    own = CallableSubject(spec, to_device(function, device), vocab_size=vocab_size, **known)
    probe(own, longest)

    def cell(subject: Subject, lengths: list[int], budget: float = SMALL, **labels) -> Cell:
        labels = labels | {"precision": subject.precision}
        past = subject.module is None or subject.precision == "64-true"
        return Cell(subject, labels, lengths, budget=math.inf if exhaustive else budget, past=past, function=False)

    def cells() -> Iterator[Cell]:
        if own.module is None:
            yield cell(own, lengths, LARGE)
            return
        yield cell(own, lengths, LARGE, weights="own")
        random = copy.deepcopy(own)
        randomise(random.module.cpu(), torch.Generator().manual_seed(0)).to(device)
        rounding = cell(random, lengths).measured_rounding()
        if math.isfinite(rounding):  # weights that are at random may also be senseless
            # In float64, because a recurrence forgets so fast that float32 has nothing left to show of what it saw.
            yield replace(cell(random.in_float64(), lengths, weights="random"), rounding=rounding * IN_FLOAT64)
        training = copy.deepcopy(own)
        training.module.train()
        yield cell(training, [min(ODD, longest)], weights="own", training=True)

    return cells()


def to_device(function: Callable, device: str) -> Callable:
    """A module there, in evaluation mode and a copy; a function as it is."""
    return copy.deepcopy(function).to(device).eval() if isinstance(function, nn.Module) else function


def probe(subject: CallableSubject, longest: int) -> None:
    """Raises ValueError unless it works at the shortest and the longest length, in float64 as well if it has parameters."""
    twin = subject.in_float64()
    for asked, shape in itertools.product([subject] if twin is None else [subject, twin], [(1, 1), (2, longest)]):
        ids = torch.randint(subject.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(asked.device)
        where = f"call={subject.spec} with ids {shape} below {subject.vocab_size}"
        where += ", its parameters in float64," if asked is twin else ""
        try:
            with torch.no_grad():
                logits = asked(ids)
        except WrongLogits:
            raise
        except Exception as error:  # whatever stands in a file of the user's
            raise ValueError(f"{where} ends in {type(error).__name__}: {error}".splitlines()[0]) from error
        if not logits.isfinite().all():
            raise ValueError(f"{where} returns nan or infinite logits, which cannot be compared; return finite ones")


def load(spec: str) -> Callable:
    """What package.module:function names; the working directory is searched first."""
    module, _, name = spec.partition(":")
    if not module or not name or module.startswith("."):
        raise ValueError(f"call={spec} must read package.module:function, such as call=mymodels.bigram:logits")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
    except ImportError as error:
        raise ValueError(f"call={spec} cannot be imported: {error}; searched from {here}") from error
    except AttributeError as error:
        raise ValueError(f"call={spec}: {error}; name a function of {module}") from error
    if isinstance(function, type) or not callable(function):
        what = f"the class {name}" if isinstance(function, type) else type(function).__name__
        raise ValueError(f"call={spec} is {what}, and not callable on ids; name a function, or a module that is built")
    return function
