"""Measures a checkpoint on a text:  python scripts/evaluate.py ckpt=latest [data=files data.path=FILE]

Loss, perplexity, bits per byte, accuracy and calibration with their intervals over documents; by default on the
validation part of the run. other=CHECKPOINT compares two checkpoints, pairs=FILE.jsonl measures minimal pairs. Prints a
table; writes evaluation.json and evaluation.png.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.atomic_files import write_json
from tril.model.evaluation.pairs import read_pairs, score_pairs
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors, writable
from tril.scripts.cli.finished_run import Run, prepared_text, read_run
from tril.scripts.cli.formats import plural
from tril.scripts.cli.tables import markdown_table
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.data.config import DataConfig
    from tril.model.evaluation.subject import EvaluatedText, Subject
    from tril.model.intervals import Interval

TEXTS = ("ckpt", "other", "pairs", "out", "data.path", "data.val_path", "data.repo")
UNUSED = ("tokenizer", "batch_size", "val_batch_size", "document_mask")  # keys of data: without effect here
MIXTURE = "mixture"  # the source that is several texts
ONLY_TEXT = ("other", "limit", "stride", "samples")  # no use with pairs=
ROWS = {  # of the table: figure -> heading, decimals
    "loss": ("loss, nats per token", 4),
    "perplexity": ("perplexity", 3),
    "bits_per_byte": ("bits per byte", 4),
    "accuracy": ("accuracy of the next token", 4),
    "calibration_error": ("expected calibration error, 15 bins", 4),
}


@dataclass(frozen=True, config=strict_settings())
class EvaluateConfig:
    """The keys of configs/evaluate.yaml."""

    ckpt: str
    other: str | None
    part: Literal["val", "all"]
    limit: Annotated[int, Field(ge=2)] | None  # the first and the last window
    stride: Annotated[int, Field(ge=1)] | None
    samples: Annotated[int, Field(ge=0, le=1000)]
    pairs: str | None
    device: str
    out: str | None
    data: dict | None = None

    @model_validator(mode="after")
    def _check_pairs(self):
        unused = [f"{key}={getattr(self, key)}" for key in ONLY_TEXT if getattr(self, key)]
        unused += ["data=..."] * (self.data is not None) + ["part=all"] * (self.part == "all")
        if self.pairs is not None and unused:
            raise ValueError(f"{unused[0]} has no effect with pairs={self.pairs}; leave one of them out")
        return self


@entry("evaluate", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(EvaluateConfig, cfg)
        data = parse_data(settings.data, settings.part, typed)
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        pairs = None if settings.pairs is None else read_pairs(settings.pairs)
        run = read_run(paths[0]) if pairs is None and data is None else None
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.evaluation.subject import Subject
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(settings.device)
        if device == "cpu":
            keep_freed_memory()
        subjects = [Subject.of(path, device) for path in paths]
    default = run_folder(paths[0]) / "evaluation"
    if pairs is not None:
        measure_pairs(subjects[0], pairs, settings, default)
    else:
        measure_text(subjects, data, run, settings, default)


def parse_data(data: dict[str, Any] | None, part: str, typed: Typed) -> "DataConfig | None":
    """The settings below data:, checked; None for the run's own text.

    Raises:
        ValueError: an invalid setting, or one that has no effect.
        OSError: a file that does not exist.
    """
    if data is None:
        if part != "val":
            raise ValueError(f"part={part} needs a text, such as data=files data.path=FILE; the run's own is part=val")
        return None
    for override in typed:
        key = override.key.split(".")
        if key[0] == "data" and key[1:2] and key[1] in UNUSED:
            raise ValueError(f"{override.typed} has no effect: the checkpoint decides it; leave it out")
    from tril.data.config import parse
    from tril.scripts.cli.config import data_presets

    if data.get("format") == "chat":
        raise ValueError("data.format=chat has no effect: whole texts are scored, and not answers; leave it out")
    config = parse(data, data_presets())
    if config.source.name == MIXTURE:
        raise ValueError("data=mixture has several texts; evaluate one of its sources, such as data=stdlib")
    return config


def own_texts(run: Run, subjects: "list[Subject]") -> "list[EvaluatedText]":
    """The validation part of a run in the tokens of each checkpoint, of which the first is the run's.

    Raises:
        ValueError: it is a mixture, or has changed since.
    """
    from tril.data.config import parse
    from tril.model.evaluation.subject import EvaluatedText
    from tril.scripts.cli.config import data_presets

    if run.settings["data"].get("source") == MIXTURE:
        sources = f"the mixture of {', '.join(run.settings['data']['sources'])}"
        remedy = "evaluate one of them, such as data=stdlib, or data=files data.path=PATH"
        raise ValueError(f"{run.checkpoint} was trained on {sources}; {remedy}")
    [prepared], name = prepared_text(run).texts.values(), "the validation part of the run"
    return [
        EvaluatedText.of(prepared, "val", name)
        if subject.same_tokenizer(subjects[0])
        else subject.read_text(parse(run.settings["data"], data_presets()), "val", name)
        for subject in subjects
    ]


def measure_pairs(subject: "Subject", pairs: list, settings: EvaluateConfig, default: Path) -> None:
    """Prints the accuracy on minimal pairs; writes pairs.json."""
    with user_errors():
        found = score_pairs(subject.lm, pairs, str(settings.pairs))
        folder = writable(settings.out or default, "out")
    report = {key: subject.describe()[key] for key in ("checkpoint", "steps")} | {"file": settings.pairs}
    write_json(folder / "pairs.json", plain(report | found))
    print(
        f"accuracy {shown(found['accuracy'], 4)} (95 %, Wilson): the good text is more probable in {found['right']} of "
        f"{plural(found['pairs'], 'pair')}.\n{plural(found['ties'], 'tie')}, counted as wrong. Each text is scored "
        f"whole, after an end-of-text token.\n{folder}: pairs.json",
        flush=True,
    )


def measure_text(
    subjects: "list[Subject]", data: "DataConfig | None", run: Run | None, settings: EvaluateConfig, default: Path
) -> None:
    """Prints the figures of a text, the run's own or that of `data`; writes evaluation.json and evaluation.png."""
    from tril.model.evaluation.plot import plot
    from tril.model.evaluation.subject import check_comparable, compare

    first = subjects[0]
    with user_errors():
        for subject in subjects:
            subject.check_stride(settings.stride)
        if settings.samples:
            first.check_samples_code(settings.samples)
        if run is not None:
            texts = own_texts(run, subjects)
        else:
            assert data is not None
            texts = [subject.read_text(data, settings.part) for subject in subjects]
        if len(subjects) > 1:
            check_comparable(subjects, texts, settings.limit)
        folder = writable(settings.out or default, "out")
    windows = {"non_overlapping": None} | ({} if settings.stride is None else {"sliding": settings.stride})
    evaluations = []
    for subject, text in zip(subjects, texts, strict=True):
        log(f"{subject.checkpoint.path}: {len(text.tokens):,} tokens in windows of {subject.length}")
        scored = {name: subject.score(text, stride=stride, limit=settings.limit) for name, stride in windows.items()}
        evaluations.append(scored)
    sides = [subject.describe() | {"text": text.describe()} for subject, text in zip(subjects, texts, strict=True)]
    report = sides[0] | {"intervals": "95 %, Student's t over documents, see observations"}
    protocols = [{name: found.report() for name, found in side.items()} for side in evaluations]
    report |= {"protocols": protocols[0]}
    if settings.samples:
        log(f"{plural(settings.samples, 'sample')}")
        report["samples"] = first.parsing_samples(settings.samples)
    if len(subjects) > 1:
        report |= {
            "other": sides[1] | {"protocols": protocols[1]},
            "other_minus_checkpoint": {
                name: compare(*(side[name] for side in evaluations), equal_tokens=first.same_tokenizer(subjects[1]))
                for name in windows
            },
        }
    write_json(folder / "evaluation.json", plain(report))
    plot(folder / "evaluation.png", protocols[0])
    show(report)
    print(f"\n{folder}: evaluation.json, evaluation.png", flush=True)


