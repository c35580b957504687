"""The grid of any Python callable from ids to logits, of which nothing but its output is known.

A function is tested by changed and by shortened texts; an `nn.Module` also by gradients, with random weights, in
training mode, in bf16 and by the canary test.

B batch, T positions, V vocabulary.
"""

import copy
import math
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from tril.data.settings import strict_settings
from tril.model.causality.case import (
    FLOAT64_ROUNDING,
    MAX_ROWS,
    ODD_LENGTH,
    Case,
    ModelError,
    lengths_to_test,
    structural_lengths,
)
from tril.model.causality.grids.first_call import check_calls
from tril.model.causality.grids.gpt_grid import SMALL_BUDGET
from tril.model.causality.grids.module_subject import ModuleSubject
from tril.model.causality.subject import FLOPS, randomize
from tril.model.causality.texts import Texts

LONGEST = 1024  # positions tested at most; fewer where a pass takes longer than PASS_SECONDS
PASS_SECONDS = 0.05  # of the budget of 10 s
OWN_BUDGET = 3 * FLOPS  # of each dependency matrix of the first case: 3 s of the budget of 10 s
VARIANT_ROWS = 48  # texts at each length in other modes
CALLS = 600  # of the module, after which it is tested again: a mask may come off later
FEW = (2, 8, 16, 37, 64, 65, 128)  # lengths tested in other modes than the first


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


def callable_cases(spec: str, sizes: Sizes, *, device: str = "cpu", exhaustive: bool = False) -> Iterator[Case]:
    """The grid of the function that `spec` names; arguments as in `module_cases`.

    Args:
        spec: package.module:function, a function or an `nn.Module` instance; also searched in the working directory.
    """
    return module_cases(f"call={spec}", load(spec), **vars(sizes), device=device, exhaustive=exhaustive)


def module_cases(
    name: str,
    function: Callable,
    *,
    vocab_size: int,
    context_length: int,
    receptive_field: int | None = None,
    expected: Callable[[int], Tensor] | None = None,
    special: Sequence[int] = (),
    device: str | torch.device = "cpu",
    exhaustive: bool = False,
    seconds: float = 10.0,
) -> Iterator[Case]:
    """The grid of a function from ids (B, T) int64 to logits (B, T, V).

    Args:
        function: it is not changed; a module is copied.
        exhaustive: test every pair of positions in every case, at any cost.
        seconds: about what the grid may take; longer contexts and larger models are tested at fewer positions.

    Raises:
        ValueError: before the first case, for a callable that cannot be called or returns no logits.
    """
    note = ""
    if isinstance(function, torch._dynamo.OptimizedModule):
        function, note = function._orig_mod, "the module is tested without its compiled code"
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(device).eval()
    subject = ModuleSubject(
        name,
        function,
        vocab_size=vocab_size,
        context_length=context_length,
        receptive_field=receptive_field,
        expected=expected,
        special=special,
        device=torch.device(device),
        note=note,
    )
    longest = affordable_length(subject, min(LONGEST, context_length), seconds)

    def case(
        subject: ModuleSubject,
        lengths: Sequence[int],
        redrawn: Sequence[int],
        *,
        budget: float = SMALL_BUDGET,
        maps: bool = True,
        rows: int = MAX_ROWS,
        equivalence: bool = False,
        **labels: object,
    ) -> Case:
        labels |= {"precision": subject.precision}
        full_past = subject.module is None or subject.precision == "64-true"
        budget = math.inf if exhaustive else budget * seconds / 10
        options = {"full_past": full_past, "equivalence": equivalence, "maps": maps, "rows": rows}
        return Case(subject, labels, lengths, budget=budget, redrawn=[n for n in redrawn if n in every], **options)

    every = working_lengths(subject, structural_lengths(longest))
    lengths = [n for n in lengths_to_test(longest) if n in every]

    short = [n for n in lengths if n in (ODD_LENGTH, longest)]  # rows are compared at the first, texts at the longest

    def cases() -> Iterator[Case]:
        if subject.module is None:
            yield case(subject, lengths, every, budget=OWN_BUDGET)
            return
        own = case(subject, lengths, every, budget=OWN_BUDGET, equivalence=True, weights="own")
        yield own
        for label, other in variants(subject):
            other.exact = not own.inexact  # then lower precision is no reason for a difference either
            if not working_lengths(other, [longest]) or not is_finite(other, longest):
                subject.note = other.note  # such as a module that names float32, in bf16
                continue
            if other.precision != subject.precision:  # a CPU without bf16 emulates it in ten times the time
                other.seconds_per_token = seconds_of_a_text(other, 1, longest) / longest
            yield case(other, short, FEW, maps=False, rows=VARIANT_ROWS, weights="own", **label)
        started = time.perf_counter()
        while subject.calls < CALLS and time.perf_counter() - started < seconds / 10:
            subject(torch.zeros(1, lengths[0], dtype=torch.long))
        yield case(subject, short, (), maps=False, rows=VARIANT_ROWS, weights="own", calls=subject.calls)
        yield from random_case(case, subject, lengths)

    return cases()


