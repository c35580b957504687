"""The checkers that scripts/corpus.py can score, by name."""

from typing import Any

from tril.model.causality.corpus.baselines import last_token, one_gradient
from tril.model.causality.corpus.entry import Entry
from tril.model.causality.corpus.scoring import Checker, Finding


def tril(entry: Entry) -> Finding:
    """The certificate of Tril; of a pipeline or a text, that of the loss."""
    from tril.model.causality import certify, certify_loss

    built: Any = entry.build()
    if entry.interface in ("pipeline", "data"):
        if entry.interface == "data":
            return Finding(not certify_loss(train=built[0], validation=built[1]).passed)
        losses = certify_loss(built.losses, built.batches, model=built.model, vocab_size=entry.vocab_size)
        return Finding(not losses.passed)
    certificate = certify(
        built,
        name=entry.name,
        vocab_size=entry.vocab_size,
        context_length=entry.context_length,
        expected=entry.expected,
    )
    place = next((result.place for result in certificate.results if result.place and not result.passed), "")
    return Finding(not certificate.passed, place)


CHECKERS: dict[str, Checker] = {"last_token": last_token, "one_gradient": one_gradient, "tril": tril}
