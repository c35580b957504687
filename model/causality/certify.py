"""Runs all checks on a grid of cases: the causality certificate.

It shows by measurement that no output of a model depends on the future, and that each depends on all of its past. Every
output position is tested against every input position, by changed tokens and by gradients; decoding, padding and packed
documents are compared with the full pass at the level of logits.
"""

from collections.abc import Callable, Iterable

from tril.model.causality.canary import Z, canary
from tril.model.causality.case import Case
from tril.model.causality.certificate import Certificate
from tril.model.causality.checks import run_checks


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
            certificate.results += run_checks(case)
            if number == 0:
                certificate.dependencies = case.dependencies
                certificate.allowed = case.subject.visible(case.lengths[-1])
                if case.subject.differentiable:  # a subject without gradients cannot be trained
                    _add_canary(certificate, case)
            if case.subject.note and case.subject.note not in certificate.notes:
                certificate.notes.append(case.subject.note)
    return certificate


def _add_canary(certificate: Certificate, case: Case) -> None:
    test = certificate.canary = canary(case.subject)
    where = f"loss {test.loss:.4f} on random tokens, but a causal model has at least {test.bound:.4f}"
    certificate.results.append(case.result("canary", test.length, test.below, Z, test.n_tokens, test.passed, where))
