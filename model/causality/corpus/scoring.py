"""Scores checkers on the corpus: leaks caught, places named, false alarms, seconds."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tril.model.causality.corpus.entry import Entry


@dataclass(frozen=True)
class Finding:
    """What a checker says of an entry.

    Attributes:
        leak: None: no verdict.
        place: qualified name of the submodule that leaks; "" where it names none.
        seconds: time of the check with the build; `judge` measures it.
        error: why there is no verdict.
    """

    leak: bool | None
    place: str = ""
    seconds: float = 0.0
    error: str = ""


Checker = Callable[[Entry], Finding]


@dataclass(frozen=True)
class Score:
    """Counts of one checker over some entries.

    Attributes:
        leaks, caught: leaking entries, and those that it calls leaking.
        places, placed: caught entries that have a place, and those where it names it or a part of it.
        correct, false_alarms: correct entries, and those that it calls leaking.
        undecided: entries without a verdict, which are neither caught nor false alarms.
        seconds: of all entries together.
    """

    leaks: int
    caught: int
    places: int
    placed: int
    correct: int
    false_alarms: int
    undecided: int
    seconds: float


def judge(checker: Checker, entry: Entry) -> Finding:
    """The finding of a checker with its time. An exception is no verdict."""
    start = time.perf_counter()
    try:
        finding = checker(entry)
    except Exception as error:  # of the checker, or of a model that it calls in an unexpected way
        finding = Finding(None, error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return dataclasses.replace(finding, seconds=time.perf_counter() - start)


def score(pairs: Iterable[tuple[Entry, Finding]]) -> Score:
    """The counts of some entries."""
    pairs = list(pairs)
    caught = [(entry, finding) for entry, finding in pairs if entry.leaks and finding.leak]
    placed = [names_place(entry, finding) for entry, finding in caught if entry.place]
    return Score(
        leaks=sum(entry.leaks for entry, _ in pairs),
        caught=len(caught),
        places=len(placed),
        placed=sum(placed),
        correct=sum(not entry.leaks for entry, _ in pairs),
        false_alarms=sum(bool(finding.leak) for entry, finding in pairs if not entry.leaks),
        undecided=sum(finding.leak is None for _, finding in pairs),
        seconds=sum(finding.seconds for _, finding in pairs),
    )


def names_place(entry: Entry, finding: Finding) -> bool:
    """Whether the place is the entry's or a submodule of it."""
    return f"{finding.place}.".startswith(f"{entry.place}.")


def by_family(pairs: Sequence[tuple[Entry, Finding]]) -> Iterator[tuple[str, Score]]:
    """(family, its counts) in the order of the entries."""
    for family in dict.fromkeys(entry.family for entry, _ in pairs):
        yield family, score(pair for pair in pairs if pair[0].family == family)


def chosen(
    entries: Iterable[Entry], families: Collection[str] | None, names: Collection[str] | None
) -> tuple[Entry, ...]:
    """The entries of these families, or with these names; None: all.

    Raises:
        ValueError: an unknown family or name.
    """
    entries = tuple(entries)
    known: Mapping[str, set[str]] = {
        "families": {entry.family for entry in entries},
        "only": {entry.name for entry in entries},
    }
    for key, values in (("families", families), ("only", names)):
        unknown = sorted(set(values or ()) - known[key])
        if unknown:
            raise ValueError(f"{key}={unknown[0]!r} is not in the corpus; use any of {', '.join(sorted(known[key]))}")
    return tuple(
        entry
        for entry in entries
        if (families is None or entry.family in families) and (names is None or entry.name in names)
    )
