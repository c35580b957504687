"""The causality certificate: all checks on a grid of cases, and every measured figure with its bound.

It shows by measurement that no output of a model depends on the future, and that each depends on all of its past. Every
output position is tested against every input position, by changed tokens and by gradients; decoding, padding and packed
documents are compared with the full pass at the level of logits.
"""

import contextlib
import itertools
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from tril.model.causality.canary import Canary, Z, canary
from tril.model.causality.case import Case, Result
from tril.model.causality.checks import run_checks

CHECKS = {
    "repeatable": "two runs of one text agree, and so does a text alone and in a batch",
    "no future": "no logit depends on a hidden token, by replaced and cut off texts, by changed tokens or by gradients",
    "all of the past": "every visible position has a gradient",
    "attention": "no weight on a hidden key; softmax(q k / sqrt(D) + bias) on the others",
    "reference": "logits = those of the explicit backend, computed by matrix products",
    "decoding": "full pass = chunks with the cache = last position of a chunk = steps of constant shape",
    "padding": "left-padded texts have the logits of the texts alone, for any padding tokens",
    "generation": "generated tokens = those of a loop of full passes, cached, uncached and past the context length",
    "rows": "no sample of a batch changes another",
    "documents": "packed documents = each of them alone",
    "canary": f"trained on random tokens, it does not predict fresh ones ({Z:g} standard errors)",
}
LOSS_CHECKS = {  # of certify_loss
    "shift": "no target stands among its inputs at its own position or before",
    "targets": "a loss depends on no other target, and exp(-loss) of all tokens adds up to at most 1",
    "pipeline canary": f"trained with the real batches on random tokens, it predicts none ({Z:g} standard errors)",
    "overlap": "at most 1 % of the validation tokens lie in passages of the training text",
}
ALL_CHECKS = CHECKS | LOSS_CHECKS
TRAINING = {"dropout=True", "training=True"}  # labels of cases in training mode


