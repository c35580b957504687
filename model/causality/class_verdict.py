"""The verdict on a class of `transformers`: a tiny model of it is built and certified."""

import time
from collections.abc import Sequence
from typing import Any

from tril.model.causality.case import ModelError, one_line
from tril.model.causality.certificate import Certificate, certify
from tril.model.causality.grids.module_subject import NO_DECODING, NO_PADDING
from tril.model.causality.grids.tiny_configs import tiny_config
from tril.model.causality.grids.transformers_grid import model_cases
from tril.model.causality.grids.transformers_loading import build, quiet

# Failed checks, and what their failure says. The first three say the same: an output depends on later tokens.
LEAK = "leak"
VERDICTS = {
    "no future": LEAK,
    "attention": LEAK,
    "canary": LEAK,
    "all of the past": "past missing",
    "repeatable": "not repeatable",
    "rows": "rows depend",
    "decoding": "decoding differs",
    "padding": "padding differs",
}
BEYOND_WINDOW = "sees beyond its window"  # keys of the past that the window of its config hides
BROKEN = {NO_DECODING: "error in decoding", NO_PADDING: "error in padding"}  # notes of the certificate
CAUSAL, NOT_BUILT, ERROR = "causal", "not built", "error"
PRECISIONS = ("32-true",)


def judge(name: str, precisions: Sequence[str] = PRECISIONS) -> dict[str, Any]:
    """Builds and certifies the class of `transformers` with this name.

    Returns:
        Plain values: class, verdict, seconds; failed, the first failure by verdict, or the reason why there is none;
        tested, the checks that ran; and notes.
    """
    quiet()
    started = time.perf_counter()
    record = _judged(name, precisions)
    return {"class": name} | record | {"seconds": round(time.perf_counter() - started, 1)}


def _judged(name: str, precisions: Sequence[str]) -> dict[str, Any]:
    import transformers

    try:
        model_class = getattr(transformers, name)
        model = build(tiny_config(model_class), 0, model_class=model_class)
    except Exception as error:  # code of other projects may raise anything
        return no_verdict(NOT_BUILT, one_line(error))
    try:
        certificate = certify(name, model_cases(name, model, precisions=precisions))
    except ModelError as error:
        return no_verdict(ERROR, str(error))
    except Exception as error:  # such as a class that cannot be built with another attention
        return no_verdict(ERROR, one_line(error))
    return verdict(certificate)


def no_verdict(kind: str, why: str) -> dict[str, Any]:
    """The record of a class without certificate."""
    return {"verdict": kind, "failed": {kind: why}, "tested": [], "notes": []}


def verdict(certificate: Certificate) -> dict[str, Any]:
    """What the failed checks say."""
    failed, failures = dict[str, str](), certificate.failures_by_check()
    assert failures.keys() <= VERDICTS.keys(), failures.keys()
    for check, says in VERDICTS.items():
        for result in failures.get(check, []):
            seen_past = result.query is not None and result.key is not None and result.key <= result.query
            figures = f"{result.worst:.2g}, bound {result.bound:.2g}"
            line = f"{result.where} ({figures}); {result.case}, length {result.length}"
            failed.setdefault(BEYOND_WINDOW if says == LEAK and seen_past else says, line)
    notes = [*certificate.notes, *certificate.undecided]
    for missing, says in BROKEN.items():
        if broken := next((note for note in notes if missing in note), ""):
            failed[says] = broken[broken.index(missing) :]
    tested = list(certificate.checks())
    return {"verdict": ", ".join(failed) or CAUSAL, "failed": failed, "tested": tested, "notes": notes}
