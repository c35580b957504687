"""The certificate on the table: leaks fail, correct rows pass, and a leak is found in the submodule where it is.

python -m pytest -n0 tests/causality    # the everyday rows; with -m "slow or not slow" all
"""

from tests.causality.net import V
from tests.causality.rows import each
from tril.model.causality import certify, certify_loss

SECONDS = {True: 5.0, False: 0.1}  # for leaks, whose search ends when one is found, and for correct models


@each("logits", "cached", "pipeline", "texts", by_chance=False)
def test_leaks_fail_and_correct_rows_pass(row):
    built = row.build()
    if row.kind == "texts":
        certificate = certify_loss(train=built[0], validation=built[1])
    elif row.kind == "pipeline":
        certificate = certify_loss(built.losses, built.batches, model=built.model, vocab_size=V)
    else:
        sizes = {"vocab_size": V, "context_length": row.context_length if row.leaks else 40, "expected": row.expected}
        certificate = certify(built, **sizes, budget_seconds=SECONDS[row.leaks])
    assert certificate.passed is not row.leaks, certificate
    found = certificate.failures[0].place if row.kind == "logits" and row.leaks else ""
    assert not found or f"{found}.".startswith(f"{row.place}."), certificate