@dataclass
class Certificate:
    """The results of all checks.

    Attributes:
        dependencies: "gradient" and "perturbation" of the first case, (T, T) each, NaN where not tested.
        allowed: bool (T, T), the expected dependencies of that case.
        notes: limitations of the measurement, one line each.
        undecided: what passed, but would also pass with a leak of the size of rounding.
    """

    subject: str
    results: list[Result] = field(default_factory=list)
    dependencies: dict[str, Tensor] = field(default_factory=dict)
    allowed: Tensor | None = None
    canary: Canary | None = None
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def add(self, other: "Certificate") -> None:
        """Takes the results, the notes and the canary test of another certificate."""
        self.results += other.results
        self.notes += [line for line in other.notes if line not in self.notes]
        self.undecided += [line for line in other.undecided if line not in self.undecided]
        self.canary = self.canary or other.canary
        self.seconds += other.seconds

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """Failed results; those of attention first, because it alone names layer and head."""
        order = ["attention", *ALL_CHECKS]
        return sorted((r for r in self.results if not r.passed), key=lambda result: order.index(result.check))

    def failures_by_check(self) -> dict[str, list[Result]]:
        """The same by check."""
        return {name: list(failed) for name, failed in itertools.groupby(self.failures, lambda result: result.check)}

    def checks(self) -> dict[str, int]:
        """Number of results of each check, in the order of CHECKS."""
        counts = Counter(result.check for result in self.results)
        return {name: counts[name] for name in ALL_CHECKS if counts[name]}

    def scope(self) -> str:
        """What was tested, in words; the certificate says nothing about other lengths and modes."""
        cases = [set(result.case.split()) for result in self.results]
        precisions = sorted({label.partition("=")[2] for labels in cases for label in labels if "precision=" in label})
        lengths = sorted({result.length for result in self.results})
        modes = ["evaluation mode", *["training mode"] * any(labels & TRAINING for labels in cases)]
        return f"lengths {lengths[0]} to {lengths[-1]} ({len(lengths)} of them); {', '.join(precisions + modes)}"

    def verdict(self) -> str:
        """One sentence."""
        if not self.passed:
            return f"{self.subject} is NOT certified ({', '.join(self.failures_by_check()) or 'nothing was tested'})"
        passed = f"{self.subject} sees no future, and all of its past"
        return f"{passed}, as far as rounding allows to tell" if self.undecided else passed

    def __str__(self) -> str:
        """The table, the first failure of each check, and the verdict."""
        lines = [f"{self.table()}\n"]
        for check, failures in self.failures_by_check().items():
            first = failures[0]
            lines.append(f"FAILED  {check}: {first.where}")
            lines.append(f"        {first.case}, length {first.length}; {len(failures)} failures")
        tested = f"{len(self.results)} checks in {self.seconds:.0f} s; {self.scope()}" if self.results else "no checks"
        return "\n".join([*lines, f"{self.verdict()}: {tested}"])

    def summary(self) -> dict:
        """Plain values for a checkpoint. Older checkpoints hold the same keys."""
        first = [results[0] for results in self.failures_by_check().values()]
        failed = [f"{result.check}: {result.where}; {result.case}, length {result.length}" for result in first]
        return {"passed": self.passed, "checks": self.checks(), "failed": failed, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        """The verdict that a run prints."""
        passed = f"sees no future ({', '.join(self.checks())})"
        verdict = passed if self.passed else f"FAILS: {self.summary()['failed'][0]}"
        return f"causal  {verdict}; certified in {self.seconds:.1f} s"

    def to_dict(self) -> dict:
        """Everything but the matrices, for JSON."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        canary = None if self.canary is None else asdict(self.canary) | {"margin": self.canary.margin}
        results = [asdict(result) for result in self.results]
        details = {"canary": canary, "notes": [*self.notes, *self.undecided], "versions": versions, "results": results}
        return {"subject": self.subject} | self.summary() | details

    def table(self) -> str:
        """One line per check: number of results, compared pairs or logits, the worst figure and its limit."""
        lines = [f"{'check':<16} {'runs':>5} {'failed':>6} {'compared':>12}  {'worst (limit)':<22} what"]
        for name, what in ALL_CHECKS.items():
            results = [r for r in self.results if r.check == name]
            if not results and name in LOSS_CHECKS:
                continue
            if not results:
                lines.append(f"{name:<16} {'-':>5} {'-':>6} {'-':>12}  {'not applicable':<22} {what}")
                continue
            worst = max(results, key=lambda r: (not r.passed, r.worst / r.bound if r.bound else r.worst))
            figure = f"{worst.worst:.2g} ({worst.bound:.2g})"
            if name == "all of the past":  # the one check whose values have to be above 0
                figure = f"min {min(r.worst for r in results):.2g} (> 0)"
            failed, tested = sum(not r.passed for r in results), sum(r.tested for r in results)
            lines.append(f"{name:<16} {len(results):>5} {failed:>6} {tested:>12,}  {figure:<22} {what}")
        if self.canary is not None:
            loss = f"loss {self.canary.loss:.4f} ± {self.canary.error:.4f} nats per token"
            lines.append(f"canary: {loss}; no causal model is expected below {self.canary.bound:.4f}")
        return "\n".join([*lines, *(f"note: {note}" for note in (*self.notes, *self.undecided))])


def certify(subject: str, cases: Iterable[Case], *, progress: Callable[[str], None] = lambda name: None) -> Certificate:
    """Runs all checks on all cases.

    Args:
        subject: a name for the model.
        cases: the first one is the model itself: its dependencies are plotted, and it runs the canary test.
        progress: called with the name of each case before its checks.
    """
    certificate = Certificate(subject)
    with certificate.timed():
        for number, case in enumerate(cases):
            progress(case.name)
            certificate.add(certify_case(case))
            if number == 0:
                certificate.dependencies = case.dependencies
                certificate.allowed = case.subject.visible(case.lengths[-1])
                certificate.add(certify_canary(case))
    return certificate


def certify_case(case: Case) -> Certificate:
    """Runs all checks but the canary test."""
    results = list(run_checks(case))
    notes, undecided = ([line] if line else [] for line in (case.subject.note, case.undecided))
    return Certificate(case.name, results, notes=notes, undecided=undecided)


def certify_canary(case: Case) -> Certificate:
    """Runs the canary test, unless the subject cannot be trained, or is allowed to see its targets."""
    certificate = Certificate(case.name)
    visible = case.subject.visible(case.lengths[-1])
    # A subject without gradients cannot be trained, and a pattern that shows targets allows any loss.
    if case.subject.differentiable and not visible.triu(1).any():
        test = certificate.canary = canary(case.subject)
        loss = f"loss {test.loss:.4f} on random tokens, but a causal model has at least {test.bound:.4f}"
        where = "" if test.passed else loss
        certificate.results.append(case.result("canary", test.length, test.below, Z, test.n_tokens, where))
    return certificate
