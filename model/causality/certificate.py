"""The certificate: `certify` makes the claims about all states of a model; `assert_causal` is for tests.

B batch, T positions, V vocabulary.
"""

import contextlib
import itertools
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.model.causality.claims import Claim, Result, largest_change, once
from tril.model.causality.gpt import subject_of
from tril.model.causality.gradients import check_hidden, check_seen
from tril.model.causality.model import (
    RANDOM,
    Model,
    ModelError,
    Variant,
    further_variants,
    module_variants,
    one_line,
    with_some_logits,
)
from tril.model.causality.state import State, Texts, positions_in_order

OWN = "weights=own"
THOROUGH = (OWN, RANDOM)  # with other ways to compute the outputs, at every length, with gradients and receptive field
ODD_LENGTH = 37  # not a multiple of any block size
LENGTHS = (8, 64, 2, 16, 32, 65, 128, 24, 3, 1)  # lengths of all states after the full context, while there is time
EVERY_LENGTH = 64  # below, a text is cut off at every length, whatever the budget
CALLS = 600  # after which the model is tested again: a mask may come off later
FOR_CALLS, LEAST_SECONDS = 0.2, 2.0  # of the time that is left, for the calls in each mode; of at least these seconds
OWN_ROWS, ROWS, MANY_ROWS, QUERIES = 16, 4, 256, 8  # texts at a length, and outputs with gradients
MAX_PAIRS = 1 << 20  # of ids
SAMPLE = """for a vocabulary of bytes, whose leaks may need line ends, sentences or letters of several bytes.

def count(words):  # äöü, naïve, “quoted”, 漢字, 🙂
    return {word: words.count(word) for word in words}

The cat saw the dog. The dog saw the cat!\r\nWho saw whom?\t1,234.50 €\n
"""


def certify(
    model: Callable[..., Any],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    expected: Callable[[int], Tensor] | Tensor | None = None,
    receptive_field: int | None = None,
    special_ids: Sequence[int] = (),
    tokens: Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
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
        context_length: largest T; None: that of `model.config`, up to 1,024 unless it is a `GPT`.
        expected: what each output may see, as a function of T or as a matrix for the largest T; None: its own position
            and all before.
        receptive_field: number of positions before its own that each output depends on, no more and no fewer; None: the
            certificate states it.
        special_ids: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        tokens: a text (N,) of the model, whose passages are tested too; random texts miss rare combinations.
        arguments: further arguments of every call of the model.
        batch_size: B, for a model that takes no other; None: any.
        device: None: that of the parameters, else the CPU.
        budget_seconds: of the whole certificate. The checks at the full context always run, however long they take;
            further lengths, positions, ids and states follow until the time is over.
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
        arguments=arguments,
        batch_size=batch_size,
        device=device,
        name=name,
    )
    if tokens is not None:
        tokens = tokens.cpu().long()
        if tokens.dim() != 1 or not len(tokens) or not 0 <= tokens.min() <= tokens.max() < subject.vocab_size:
            raise ValueError(f"tokens must be ids (N,), N > 0, from 0 to below vocab_size={subject.vocab_size}")
    if not budget_seconds >= 0:
        raise ValueError(f"budget_seconds={budget_seconds} must be at least 0")
    return certify_model(subject, None, budget_seconds, tokens=tokens)


def assert_causal(model: Callable[..., Any], **arguments: Any) -> None:
    """Raises AssertionError with the text of the certificate if `certify(model, ...)` does not pass."""
    __tracebackhide__ = True  # pytest shows the failure at the line of the test
    certificate = certify(model, **arguments)
    if not certificate.passed:
        raise AssertionError(certificate)


class FailedCheck(Exception):
    """Ends a certificate at its first failure."""


