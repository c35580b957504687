"""Certifies every causal language model class of `transformers`:  python scripts/certify_transformers.py

Builds a tiny model with random weights of each class, certifies it, and writes the verdicts as lines of JSON and as a
table. A class that crashes or hangs does not end the others. Started again, the command goes on where it was stopped,
and tries classes without a verdict again. Exit status 0: every class was tried, whatever its verdict. All keys:
configs/certify_transformers.yaml.
"""

import json
import multiprocessing
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, nearest, strict_settings
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.formats import markdown_table
from tril.scripts.cli.typed import Typed

PRELOADED = ["torch", "transformers.modeling_utils", "tril.model.causality.class_verdict"]
SUFFIX = r"(For(CausalLM|ConditionalGeneration)|(LM|LMHead)Model|ModelWithLMHead|WithLMHeadModel)"
OPTIONAL = ("decoding", "padding")  # checks that a class without cache or attention mask does not have

Record = dict[str, Any]


@dataclass(frozen=True, config=strict_settings())
class SweepConfig:
    """Settings, as in configs/certify_transformers.yaml."""

    names: str | None
    out: str
    workers: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(gt=0)]


@entry("certify_transformers", ("names", "out"))
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(SweepConfig, cfg)
        names = chosen(settings.names)
        folder = writable(settings.out, "out")
    records = folder / f"transformers-{version('transformers')}.jsonl"
    finished = judged(records)
    missing = [name for name in names if name not in finished]
    with records.open("a", encoding="utf-8") as file:
        for record in verdicts(missing, settings):
            finished[record["class"]] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            first = next(iter(record["failed"].values()), "")
            print(f"{record['class']}: {record['verdict']} ({record['seconds']} s) {first}".rstrip(), flush=True)
    rows = [finished[name] for name in names]
    from tril.model.atomic_files import write_text

    write_text(records.with_suffix(".md"), report(rows))
    print(summary(rows))
    print(f"{folder}: {records.name}, {records.stem}.md")


def chosen(names: str | None) -> list[str]:
    """The classes with these names, or all.

    Args:
        names: separated by commas; the suffix of a class, such as ForCausalLM, may be left out.
    """
    try:
        from tril.model.causality.grids.tiny_configs import causal_classes

        classes = causal_classes()
    except ImportError as error:
        raise ValueError("this needs the library transformers; pip install transformers") from error
    if names is None:
        return classes
    by_name = {re.sub(f"{SUFFIX}$", "", name): name for name in classes} | {name: name for name in classes}
    for name in names.split(","):
        if name not in by_name:
            raise ValueError(f"names={name} is no causal language model of transformers{nearest(name, by_name)}")
    return list(dict.fromkeys(by_name[name] for name in names.split(",")))


def judged(records: Path) -> dict[str, Record]:
    """The classes that have a verdict in the file of an earlier start, by name."""
    from tril.model.causality.class_verdict import ERROR, NOT_BUILT

    found = {}
    for line in records.read_text(encoding="utf-8").splitlines() if records.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a command that was killed
            continue
        if record["verdict"] not in (ERROR, NOT_BUILT):
            found[record["class"]] = record
    return found


def verdicts(names: Sequence[str], settings: SweepConfig) -> Iterator[Record]:
    """The record of each class, as soon as it is there."""
    if not settings.workers:
        from tril.model.causality.class_verdict import judge

        yield from map(judge, names)
        return
    # A fork server imports the libraries once; Windows has none.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(PRELOADED)
    with ThreadPool(settings.workers) as pool:
        yield from pool.imap_unordered(partial(in_process, context=context, seconds=settings.seconds), names)


def in_process(name: str, context: Any, seconds: float) -> Record:
    """The record of a class, computed in a process of its own, which ends after `seconds` at the latest."""
    from tril.model.causality.class_verdict import ERROR, no_verdict

    started = time.perf_counter()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_verdict, args=(name, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        why = f"no verdict within {seconds:g} s; set seconds to more"
    except EOFError:
        process.join()
        why = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return {"class": name} | no_verdict(ERROR, why) | {"seconds": round(time.perf_counter() - started, 1)}


def send_verdict(name: str, sender: Connection) -> None:
    """Runs in the process of a class."""
    import warnings

    import torch

    from tril.model.causality.class_verdict import judge

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # tiny models; several processes share the cores
    sender.send(judge(name))


def report(records: Sequence[Record]) -> str:
    """Markdown: counts, and a line for each class."""
    header = ["class", "verdict", "not tested", "seconds", "first failure"]
    rows = [[r["class"], r["verdict"], untested(r), f"{r['seconds']:.1f}", first_failure(r)] for r in records]
    head = f"transformers {version('transformers')}, torch {version('torch')}: {summary(records)}"
    return "\n".join([head, "", markdown_table([header, *rows], text_columns=(0, 1, 2, 4)), ""])


def summary(records: Sequence[Record]) -> str:
    """How many classes have each verdict."""
    counts = Counter(record["verdict"] for record in records)
    return f"{len(records)} classes: " + "; ".join(f"{n} {verdict}" for verdict, n in counts.most_common())


def untested(record: Mapping[str, Any]) -> str:
    """Checks that did not apply; empty without a certificate."""
    return ", ".join(check for check in OPTIONAL if record["tested"] and check not in record["tested"])


def first_failure(record: Mapping[str, Any]) -> str:
    """In one cell of a table."""
    return textwrap.shorten(next(iter(record["failed"].values()), ""), 160, placeholder=" ...").replace("|", "\\|")


if __name__ == "__main__":
    main()
