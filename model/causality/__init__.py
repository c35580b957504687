"""The causality certificate: `certify(model, ...)` for models, `certify_loss(losses, batches)` for a loss and its data.

`assert_causal(model, ...)` is for tests. Read model.py, claims.py, state.py and certificate.py, in this order.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tril.model.causality.certificate import assert_causal, certify
    from tril.model.causality.loss import certify_loss

__all__ = ["assert_causal", "certify", "certify_loss"]


def __getattr__(name: str) -> object:
    """Imports the functions on first use, so that the pytest plugin can be imported without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tril.model.causality import certificate, loss

    return getattr(loss if name == "certify_loss" else certificate, name)
