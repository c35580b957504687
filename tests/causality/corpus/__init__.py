"""A corpus of models, cached models, training pipelines and texts that leak, and of correct ones that look alike.

Nothing here knows a checker: `entry.build()` returns what `entry.interface` says, and `entry.leaks` is the verdict.
"""

from tests.causality.corpus import caches, correct, masks, mixing, pipelines  # noqa: F401  which fill the table
from tests.causality.corpus.pipelines import Pipeline
from tests.causality.corpus.table import ENTRIES, Entry, Trigger

__all__ = ["Entry", "Pipeline", "Trigger", "entries"]


def entries() -> tuple[Entry, ...]:
    """All entries: first what leaks, then what is correct."""
    return tuple(sorted(ENTRIES.values(), key=lambda entry: not entry.leaks))
