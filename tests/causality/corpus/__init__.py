"""A corpus of models, cached models, training pipelines and texts that leak, and of correct ones that look alike.

The interface is neutral: entries need only torch, and nothing here knows a checker.

    from tril.model.causality import corpus

    for entry in corpus.entries():
        model = entry.build()          # see `Entry.interface`
        ...                            # does the checker's verdict equal `entry.leaks`?
"""

from tests.causality.corpus import (  # noqa: F401  each fills the registry
    cached_models,
    corpus_texts,
    gpt_leaks,
    length_leaks,
    lookalikes_attention,
    lookalikes_interfaces,
    lookalikes_other,
    lookalikes_patterns,
    lookalikes_recurrent,
    mask_leaks,
    mixing_leaks,
    mode_leaks,
    pipeline_leaks,
    pipelines,
    published_leaks,
    recurrence_leaks,
    routing_leaks,
    row_leaks,
    score_leaks,
    state_leaks,
    token_leaks,
)
from tests.causality.corpus.entry import ENTRIES, FAMILIES, INTERFACES, Entry, Trigger
from tests.causality.corpus.pipelines import Pipeline

__all__ = ["FAMILIES", "INTERFACES", "Entry", "Pipeline", "Trigger", "entries"]


def entries() -> tuple[Entry, ...]:
    """All entries in the order of FAMILIES: first what leaks, then what is correct."""
    return tuple(sorted(ENTRIES.values(), key=lambda entry: FAMILIES.index(entry.family)))
