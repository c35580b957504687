"""The certificate: `certify` runs the checks on all variants of a model; `assert_causal` is for tests.

B batch, T positions, V vocabulary.
"""

import contextlib
import copy
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.checks import Checker, Result, Text, Verdict, first_true, positions_in_order
from tril.model.causality.gpt import subject_of
from tril.model.causality.model import Model, ModelError
from tril.model.causality.place import largest_change
from tril.model.causality.texts import Texts
from tril.model.causality.variants import UNCHANGED, Variant, module_variants

CHECKS = {
    "future": "an output changes with what it may not see",
    "equal": "two ways to compute one output differ",
    "gradient": "an output has a gradient with respect to what it may not see",
    "receptive field": "an output does not depend on all that it sees",
    "targets": "a loss depends on a target that it may not see",
    "shift": "a target is among its inputs",
    "overlap": "the validation text is in the training text",
}
ODD_LENGTH = 37  # not a multiple of any block size
LENGTHS = (8, 64, 2, 16, 32, 65, 128, 24, 3, 1)  # lengths of all variants after the full context, while there is time
EVERY_LENGTH = 64  # up to here a text is cut off at every length, whatever the budget
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
        budget_seconds: processor time for further lengths and modes, after the checks at the full context, which always
            run.
        name: of the model in the certificate; None: its class or function.

    Returns:
        The certificate; `passed` is the verdict, `failures` are the failed results, `str()` is all of it as text.

    Raises:
        ValueError: invalid arguments. `ModelError`, a ValueError: the model raises an exception, or returns no logits.
    """
    subject = subject_of(
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
    __tracebackhide__ = True  # pytest shows the failure at the line of the test
    certificate = certify(model, **arguments)
    if not certificate.passed:
        raise AssertionError(f"{certificate.verdict()}\n{certificate}")  # its summary shows the first line


class Undecided(str):
    """A note that makes the certificate inconclusive: a leak would pass as well."""


@dataclass
class Certificate:
    """The results of all checks.

    Attributes:
        notes: limitations of the measurement, one line each.
        undecided: what passed, but would also pass with a leak; the certificate is inconclusive.
        uses: how much of its past the model uses, in words; "" where it is not measured.
    """

    subject: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    uses: str = ""
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def add(self, results: Iterable[Result | str], *, until_failure: bool = False) -> bool:
        """Takes results and notes; returns whether all have passed."""
        passed = True
        for result in results:
            if isinstance(result, str):
                notes = self.undecided if isinstance(result, Undecided) else self.notes
                notes += [result] if result not in notes else []
                continue
            self.results.append(result)
            if result.undecided and not self.undecided:
                self.undecided.append(result.undecided)
            passed &= result.passed
            if until_failure and not passed:
                break
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
        lines, shown = [self.verdict()], set()
        for failed in self.failures:
            if failed.check not in shown:
                lines.append(f"FAILED  {failed.check}: {failed.where}")
                figures = f"length {failed.length}; {failed.worst:.2g}, bound {failed.bound:.2g}"
                lines.append(f"        {failed.variant}, {figures}")
            shown.add(failed.check)
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
        """Plain values, for JSON."""
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
    """Runs the three checks on a model and its variants up to the first failure: first those that always run.

    Args:
        seconds: of processor time for the others, and again for the calls after which the model is tested once more.
        progress: called with the name of each variant.

    Raises:
        ModelError: the model raises an exception at its full context.
    """
    certificate = Certificate(model.name, notes=[model.note] if model.note else [])
    with certificate.timed():
        texts = Texts(model.vocab_size, model.special, tokens)
        certificate.add(all_results(certificate, model, variants, seconds, texts, progress), until_failure=True)
    return certificate


def all_results(
    certificate: Certificate,
    model: Model,
    variants: Iterable[Variant],
    seconds: float,
    texts: Texts,
    progress: Callable[[str], None],
) -> Iterator[Result | str]:
    """The results and notes of all checks in their order; the receptive field goes to the certificate."""
    longest = reachable_length(model)
    if longest < model.context_length:
        yield Undecided(f"no text is longer than {longest} of {model.context_length} tokens: a pass takes too long")
    model = replace(model, context_length=longest)
    fresh = model.changed(lambda module: module) if model.module is not None else None
    progress(UNCHANGED.name)
    own, text = Checker.begin(model, texts, exact=model.exact, repeat=True)
    exact = True
    for result in results_of(certificate, own, text, UNCHANGED):
        exact &= isinstance(result, str) or result.check != "future" or result.worst == 0
        yield result
    checkers = [own]
    for variant in variants:
        progress(variant.name)
        begun = begin_variant(variant, own, exact)
        if isinstance(begun, tuple):
            checkers.append(begun[0])
            yield from results_of(certificate, *begun, variant)
        elif begun is not None:
            yield begun
    yield from further_results(checkers, timer(seconds))
    if fresh is None:
        yield from check_receptive_field(certificate, own, min(64, longest), None)
    else:
        yield from check_after_calls(own, fresh, timer(seconds))


def timer(seconds: float) -> Callable[[float], bool]:
    """From now on: whether a share of the seconds is not over.

    In processor time of this thread, so that a busy machine tests no less.
    """
    started = time.thread_time()
    return lambda share: time.thread_time() - started < share * seconds


def check_call(model: Model) -> None:
    """Calls the model once. Raises ModelError if that raises an exception, or the outputs are not finite."""
    model.measure(torch.zeros(model.batch_size or 2, min(FIRST_LENGTH, model.context_length), dtype=torch.long))


def reachable_length(model: Model) -> int:
    """The full context, or the longest text whose pass takes neither too long nor too much memory."""
    length = min(FIRST_LENGTH, model.context_length)
    while length < model.context_length:
        longer = min(2 * length, model.context_length)
        start = time.thread_time()
        with contextlib.suppress(ModelError), torch.no_grad():  # at this length; the full context tells why
            model(torch.zeros(model.batch_size or 1, length, dtype=torch.long))
        expected = (time.thread_time() - start) * (longer / length) ** 2
        if expected > MAX_PASS_SECONDS or longer * model.vocab_size > MAX_OUTPUTS:
            break
        length = longer
    return length


def begin_variant(variant: Variant, own: Checker, exact: bool) -> tuple[Checker, Text] | str | None:
    """`Checker.begin` of a variant, why it cannot be tested, or None where the model has no such variant."""
    try:
        if (model := variant.apply(own.model)) is None:
            return None
        relative_bound = torch.inf if variant.sharp else None
        begun = Checker.begin(model, own.texts, variant.name, exact=exact, relative_bound=relative_bound)
    except Exception as error:  # such as a module that names float32, in bf16
        reason = f"{variant.name} is left out, where {error}"
        return Undecided(reason) if own.model.exact else reason  # a model of ours has all its variants
    if variant.name == "weights=random" and same_outputs(own.model, model):
        return Undecided("a copy with other weights has the same outputs: its variants test the original")
    return begun


@torch.no_grad()
def same_outputs(own: Model, random: Model) -> bool:
    """Whether a copy with other weights has unchanged outputs, as where a closure calls the original."""
    if own.module is None or own.batch_size or not any(p.requires_grad for p in own.module.parameters()):
        return False
    ids = torch.arange(min(8, own.context_length))[None] % own.vocab_size
    return not (own(ids).double() - random(ids).to(own.device).double()).abs().max() > 1e-9


def results_of(certificate: Certificate, checker: Checker, text: Text, variant: Variant) -> Iterator[Result | str]:
    """The checks of a variant that always run."""
    model, longest, unchanged = checker.model, checker.model.context_length, variant is UNCHANGED
    middle = min(ODD_LENGTH, longest)
    if unchanged:
        yield from checker.repeatable(text)
    yield from checker.future(longest, OWN_ROWS if unchanged else ROWS, text)
    if middle < longest:
        yield from at_length(checker, middle, OWN_ROWS if unchanged else ROWS)
    if variant.thorough:
        always = {*range(1, EVERY_LENGTH), longest // 3, longest // 2, (longest - 1) // 32 * 32, longest - 1}
        yield from checker.lengths(text, sorted((n for n in always if 1 <= n < longest), reverse=True))
    if variant.thorough or variant.ways:
        several = [name for name in model.ways if "single" not in name]
        if model.ways:
            yield from checker.ways(checker.text(3, middle), list(model.ways) if variant.thorough else several)
        if unchanged and middle < longest:
            yield from checker.ways(text, list(model.ways) if longest <= EVERY_LENGTH else several)
    if variant.thorough:
        gradient = checker.gradient(longest, QUERIES)
        if gradient is not None:
            yield gradient[0]
        elif unchanged and model.module is not None:
            yield "no gradient was tested: the module has no nn.Embedding that looks up the ids, or no backward pass"
        if not unchanged:  # in a new model, weights of 0 may hide attention
            yield from check_receptive_field(certificate, checker, longest, gradient)


def at_length(checker: Checker, length: int, rows: int) -> Iterator[Result | str]:
    """The future check at a length other than the full context, where the model may raise an exception."""
    try:
        yield from checker.future(length, rows)
    except ModelError as error:
        yield f"length {length} is left out, where {error}"


def check_receptive_field(
    certificate: Certificate, checker: Checker, longest: int, gradient: tuple[Result, Tensor, Tensor] | None
) -> Iterator[Result]:
    """Measures how much of its past the model uses, which fails only where it is known."""
    model, queries, used = checker.model, torch.tensor([longest - 1]), None
    if gradient is None:
        used = checker.depends(longest, longest - 1, range(longest))[None]
    else:
        queries, used = gradient[1], gradient[2] > 0
    seen = model.visible(longest)[queries]
    missing = (seen & ~used).nonzero().tolist() if gradient is not None else []
    # Gradients leave out look-ups of single tokens, whose effect a changed token shows.
    for row, key in missing[:1] if model.sees_all else missing[:: max(1, len(missing) // 8)]:
        used[row, key] |= checker.depends(longest, int(queries[row]), [key]).item()
    if model.sees_all:
        missing = [pair for pair in missing[:1] or (seen & ~used).nonzero().tolist() if not used[tuple(pair)]]
        where = f"output {queries[missing[0][0]]} does not depend on input {missing[0][1]}" if missing else ""
        verdict = Verdict(float(used[seen].float().min()), 0.0, model)
        yield checker.result("receptive field", longest, verdict, int(seen.sum()), where)
    distances = (queries[:, None] - torch.arange(longest))[used & seen]
    full = used[seen].all() and model.visible(longest).tril().sum() == longest * (longest + 1) // 2
    last = int(distances.max()) + 1 if len(distances) else 0
    certificate.uses = "all of the past" if full else f"at most the last {last} tokens"


def further_results(checkers: Sequence[Checker], in_time: Callable[[float], bool]) -> Iterator[Result | str]:
    """While there is time: every id, one text cut off at every length, every position of every variant, and others."""
    own, longest = checkers[0], checkers[0].model.context_length
    order = positions_in_order(longest, own.generator)
    for checker, share in zip(checkers[:2], (0.15, 0.3), strict=False):  # own and random weights
        yield from checker.every_id(lambda share=share - 0.1: in_time(share))
        text = checker.text(checker.model.batch_size or 1, longest)
        yield from checker.lengths(text, [n for n in order if n >= EVERY_LENGTH], lambda share=share: in_time(share))
    for queries in torch.tensor(order).split(OWN_ROWS):  # a leak may be at a single position
        for checker in checkers:
            length = checker.model.context_length
            if in_time(0.7):
                yield from checker.future_of(queries[queries < length], length)
    for length in dict.fromkeys((*LENGTHS, *order)):
        for checker in checkers if length in LENGTHS else [own]:
            if in_time(1.0) and 1 <= length < checker.model.context_length:
                yield from at_length(checker, length, OWN_ROWS if checker is own else ROWS)


def check_after_calls(own: Checker, fresh: Model, in_time: Callable[[float], bool]) -> Iterator[Result | str]:
    """Once more after many calls, and compared with a fresh copy: a state may open a mask, or keep an earlier text."""
    model, longest = own.model, own.model.context_length
    with torch.no_grad():
        for _ in range(0 if model.batch_size else CALLS):
            with contextlib.suppress(ModelError):
                model(torch.zeros(1, min(2, longest), dtype=torch.long))
            if not in_time(1.0):
                break
    later = copy.copy(own)
    later.variant = "after many calls"
    yield from at_length(later, longest, ROWS)
    ids = own.texts.draw(model.batch_size or 2, longest)
    with torch.no_grad():
        change = largest_change(model(ids), fresh(ids))
    verdict, where = Verdict(change.max().item(), own.rounding.bound, model), ""
    if not verdict.passed:
        query = first_true(~(change <= verdict.bound))[1]
        where = f"output {query} of a model that has read other texts differs from that of a fresh copy"
    yield later.result("equal", longest, verdict, change.numel(), where)