@dataclass
class Certificate:
    """The results of all checks, up to the first failure.

    Attributes:
        notes: limitations of the measurement, one line each.
        undecided: what passed, but would also pass with a leak; the certificate is inconclusive.
        left_out: claims that the model cannot compute, such as those about lengths that it does not take.
        uses: how much of its past the model uses, in words; "" where it is not measured.
    """

    subject: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    uses: str = ""
    seconds: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measures the time of the block, which ends at the first failure. A progress bar counts its results."""
        started = time.perf_counter()
        try:
            with tqdm(desc="causality", unit=" checks", **PROGRESS) as self.bar, contextlib.suppress(FailedCheck):
                yield
        finally:
            self.seconds += time.perf_counter() - started

    def add(self, result: Result) -> None:
        """Raises FailedCheck if the result failed."""
        self.results.append(result)
        self.bar.update()
        if result.undecided:
            self.note(result.undecided, undecided=not self.undecided)
        if not result.passed:
            raise FailedCheck

    def judge(self, state: State, claims: Iterable[Claim], in_time: Callable[[], bool] = lambda: True) -> None:
        """Adds the result of claims."""
        result = state.judge(claims, in_time)
        if state.left_out:
            self.left_out.append(f"{state.name}: {state.left_out}")
        if result is not None:
            self.add(result)

    def note(self, text: str, *, undecided: bool = False) -> None:
        notes = self.undecided if undecided else self.notes
        notes += [text] if text not in notes else []

    @property
    def passed(self) -> bool:
        """False for an inconclusive certificate, too."""
        return bool(self.results) and not self.failures and not self.undecided

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if not result.passed]

    def verdict(self) -> str:
        """One line."""
        if failures := self.failures:
            says = {"equal": "NOT consistent", "receptive field": "NOT as expected"}.get(
                failures[0].check, "NOT causal"
            )
            return f"{self.subject}: {says}: {failures[0].where}"
        lengths, states = [result.length for result in self.results], {result.variant for result in self.results}
        span = f"lengths {min(lengths)} to {max(lengths)}" if len({*lengths}) > 1 else f"length {lengths[0]}"
        tested = f"{len(self.results)} checks in {len(states)} states, {span}"
        uses = f"; uses {self.uses}" if self.uses else ""
        return f"{self.subject}: {'inconclusive' if self.undecided else 'causal'}: {tested}{uses}"

    def __str__(self) -> str:
        """The verdict, the failure, the states, and what was not tested."""
        lines = [self.verdict()]
        for failed in self.failures:
            figures = f"length {failed.length}; {failed.worst:.2g}, bound {failed.bound:.2g}"
            lines += [f"FAILED  {failed.check}: {failed.where}", f"        {failed.variant}, {figures}"]
        states = dict.fromkeys(result.variant for result in self.results)
        lines.append(f"tested in {self.seconds:.1f} s: {'; '.join(states)}")
        if self.left_out:
            lines.append(f"left out {len(self.left_out)} times, the first time with {self.left_out[0]}")
        return "\n".join([*lines, *(f"note: {note}" for note in (*self.undecided, *self.notes))])

    def summary(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        failed = [f"{r.check}: {r.where}; {r.variant}, length {r.length}" for r in self.failures] or self.undecided
        checks = dict(Counter(result.check for result in self.results))
        return {"passed": self.passed, "checks": checks, "failed": failed, "seconds": round(self.seconds, 2)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        results = [asdict(result) | {"passed": result.passed} for result in self.results]
        return asdict(self) | self.summary() | {"verdict": self.verdict(), "versions": versions, "results": results}


def certify_model(
    model: Model, variants: Iterable[Variant] | None, seconds: float = 5.0, *, tokens: Tensor | None = None
) -> Certificate:
    """The certificate of a model and of its variants: first what always runs, then more while the seconds last.

    Args:
        variants: None: those of any module.

    Raises:
        ModelError: the model raises an exception at its full context.
    """
    certificate = Certificate(model.name, notes=[model.note] if model.note else [])
    if tokens is None and 256 <= model.vocab_size < 300:  # of bytes
        tokens = torch.tensor(list(SAMPLE.encode()))
    texts = Texts(model.vocab_size, model.special, tokens)
    began = time.perf_counter()
    with certificate.running():
        if (some := with_some_logits(model)) is not model:
            state = State(OWN, model, texts)
            certificate.judge(state, state.future(model.context_length, ROWS))
            certificate.note(f"all {model.vocab_size:,} logits were tested with {OWN}, {some.n_logits} in other states")
            model = some
        fresh, states = None if model.module is None else model.changed(), []
        for variant in ((OWN, lambda model: model), *(module_variants(model) if variants is None else variants)):
            if (state := begin(certificate, variant, model, texts)) is not None:
                states.append(state)
                check_always(certificate, state)
        started = time.perf_counter()
        left = max(0.0, seconds - (started - began))
        in_time = lambda share: time.perf_counter() - started < share * left  # noqa: E731
        for share, state, claims in more_claims(certificate, states, in_time):
            certificate.judge(state, claims, lambda share=share: in_time(share))
        if fresh is not None:
            check_after_calls(certificate, states[0], fresh, FOR_CALLS * max(left, LEAST_SECONDS))
    return certificate


def begin(certificate: Certificate, variant: Variant, model: Model, texts: Texts) -> State | None:
    """The state of a variant; None, with a note, where the model cannot have it."""
    name, change = variant
    exact = name != OWN and all(r.worst == 0 for r in certificate.results if r.check == "future")
    try:
        changed = change(model if name in THOROUGH else replace(model, ways={}))
        state = State(name, changed, texts, exact=exact)
    except Exception as error:  # code of other projects may raise anything
        if name == OWN:
            raise
        says = error if isinstance(error, ModelError) else one_line(error)
        certificate.note(f"{name} is left out, where {says}", undecided=model.exact)  # ours has all its states
        return None
    trained = model.module is not None and any(p.requires_grad for p in model.module.parameters())
    if name == RANDOM and trained:
        own, random = (m(state.ids).cpu().double() for m in (model, changed))  # MPS has no float64
        if not largest_change(own, random).max() > 1e-9 * state.scale:  # as where a closure calls the original
            says = "a copy with other weights has the same outputs: its states test the original"
            certificate.note(says, undecided=True)
            return None
    return state


def check_always(certificate: Certificate, state: State) -> None:
    """The checks of each state, whatever the budget."""
    model, longest, own = state.model, state.model.context_length, state.name == OWN
    middle, rows = min(ODD_LENGTH, longest), OWN_ROWS if own else ROWS
    if own:
        certificate.add(state.repeatable())
    for length in dict.fromkeys((longest, middle)):
        certificate.judge(state, state.future(length, rows))
    if state.name in THOROUGH:
        lengths = {*range(1, EVERY_LENGTH), longest // 3, longest // 2, (longest - 1) // 32 * 32, longest - 1, longest}
        text = state.texts.draw(model.batch_size or 2, longest)
        certificate.judge(state, state.cut(text, sorted((n for n in lengths if 1 <= n <= longest), reverse=True)))
    for length in {middle, longest} if own else {middle}:
        certificate.judge(state, state.computed(state.texts.draw(model.batch_size or 3, length)))
    if state.name not in THOROUGH:
        return
    if (result := check_hidden(state, longest, QUERIES)) is not None:
        certificate.add(result)
    elif own and model.module is not None:
        certificate.note("no gradient was tested: the module looks up no ids, or has no backward pass")
    if not own or model.module is None:  # in a new model, weights of 0 may hide attention
        result, certificate.uses = check_seen(state)
        if model.sees_all:
            certificate.add(result)


def more_claims(
    certificate: Certificate, states: Sequence[State], in_time: Callable[[float], bool]
) -> Iterator[tuple[float, State, Iterable[Claim]]]:
    """Claims that are judged while there is time: each with a state, and the share of the time until which.

    Every id, and one text cut off at every length. Then what all states hold constant varies: weights, arguments and
    threads. Then every position and further lengths of every state, many rows, and pairs of ids.
    """
    own, longest = states[0], states[0].model.context_length
    order = positions_in_order(longest, own.generator)
    for share, state in zip((0.07, 0.17), states[:2], strict=False):  # own and random weights
        yield share, state, state.every_id()
        if not in_time(share):
            certificate.note(f"not every id was tested within the budget, with {state.name}")
        text = state.texts.draw(state.model.batch_size or 2, longest)
        yield share + 0.03, state, state.cut(text, [n for n in order if n >= EVERY_LENGTH])
    for variant in further_variants(own.model):
        if in_time(0.3) and (state := begin(certificate, variant, own.model, own.texts)) is not None:
            yield 0.3, state, state.future(state.model.context_length, ROWS)
    for queries in torch.tensor(order).split(OWN_ROWS):  # a leak may be at a single position
        for state in states if in_time(0.45) else ():
            length = state.model.context_length
            yield 0.45, state, state.replaced(queries[queries < length], length)
    for length in dict.fromkeys((*LENGTHS, *order)):
        for state in states if length in LENGTHS else [own]:
            if in_time(0.5) and 1 <= length < state.model.context_length:
                yield 0.5, state, state.future(length, OWN_ROWS if state is own else ROWS)
    visible = own.model.visible(min(8, longest))
    many, queries = own.texts.draw(MANY_ROWS, len(visible)), torch.full((MANY_ROWS,), len(visible) // 2)
    yield 0.53, own, [own.hidden(many, queries, visible)]
    if own.model.vocab_size**2 <= MAX_PAIRS:
        yield 0.6, own, own.every_id(pairs=True)


@torch.no_grad()
def check_after_calls(certificate: Certificate, own: State, fresh: Model, seconds: float) -> None:
    """A state may keep an earlier text, or open a mask: a fresh copy has the same outputs, and no mask comes off.

    Args:
        seconds: for the calls of each mode.
    """
    model, longest = own.model, own.model.context_length
    ids, says = own.texts.draw(model.batch_size or 2, longest), "differs from a fresh copy, after other texts were read"
    another = lambda model: (fresh if model is own.model else fresh.in_float64())(ids)  # noqa: E731
    certificate.judge(own, [Claim("equal", ids, once(ids), another, says=says)])
    short = torch.zeros(model.batch_size or 1, min(2, longest), dtype=torch.long, device=model.device)
    for training, name in ((False, "after many calls"), (True, "mode=training after many calls")):
        called, end = model.changed(lambda module, t=training: module.train(t)), time.perf_counter() + seconds
        with contextlib.suppress(Exception):  # code of other projects may raise anything, as where it takes no 2 tokens
            for _ in itertools.takewhile(lambda _, end=end: time.perf_counter() < end, range(CALLS)):
                called.call(called.function, short)
        state = State(name, called, own.texts)
        certificate.judge(state, state.future(longest, ROWS))
