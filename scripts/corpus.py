"""Scores checkers of causality on the corpus of leaking and of correct models:  python scripts/corpus.py

Prints, for each checker, how many leaks it catches, how often it names the right place, its false alarms, and its time.
With out=FOLDER it writes corpus.md, with a table by family and all wrong verdicts.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, nearest, strict_settings
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.formats import markdown_table, plain_table
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.causality.corpus import Entry
    from tril.model.causality.corpus.scoring import Finding, Score

NAMED = 12  # wrong verdicts of each kind that the terminal shows by name

Pairs = Sequence[tuple["Entry", "Finding"]]


@dataclass(frozen=True, config=strict_settings())
class CorpusConfig:
    """Settings, as in configs/corpus.yaml."""

    checkers: Annotated[list[str], Field(min_length=1)]
    families: list[str] | None
    only: list[str] | None
    out: str | None


@entry("corpus", ("out",))
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(CorpusConfig, cfg)
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.causality import corpus
    from tril.model.causality.corpus.scoring import chosen
    from tril.scripts.cli.checkers import CHECKERS

    with user_errors():
        for name in settings.checkers:
            if name not in CHECKERS:
                raise ValueError(f"there is no checker {name}{nearest(name, CHECKERS)}")
        entries = chosen(corpus.entries(), settings.families, settings.only)
        if not entries:
            raise ValueError("no entry has one of these families and one of these names; set only one of the two keys")
        folder = writable(settings.out, "out") if settings.out is not None else None
    findings = {name: run(name, CHECKERS[name], entries) for name in settings.checkers}
    print(plain_table(totals(findings)))
    for line in wrong_verdicts(findings, NAMED):
        print(line)
    if folder is not None:
        from tril.model.atomic_files import write_text

        write_text(folder / "corpus.md", report(findings))
        print(f"{folder}: corpus.md")


def run(name: str, checker, entries: Sequence["Entry"]) -> Pairs:
    """The findings of a checker, with its progress on a terminal."""
    from tqdm import tqdm

    from tril.model.causality.corpus.scoring import judge

    progress = tqdm(entries, desc=name, file=sys.stderr, leave=False, disable=None)
    return [(item, judge(checker, item)) for item in progress]


def totals(findings: Mapping[str, Pairs]) -> list[list[str]]:
    """A row for each checker."""
    from tril.model.causality.corpus.scoring import score

    header = ["checker", "leaks caught", "place right", "false alarms", "no verdict", "seconds"]
    return [header, *([name, *cells(score(pairs))] for name, pairs in findings.items())]


def cells(score: "Score") -> list[str]:
    caught, placed = f"{score.caught} of {score.leaks}", f"{score.placed} of {score.places}"
    alarms = f"{score.false_alarms} of {score.correct}"
    return [caught, placed, alarms, str(score.undecided), f"{score.seconds:.1f}"]


def families(findings: Mapping[str, Pairs]) -> list[list[str]]:
    """A row for each family: what each checker caught of its leaks, or its false alarms among the correct ones."""
    from tril.model.causality.corpus.scoring import by_family

    columns = {name: dict(by_family(pairs)) for name, pairs in findings.items()}
    rows = []
    for family, first in next(iter(columns.values())).items():
        scores = [column[family] for column in columns.values()]
        counts = [str(score.caught if first.leaks else score.false_alarms) for score in scores]
        rows.append([family, "leaks" if first.leaks else "correct", str(first.leaks or first.correct), *counts])
    return [["family", "kind", "entries", *columns], *rows]


def wrong_verdicts(findings: Mapping[str, Pairs], limit: int | None) -> list[str]:
    """A line for each checker and kind of wrong verdict, with the names of the entries."""
    from tril.model.causality.corpus.scoring import names_place

    kinds = {
        "missed": lambda item, finding: item.leaks and finding.leak is False,
        "wrong place": lambda item, finding: (
            item.leaks and bool(finding.leak) and item.place and finding.place and not names_place(item, finding)
        ),
        "false alarms": lambda item, finding: not item.leaks and bool(finding.leak),
        "no verdict": lambda item, finding: finding.leak is None,
    }
    lines = []
    for checker, pairs in findings.items():
        for kind, is_wrong in kinds.items():
            wrong = [_named(*pair) for pair in pairs if is_wrong(*pair)]
            if wrong:
                rest = "" if limit is None or len(wrong) <= limit else f" and {len(wrong) - limit} more"
                lines.append(f"{checker}, {kind}: {', '.join(wrong[:limit])}{rest}")
    return lines


def _named(item: "Entry", finding: "Finding") -> str:
    """The name of an entry, with what the checker said instead, if anything."""
    said = finding.error or (finding.place if item.leaks else "")
    return f"{item.name} ({said})" if said else item.name


def report(findings: Mapping[str, Pairs]) -> str:
    """Markdown: the totals, the families, and the wrong verdicts."""
    wrong = [f"- {line}" for line in wrong_verdicts(findings, None)]
    by_family = markdown_table(families(findings), text_columns=(0, 1))
    return "\n".join([markdown_table(totals(findings)), "", by_family, "", *wrong, ""])


if __name__ == "__main__":
    main()