def plain(report: dict) -> dict:
    """The report without dataclasses."""
    return json.loads(json.dumps(report, default=asdict))


def show(report: dict[str, Any]) -> None:
    """Prints the tables."""
    print(f"{report['checkpoint']} on {report['text']['name']}")
    print_side(report)
    if "other" in report:
        print(f"\n{report['other']['checkpoint']} on the same text")
        print_side(report["other"])
        print("\nother - ckpt, paired:")
        for key, rows in report["other_minus_checkpoint"].items():
            name = report["protocols"][key]["name"]
            for unit, row in rows.items():
                print(f"  {name}: {shown(row['difference'], 4, sign='+')} {unit}: {row['other_is']}")
    if "samples" in report:
        found = report["samples"]
        print(f"\n{found['parsed']} of {plural(found['n'], 'sample')} parse as Python: {shown(found['share'], 3)}")


def print_side(side: dict[str, Any]) -> None:
    """The table of one checkpoint, and what it is about."""
    protocols = side["protocols"]
    lines = [["", *(protocols[name]["name"] for name in protocols)]]
    lines += [
        [heading, *(shown(protocol["figures"][key], digits) for protocol in protocols.values())]
        for key, (heading, digits) in ROWS.items()
    ]
    print(f"\n{markdown_table(lines)}\n")
    for protocol in protocols.values():
        windows, total = protocol["windows"], protocol["of_windows"]
        print(
            f"{protocol['name']}: {windows:,} of {total:,} windows of {protocol['context_length']} tokens, "
            f"{protocol['targets']:,} targets. 95 % intervals over {protocol['observations']['described']}."
        )
    if side["text"]["unknown_tokens"]:
        unknown = plural(side["text"]["unknown_tokens"], "token")
        print(f"{unknown} of the text stand for characters that the tokenizer lacks; bits per byte are too low.")


def shown(interval: "Interval", digits: int, sign: str = "") -> str:
    """The mean and its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}z.{digits}f} [no interval]"
    return f"{interval.mean:{sign}z.{digits}f} [{interval.low:{sign}z.{digits}f}, {interval.high:{sign}z.{digits}f}]"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
