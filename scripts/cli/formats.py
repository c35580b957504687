"""Numbers as they are printed: durations and counts."""

import time

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def clock(seconds: float) -> str:
    """3725 -> "01:02:05"; a day or more: "1.5 days"."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"


def engineering(value: float) -> str:
    """1540000 -> "1.54 M"."""
    limit, unit = next(((limit, unit) for limit, unit in UNITS if value >= limit), (1, ""))
    return f"{value / limit:.3g} {unit}".rstrip()


def plural(n: int, noun: str) -> str:
    """1 -> "1 run", 2 -> "2 runs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