def random_case(case: Callable[..., Case], subject: ModuleSubject, lengths: Sequence[int]) -> Iterator[Case]:
    """With random weights in float64: zeros hide leaks, and a recurrence forgets so fast that float32 shows nothing."""
    random = copy.deepcopy(subject)
    assert random.module is not None
    randomize(random.module.cpu(), torch.Generator().manual_seed(0)).to(subject.device)
    measured = case(random, lengths, ())
    rounding, exact = measured.measured_rounding(), measured.float64
    if isinstance(exact, ModuleSubject) and math.isfinite(rounding):  # some modules return NaN with random weights
        yield replace(case(exact, lengths, FEW, weights="random"), rounding=rounding * FLOAT64_ROUNDING)


def variants(subject: ModuleSubject) -> Iterator[tuple[dict[str, Any], ModuleSubject]]:
    """The same weights in other modes: training, without buffers of zeros, in bf16."""

    def copied() -> tuple[ModuleSubject, nn.Module]:
        other = copy.deepcopy(subject)
        assert other.module is not None
        return other, other.module.eval()

    training, module = copied()
    module.train()
    yield {"training": True}, training
    gated, module = copied()
    zeros = [b for b in module.buffers() if b.is_floating_point() and not b.any()]
    if zeros:  # a factor that is still 0 hides what it is multiplied with
        for buffer in zeros:
            buffer.fill_(1.0)
        yield {"buffers": "1 for 0"}, gated
    low, module = copied()
    module.to(torch.bfloat16)
    low.precision = "bf16-true"
    yield {}, low
    autocast, _ = copied()
    autocast.precision = "bf16-mixed"
    yield {}, autocast


def working_lengths(subject: ModuleSubject, lengths: Sequence[int]) -> list[int]:
    """The lengths at which the function returns logits; the subject's note names the others."""
    working, failed = [], {}
    for length in lengths:
        try:
            with torch.no_grad():
                subject(torch.zeros(1, length, dtype=torch.long))
            working.append(length)
        except ModelError as error:
            failed[length] = str(error)
    if failed:
        some = ", ".join(map(str, list(failed)[:8])) + (", ..." if len(failed) > 8 else "")
        mode = "" if subject.precision == "32-true" else f" in {subject.precision}"
        note = f"lengths {some}{mode} are left out, where {next(iter(failed.values()))}"
        subject.note = f"{subject.note}; {note}" if subject.note else note
    return working


@torch.no_grad()
def is_finite(subject: ModuleSubject, length: int) -> bool:
    """Whether random texts of this length have finite logits; the subject's note says if not."""
    finite = bool(subject(Texts(subject.vocab_size).draw(16, length)).isfinite().all())
    if not finite:
        subject.note = f"{subject.precision} is left out, where some logits are not finite"
    return finite


def affordable_length(subject: ModuleSubject, longest: int, seconds: float) -> int:
    """The longest texts to test within `seconds`; the subject keeps the time of a pass."""
    check_calls(subject.name, subject, longest)
    limit = PASS_SECONDS * seconds / 10

    while (taken := seconds_of_a_text(subject, 1, longest)) > limit and longest > ODD_LENGTH:
        longest = max(ODD_LENGTH, longest // 2)
    subject.seconds_per_token = (seconds_of_a_text(subject, 8, longest) if taken < limit / 4 else taken) / longest
    return longest


@torch.no_grad()
def seconds_of_a_text(subject: ModuleSubject, rows: int, length: int) -> float:
    """Measured time of one text of a batch."""
    ids, started = torch.zeros(rows, length, dtype=torch.long), time.perf_counter()
    subject(ids)
    return (time.perf_counter() - started) / rows


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
