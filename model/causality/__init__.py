"""The causality certificate: `certify(model, ...)` for models, `certify_loss(losses, batches)` for a loss and its data.

`assert_causal(model, ...)` is for tests.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tril.model.causality.api import assert_causal, certify
    from tril.model.causality.loss_checks import certify_loss

__all__ = ["assert_causal", "certify", "certify_loss"]


def __getattr__(name: str) -> object:
    """Imports the functions on first use, so that a module of this package can be imported without the others."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tril.model.causality import api, loss_checks

    return getattr(loss_checks if name == "certify_loss" else api, name)
