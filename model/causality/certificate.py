"""The certificate: `certify` runs the checks on all variants of a model; `assert_causal` is for tests.

B batch, T positions, V vocabulary.
"""

import contextlib
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.checks import (
    Checker,
    Result,
    Verdict,
    block_edges,
    first_true,
    largest_change,
    measure_bounds,
)
from tril.model.causality.model import Model, ModelError, as_model, check_calls
from tril.model.causality.texts import Texts
from tril.model.causality.variants import Variant, fresh_copy, module_variants

CHECKS = {
    "future": "an output changes with what it may not see",
    "equal": "two ways to compute one output differ",
    "gradient": "an output has a gradient with respect to what it may not see",
    "receptive field": "an output does not depend on all that it sees",
    "targets": "a loss depends on a target that it may not see",
    "shift": "a target is among its inputs",
    "canary": "a loss on random tokens is below that of any causal model",
    "overlap": "the validation text is in the training text",
}
ODD_LENGTH = 37  # not a multiple of any block size
LENGTHS = (8, 64, 2, 16, 65, 128, 24, 3, 1)  # lengths of all variants after the full context, while there is time
FIRST_LENGTH, MAX_PASS_SECONDS, MAX_OUTPUTS = 256, 20.0, 1 << 28  # longer texts are tested while a pass allows them
CALLS = 600  # after which the model is tested again: a mask may come off later
OWN_ROWS, ROWS, QUERIES = 16, 4, 8  # texts at a length, and outputs with gradients


def certify(
    model: Callable[..., Any],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    expected: Callable[[int], Tensor] | Tensor | None = None,
    receptive_field: int | None = None,
    special_ids: Sequence[int] = (),
    tokens: Tensor | None = None,
    device: str | torch.device | None = None,
    budget_seconds: float = 5.0,
    name: str | None = None,
) -> "Certificate":
    """Tests that no output of a model depends on the future, and measures how much of its past it uses.

    The model is not changed: a module is copied, and the random state is restored.

    Args:
        model: an `nn.Module` or a function from ids (B, T) int64 to logits (B, T, V); the logits may also be the first
            element of a tuple, or the entry or attribute `logits`.
        vocab_size: V; None: that of `model.config`.
        context_length: largest T; None: that of `model.config`.
        expected: what each output may see, as a function of T or as a matrix for the largest T; None: its own position
            and all before.
        receptive_field: number of positions before its own that each output depends on, no more and no fewer; None: the
            certificate states it.
        special_ids: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        tokens: a text (N,) of the model, whose passages are tested too; random texts miss rare combinations.
        device: None: that of the parameters, else the CPU.
        budget_seconds: for further lengths and modes, after the checks at the full context, which always run.
        name: of the model in the certificate; None: its class or function.

    Returns:
        The certificate; `passed` is the verdict, `failures` are the failed results, `str()` is all of it as text.

    Raises:
        ValueError: invalid arguments. `ModelError`, a ValueError: the model raises an exception, or returns no logits.
    """
    subject = as_model(
        model,
        vocab_size=vocab_size,
        context_length=context_length,
        expected=expected,
        receptive_field=receptive_field,
        special_ids=special_ids,
        device=device,
        name=name,
    )
    return certify_model(subject, module_variants(subject), budget_seconds, tokens=tokens)


def assert_causal(model: Callable[..., Any], **arguments: Any) -> None:
    """Raises AssertionError with the text of the certificate if `certify(model, ...)` does not pass."""
    certificate = certify(model, **arguments)
    if not certificate.passed:
        raise AssertionError(f"{certificate.verdict()}\n{certificate}")


