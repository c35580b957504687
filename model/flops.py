"""How many keys a query is multiplied with, for the count of FLOPs."""


def scored_keys(length: int, *, causal: bool, window: int | None) -> float:
    """Keys per query of a sequence of `length` tokens, on average over its positions.

    With `causal` position t sees t + 1 keys, at most `window`; the mean without a window is (length + 1) / 2. Without
    `causal` it is `length`, or the window where that is shorter.
    """
    window = length if window is None else min(window, length)
    if not causal:
        return window
    # The first `window` positions see 1, 2, ..., window keys.
    return (window * (window + 1) / 2 + (length - window) * window) / length
