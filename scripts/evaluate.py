"""Measures a checkpoint on a text:  python scripts/evaluate.py ckpt=latest [data=files data.path=FILE]

Loss, perplexity, bits per byte, accuracy and calibration with their intervals over documents; by default on the
validation part of the run. other=CHECKPOINT compares two checkpoints, text="..." gives the bits of each token,
pairs=FILE.jsonl measures minimal pairs, and tasks=NAME[,NAME] runs tasks of lm-evaluation-harness
(pip install -e ".[eval]"). Prints a table; writes a JSON file.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.data.settings import without_effect
from tril.model.atomic_files import write_json, write_text
from tril.model.evaluation.config import EvaluateConfig
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.command_line import CommandLine, Program, Typed
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import check_writable, pick_device, user_errors
from tril.scripts.cli.finished_run import prepared_text, read_run
from tril.scripts.cli.formats import markdown_table, plain_table, plural, read_utf8

if TYPE_CHECKING:
    from tril.data.config import DataConfig
    from tril.model.evaluation.subject import Part, Subject
    from tril.model.intervals import Interval

OF_TRAINING = ("tokenizer", "batch_size", "val_batch_size", "document_mask", "format")  # keys of data without effect
PARTS = {"val": "validation part", "all": "whole text"}


@entry(Program("evaluate", EvaluateConfig, {"data": None}))
def main(line: CommandLine[EvaluateConfig]) -> None:
    settings, data = line.own, line.settings.get("data")
    with user_errors():  # before torch, which takes a second to import
        refuse_unused_data(settings, line.typed)
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        folder = Path(settings.out or run_folder(paths[0]) / "evaluation")
        check_writable(folder, "out")
        source = None if data is None else data_of(data)
    from tril.model.evaluation.pairs import score_pairs
    from tril.model.evaluation.subject import Subject
    from tril.model.evaluation.task_model import run_tasks
    from tril.model.evaluation.token_costs import token_costs, token_page
    from tril.model.training.hardware import keep_freed_memory

    page = None
    with user_errors():
        device = pick_device(settings.device)
        if device == "cpu":
            keep_freed_memory()
        subjects = [Subject.of(path, device) for path in paths]
        if settings.pairs is not None:
            name, report = "pairs", score_pairs(subjects[0].lm, read_utf8("pairs", settings.pairs), settings.pairs)
            right = f"the good text is more probable in {report['right']} of {plural(report['pairs'], 'pair')}"
            text = f"accuracy {shown(report['accuracy'])} (95 %, Wilson): {right}; {plural(report['ties'], 'tie')}"
        elif settings.text is not None:
            name, report = "tokens", token_costs(subjects[0].lm, settings.text)
            sizes = f"{plural(report['bytes'], 'byte')} and {plural(len(report['tokens']), 'token')}"
            summary = f"{report['bits']:,.1f} bits for {sizes}: {report['bits_per_byte']:.4f} bits per byte"
            rows = [[f"{row['bits']:.2f}", repr(row["text"])] for row in report["tokens"]]
            text = f"{plain_table([['bits', 'token'], *rows], text_columns=(1,))}\n\n{summary}"
            page = token_page(report["tokens"], f"Bits by {subjects[0].describe()['checkpoint']}", summary)
        elif settings.tasks is not None:
            name, (report, text) = "tasks", run_tasks(subjects[0].lm, settings)
    if settings.text is settings.pairs is settings.tasks is None:
        name, (report, text) = "evaluation", measure_text(subjects, source, settings.part)
    report = json.loads(json.dumps(subjects[0].describe() | report, default=asdict))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", report)
    if page:
        write_text(folder / f"{name}.html", page)
    print(f"{text}\n{folder}: {name}.json{f', {name}.html' if page else ''}", flush=True)


def refuse_unused_data(settings: EvaluateConfig, typed: Typed) -> None:
    """Raises ValueError for a typed setting below data: that has no effect."""
    need = without_effect(settings).get("part")
    for override in typed:
        group, *keys = override.key.split(".")
        if group == "data" and need:
            raise ValueError(f"{override.typed} has no effect without {need}; leave it out")
        if group == "data" and {*OF_TRAINING} & {*keys}:
            raise ValueError(f"{override.typed} has no effect on whole texts in the checkpoint's tokens; leave it out")


def data_of(data: dict[str, Any]) -> "DataConfig":
    """The settings below data:, checked. Raises ValueError for an invalid setting, or for several texts."""
    from tril.data.config import parse
    from tril.scripts.cli.config import data_presets

    config = parse(data, data_presets())
    if config.source.name == "mixture":
        remedy = "evaluate one of its sources, such as data=stdlib, or data=files data.path=PATH"
        raise ValueError(f"a mixture has several texts; {remedy}")
    return config


def measure_text(subjects: "list[Subject]", source: "DataConfig | None", part: "Part") -> tuple[dict[str, Any], str]:
    """The report on a text, by default that of the first run, and what to print."""
    from tril.model.evaluation.subject import EvaluatedText, compare_texts

    name, prepared = (
        f"the {PARTS[part]} of {'the run' if source is None else f'data.source={source.source.name}'}",
        None,
    )
    with user_errors():
        if source is None:
            run = read_run(Path(str(subjects[0].checkpoint.path)))
            [prepared, *_], source = prepared_text(run).texts.values(), data_of(run.data)
        texts = [
            EvaluatedText.of(prepared, part, name)
            if prepared is not None and subject.same_tokenizer(subjects[0])
            else subject.read_text(source, part, name)
            for subject in subjects
        ]
    scored = [subject.score(text) for subject, text in zip(subjects, texts, strict=True)]
    reports = [{"text": text.describe()} | each.report() for text, each in zip(texts, scored, strict=True)]
    sides = [subject.describe() | report for subject, report in zip(subjects, reports, strict=True)]
    report = dict(sides[0])
    if len(subjects) > 1:
        with user_errors():
            differences = compare_texts(*scored, same_tokenizer=subjects[0].same_tokenizer(subjects[1]))
        report |= {"other": sides[1], "other_minus_checkpoint": differences}
    keys = ("ckpt", "other")[: len(sides)]
    table = [["", *keys]]
    for figure in sides[0]["figures"]:
        table.append([figure.replace("_", " "), *(shown(side["figures"][figure]) for side in sides)])
    lines = [name, "", markdown_table(table), ""]
    for key, side in zip(keys, sides, strict=True):
        sizes = f"{side['targets']:,} targets in windows of {side['context_length']} tokens"
        lines.append(f"{key}: {side['checkpoint']}, {sizes}; 95 % intervals over {side['observations']['described']}")
        if n_unknown := side["text"]["unknown_tokens"]:
            lines.append(f"  {plural(n_unknown, 'token')} of the text are unknown; bits per byte are too low")
    for unit, row in report.get("other_minus_checkpoint", {}).items():
        lines.append(f"other - ckpt, paired: {shown(row.difference, sign='+')} {unit}: {row.verdict}")
    return report, "\n".join(lines)


def shown(interval: "Interval", sign: str = "") -> str:
    """The mean and its 95 % interval."""
    ends = [f"{x:{sign}z.4f}" for x in (interval.low, interval.high) if x is not None]
    return f"{interval.mean:{sign}z.4f} [{', '.join(ends) or 'no interval'}]"


if __name__ == "__main__":
    main()