@dataclass
class Certificate:
    """The results of all checks.

    Attributes:
        notes: limitations of the measurement, one line each.
        undecided: what passed, but would also pass with a leak; the certificate is inconclusive.
        uses: how much of its past the model uses, in words; "" where it is not measured.
        dependencies: gradients at the full context, (T, T), nan where not tested; `allowed`: what may be seen.
    """

    subject: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    uses: str = ""
    dependencies: Tensor | None = None
    allowed: Tensor | None = None
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def add(self, results: Iterable[Result | str]) -> bool:
        """Takes results and notes; returns whether all have passed."""
        passed = True
        for result in results:
            if isinstance(result, str):
                self.notes += [result] if result not in self.notes else []
                continue
            self.results.append(result)
            passed &= result.passed
            if result.undecided and not self.undecided:
                self.undecided.append(result.undecided)
        return passed

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """Failed results, in the order of CHECKS."""
        order = list(CHECKS)
        return sorted((r for r in self.results if not r.passed), key=lambda result: order.index(result.check))

    def checks(self) -> dict[str, int]:
        """Number of results of each check."""
        counts = Counter(result.check for result in self.results)
        return {name: counts[name] for name in CHECKS if counts[name]}

    def verdict(self) -> str:
        """One line."""
        if failures := self.failures:
            expected = "causal" if failures[0].check != "receptive field" else "as expected"
            return f"{self.subject}: NOT {expected}: {failures[0].where}"
        if not self.results:
            return f"{self.subject}: nothing was tested"
        lengths = [result.length for result in self.results]
        tested = f"{len(self.results)} checks, lengths {min(lengths)} to {max(lengths)}"
        uses = f"; uses {self.uses}" if self.uses else ""
        return f"{self.subject}: {'inconclusive' if self.undecided else 'causal'}: {tested}{uses}"

    def __str__(self) -> str:
        """The verdict, the first failure of each check, the variants, and what was not tested."""
        lines = [self.verdict()]
        for check in CHECKS:
            if failed := [result for result in self.failures if result.check == check]:
                first = failed[0]
                lines.append(f"FAILED  {check}: {first.where}")
                lines.append(
                    f"        {first.variant}, length {first.length}; {first.worst:.2g}, bound {first.bound:.2g}"
                )
        variants = list(dict.fromkeys(result.variant for result in self.results))
        lines.append(f"tested in {self.seconds:.1f} s: {'; '.join(variants)}")
        return "\n".join([*lines, *(f"note: {note}" for note in (*self.undecided, *self.notes))])

    def line(self) -> str:
        """The verdict that a run prints."""
        if self.passed:
            return f"causal: certified in {self.seconds:.1f} s ({len(self.results)} checks)"
        return f"causal: FAILS: {self.summary()['failed'][0]}"

    def summary(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        failed = [f"{r.check}: {r.where}; {r.variant}, length {r.length}" for r in self.failures]
        return {"passed": self.passed, "checks": self.checks(), "failed": failed, "seconds": round(self.seconds, 2)}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the matrices, for JSON."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        results = [asdict(result) | {"passed": result.passed} for result in self.results]
        details = {"notes": self.notes, "undecided": self.undecided, "uses": self.uses, "versions": versions}
        return {"subject": self.subject, "verdict": self.verdict()} | self.summary() | details | {"results": results}


def certify_model(
    model: Model,
    variants: Iterable[Variant] = (),
    seconds: float = 5.0,
    *,
    tokens: Tensor | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Certificate:
    """Runs the three checks on a model and its variants: first those that always run, then others while there is time.

    Args:
        seconds: of the others, and again of the calls after which the model is tested once more.
        progress: called with the name of each variant.

    Raises:
        ModelError: the model raises an exception at its full context.
    """
    certificate = Certificate(model.name, notes=[model.note] if model.note else [])
    with certificate.timed():
        longest = reachable_length(model)
        if longest < model.context_length:
            reason = f"no text is longer than {longest} of {model.context_length} tokens: a pass takes too long"
            certificate.undecided.append(reason)
        check_calls(model, longest)
        texts = Texts(model.vocab_size, model.special, tokens)
        progress("weights=own")
        fresh = fresh_copy(model) if model.module is not None else None
        own = Checker(model, measure_bounds(model, texts, longest, exact=model.exact), texts)
        if not certify_own(certificate, own, longest):
            return certificate
        exact = all(result.worst == 0 for result in certificate.results if result.check == "future")
        checkers = []
        for variant in variants:
            progress(variant.name)
            checker = certify_variant(certificate, variant, own, longest, exact)
            if checker is not None:
                checkers.append(checker)
            if not certificate.passed:
                return certificate
        certify_more(certificate, own, checkers, longest, budget(seconds))
        if fresh is not None and certificate.passed:
            certify_after_calls(certificate, own, fresh, longest, budget(seconds)(1.0))
    return certificate


def budget(seconds: float) -> Callable[[float], Callable[[], bool]]:
    """From now on: share -> a function that says whether this share of the seconds is not over."""
    started = time.perf_counter()
    return lambda share: lambda: time.perf_counter() - started < share * seconds


def reachable_length(model: Model) -> int:
    """The full context, or the longest text whose pass takes neither too long nor too much memory."""
    length = min(FIRST_LENGTH, model.context_length)
    while length < model.context_length:
        longer = min(2 * length, model.context_length)
        start = time.perf_counter()
        with contextlib.suppress(ModelError), torch.no_grad():  # at this length; the full context tells why
            model(torch.zeros(model.batch_size or 1, length, dtype=torch.long))
        expected = (time.perf_counter() - start) * (longer / length) ** 2
        if expected > MAX_PASS_SECONDS or longer * model.vocab_size > MAX_OUTPUTS:
            break
        length = longer
    return length


def certify_own(certificate: Certificate, own: Checker, longest: int) -> bool:
    """The checks of the model unchanged, which always run; returns whether all have passed."""
    middle, model = min(ODD_LENGTH, longest), own.model
    add = certificate.add
    if not (add(own.repeatable(longest)) and add(own.future(longest, OWN_ROWS))):
        return False
    if middle < longest and not add(at_length(own, middle, OWN_ROWS)):
        return False
    shorter = (1, 8, longest // 3, longest // 2, middle, (longest - 1) // 32 * 32, longest - 1)
    shorter = {n for n in shorter if 1 <= n < longest}
    if not add(own.lengths(longest, sorted(shorter, reverse=True), lambda: True)):
        return False
    few = [name for name in model.ways if name != "chunks of 7 with the cache"]
    if longest > FIRST_LENGTH:
        few = [name for name in few if not name.startswith("chunks")]
    if not (add(own.ways(middle, list(model.ways))) and (middle == longest or add(own.ways(longest, few)))):
        return False
    gradients = certify_gradient(certificate, own, longest)
    if gradients is None:
        if model.module is not None:
            reason = "the module has no nn.Embedding that looks up the ids, or no backward pass"
            certificate.notes.append(f"no gradient was tested: {reason}")
    else:
        queries, size = gradients
        certificate.dependencies = torch.full((longest, longest), torch.nan)
        certificate.dependencies[queries] = size.float()
        certificate.allowed = model.visible(longest)
    return certificate.passed


def at_length(checker: Checker, length: int, rows: int) -> Iterator[Result | str]:
    """The future check at a length other than the full context, where the model may raise an exception."""
    try:
        yield from checker.future(length, rows)
    except ModelError as error:
        yield f"length {length} is left out, where {error}"


def certify_variant(
    certificate: Certificate, variant: Variant, own: Checker, longest: int, exact: bool
) -> Checker | None:
    """The checks of a variant that always run; its checker, or None if it cannot be tested."""
    try:
        model = variant.apply(own.model)
        if model is None:
            return None
        if longest < model.context_length:
            model = model.shortened(longest)
        longest = min(longest, model.context_length)
        check_calls(model, longest)
        bounds = measure_bounds(model, own.texts, longest, exact=exact)
    except Exception as error:  # such as a module that names float32, in bf16
        reason = f"{variant.name} is left out, where {error}"
        if own.model.exact:  # a model of ours has all its variants
            certificate.undecided.append(reason)
        certificate.add([reason])
        return None
    if variant.name == "weights=random" and not_copied(certificate, own.model, model):
        return None
    checker = Checker(model, bounds, own.texts, variant.name, variant.sharp)
    passed = certificate.add(checker.future(longest, ROWS))
    if passed and (middle := min(ODD_LENGTH, longest)) < longest:
        passed = certificate.add(at_length(checker, middle, ROWS))
    if passed and (variant.ways or variant.thorough):
        certificate.add(checker.ways(min(ODD_LENGTH, longest), list(model.ways)))
    if passed and variant.thorough:
        certify_receptive_field(certificate, checker, longest, certify_gradient(certificate, checker, longest))
    return checker


@torch.no_grad()
def not_copied(certificate: Certificate, own: Model, random: Model) -> bool:
    """Whether a copy with other weights has unchanged outputs: then it still runs the original, and tests nothing."""
    assert own.module is not None
    if not any(p.requires_grad for p in own.module.parameters()):
        return False
    ids = torch.arange(min(8, own.context_length))[None] % own.vocab_size
    ids = ids.expand(own.batch_size or 1, -1)
    if own.batch_size or (own(ids).double() - random(ids).to(own.device).double()).abs().max() > 1e-9:
        return False
    reason = "a copy with other weights has the same outputs: other modes were not tested"
    certificate.undecided.append(reason)
    return True


Gradients = tuple[Tensor, Tensor]  # queries (n,), and the size of their gradients with respect to each input (n, T)


def certify_gradient(certificate: Certificate, checker: Checker, longest: int) -> Gradients | None:
    """Adds the gradient check; returns the gradients of a model that has them."""
    results = list(checker.gradient(longest, QUERIES))
    certificate.add(result for result in results if isinstance(result, Result))
    return next((pair for pair in results if isinstance(pair, tuple)), None)


def certify_receptive_field(
    certificate: Certificate, checker: Checker, longest: int, gradients: Gradients | None = None
) -> None:
    """Measures how much of its past the model uses, which fails only where it is known."""
    model = checker.model
    visible = model.visible(longest)
    if gradients is not None:
        queries, used = gradients[0], gradients[1] > 0
    else:
        queries, used = torch.tensor([longest - 1]), checker.depends(longest, longest - 1, range(longest))[None]
    seen = visible[queries]
    missing = (seen & ~used).nonzero().tolist()
    if gradients is not None:  # gradients leave out look-ups of single tokens, whose effect a changed token shows
        missing = missing[:1] if model.sees_all else missing[:: max(1, len(missing) // 8)]
        for row, key in missing:
            used[row, key] |= checker.depends(longest, int(queries[row]), [key]).item()
        missing = [pair for pair in missing if not used[tuple(pair)]]
    where = ""
    if missing and model.sees_all:
        where = f"output {queries[missing[0][0]]} does not depend on input {missing[0][1]}"
    if model.sees_all:
        verdict = Verdict(float(used[seen].float().min()), 0.0, model)
        certificate.add([checker.result("receptive field", longest, verdict, int(seen.sum()), where)])
    distances = (queries[:, None] - torch.arange(longest))[used & seen]
    reach = int(distances.max()) + 1 if len(distances) else 0
    full = used[seen].all() and not (visible.tril() ^ torch.ones_like(visible).tril()).any()
    certificate.uses = "all of the past" if full else f"at most the last {reach} tokens"


def certify_more(
    certificate: Certificate,
    own: Checker,
    checkers: Sequence[Checker],
    longest: int,
    in_time: Callable[[float], Callable[[], bool]],
) -> None:
    """While there is time: one text cut off at every length, every position of every variant, and other lengths."""
    every = [*range(longest - 1, 0, -1)]
    spread = [n for step in (64, 16, 1) for n in every if math.gcd(n, 64) >= step or n % step == 0]
    lengths = list(dict.fromkeys([*(n for n in LENGTHS if n < longest), *spread]))
    if not certificate.add(own.lengths(longest, every, in_time(0.3))):
        return
    if not every_position(certificate, [own, *checkers], longest, in_time(0.7)):
        return
    for length in [n for n in structural_lengths(longest) if n < longest]:
        if not in_time(0.85)():
            break
        if not certificate.add(at_length(own, length, OWN_ROWS)):
            return
    for length in lengths[:9]:
        for checker in checkers:
            if not in_time(1.0)() or length >= checker.model.context_length:
                continue
            if not certificate.add(at_length(checker, length, ROWS)):
                return
    if own.model.module is None:
        certify_receptive_field(certificate, own, min(64, longest))


def every_position(
    certificate: Certificate, checkers: Sequence[Checker], longest: int, in_time: Callable[[], bool]
) -> bool:
    """The future check of every position, some at a time: a leak may be at a single one. Edges of blocks come first."""
    rest = torch.randperm(longest, generator=checkers[0].generator).tolist()
    for queries in torch.tensor(list(dict.fromkeys((*block_edges(longest), *rest)))).split(OWN_ROWS):
        for checker in checkers:
            length = min(longest, checker.model.context_length)
            if not in_time():
                return True
            if not certificate.add(checker.future_of(queries[queries < length], length)):
                return False
    return True


def structural_lengths(longest: int) -> list[int]:
    """Lengths at which implementations change: small ones, multiples of 8 and 64 and their neighbours, and others."""
    blocks = [
        n * size + side for size, n_max in ((8, 6), (64, 8), (512, 8)) for n in range(n_max + 1) for side in (-1, 0, 1)
    ]
    others = (2, 3, 5, 24, 37, 72, 80, 100, 113, 144, 150, 200, 300, longest - 1)
    lengths = sorted({n for n in (*blocks, *others) if 1 <= n <= longest})
    return lengths[::2] + lengths[1::2]  # whatever the time allows, lengths of all sizes


def certify_after_calls(
    certificate: Certificate, own: Checker, fresh: Model, longest: int, in_time: Callable[[], bool]
) -> None:
    """Once more after many calls, and compared with a fresh copy: a state may open a mask, or keep an earlier text."""
    ids = torch.zeros(own.model.batch_size or 1, min(2, longest), dtype=torch.long)
    calls = 0
    with torch.no_grad():
        while own.model.batch_size is None and calls < CALLS and in_time():
            with contextlib.suppress(ModelError):
                own.model(ids)
            calls += 1
    checker = Checker(own.model, own.bounds, own.texts, "after many calls", generator=own.generator)
    if not certificate.add(at_length(checker, longest, ROWS)):
        return
    with torch.no_grad():
        ids = own.texts.draw(own.model.batch_size or 2, longest)
        change = largest_change(own.model(ids), fresh(ids))
    bound, where = own.bounds.rounding, ""
    if not change.max() <= bound:
        row, query = first_true(~(change <= bound))
        where = f"output {query} of a model that has read other texts differs from that of a fresh copy"
    verdict = Verdict(change.max().item(), bound, own.model)
    certificate.add([checker.result("equal", longest, verdict, change.numel(), where)])
