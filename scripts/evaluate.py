"""Measures a checkpoint on a text:  python scripts/evaluate.py ckpt=latest [data=files data.path=FILE]

Loss, perplexity, bits per byte, accuracy and calibration with their intervals over documents; by default on the
validation part of the run. other=CHECKPOINT compares two checkpoints, text="..." gives the bits of each token of a
text, pairs=FILE.jsonl measures minimal pairs, and tasks=NAME[,NAME] runs tasks of lm-evaluation-harness (pip install
"tril[eval]"). Prints a table; writes files.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tril.data.settings import build, without_effect
from tril.model.atomic_files import write_json
from tril.model.evaluation.config import EvaluateConfig
from tril.model.evaluation.pairs import Pair, parse_pairs, score_pairs
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors, writable
from tril.scripts.cli.finished_run import TrainedRun, prepared_text, read_run
from tril.scripts.cli.formats import markdown_table, plain_table, plural, read_utf8
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.data.config import DataConfig
    from tril.model.evaluation.subject import EvaluatedText, Subject
    from tril.model.intervals import Interval

TEXTS = ("ckpt", "other", "text", "pairs", "tasks", "include_path", "out", "data.path", "data.val_path", "data.repo")
UNUSED = ("tokenizer", "batch_size", "val_batch_size", "document_mask")  # keys of data: the checkpoint decides them
MIXTURE = "mixture"  # the source that is several texts
PARTS = {"val": "validation part", "all": "whole text"}
KEPT = ("results", "groups", "group_subtasks", "n-samples", "n-shot", "versions", "higher_is_better", "configs")
ROWS = {  # of the table: figure -> heading, decimals
    "loss": ("loss, nats per token", 4),
    "perplexity": ("perplexity", 3),
    "bits_per_byte": ("bits per byte", 4),
    "accuracy": ("accuracy of the next token", 4),
    "calibration_error": ("expected calibration error, 15 bins", 4),
}


@entry("evaluate", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():  # before torch, which takes a second to import
        data = cfg.pop("data", None)
        settings = build(EvaluateConfig, cfg)
        refuse_unused(settings, typed)
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        pairs = None if settings.pairs is None else parse_pairs(read_utf8("pairs", settings.pairs), settings.pairs)
        data = None if data is None else parse_data(data)
        manager = None if settings.tasks is None else find_tasks(settings.tasks, settings.include_path)
        run = read_run(paths[0]) if data is settings.text is pairs is manager is None else None
    from tril.model.evaluation.subject import Subject
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(settings.device)
        if device == "cpu":
            keep_freed_memory()
        subjects = [Subject.of(path, device) for path in paths]
    folder = Path(settings.out or run_folder(paths[0]) / "evaluation")
    if settings.text is not None:
        measure_tokens(subjects[0], settings.text, settings.stride, folder)
    elif pairs is not None:
        measure_pairs(subjects[0], pairs, settings, folder)
    elif manager is not None:
        measure_tasks(subjects[0], manager, settings, folder)
    else:
        measure_text(subjects, data, run, settings, folder)


def refuse_unused(settings: EvaluateConfig, typed: Typed) -> None:
    """Raises ValueError for a typed setting that has no effect with the others."""
    unused = without_effect(settings)
    if "part" in unused:
        unused["data"] = unused["part"]
    for override in typed:
        group, *keys = override.key.split(".")
        if group in unused:
            raise ValueError(f"{override.typed} has no effect without {unused[group]}; leave it out")
        if group == "data" and {*UNUSED} & {*keys}:
            raise ValueError(f"{override.typed} has no effect: the checkpoint decides it; leave it out")


def parse_data(data: dict[str, Any]) -> "DataConfig":
    """The settings below data:, checked.

    Raises:
        ValueError: an invalid setting, or a text that is not scored.
        OSError: a file that does not exist.
    """
    from tril.data.config import parse
    from tril.scripts.cli.config import data_presets

    if data.get("format") == "chat":
        raise ValueError("data.format=chat has no effect: whole texts are scored, and not answers; leave it out")
    config = parse(data, data_presets())
    if config.source.name == MIXTURE:
        raise ValueError("data=mixture has several texts; evaluate one of its sources, such as data=stdlib")
    return config


def own_texts(run: TrainedRun, subjects: "list[Subject]", part: Literal["val", "all"]) -> "list[EvaluatedText]":
    """The text of a run in the tokens of each checkpoint, of which the first is the run's.

    Raises:
        ValueError: it is a mixture, or has changed since.
    """
    from tril.model.evaluation.subject import EvaluatedText

    if run.data.get("source") == MIXTURE:
        sources = f"the mixture of {', '.join(run.data['sources'])}"
        remedy = "evaluate one of them, such as data=stdlib, or data=files data.path=PATH"
        raise ValueError(f"{run.checkpoint.path} was trained on {sources}; {remedy}")
    [prepared], name = prepared_text(run).texts.values(), f"the {PARTS[part]} of the run"
    return [
        EvaluatedText.of(prepared, part, name)
        if subject.same_tokenizer(subjects[0])
        else subject.read_text(parse_data(run.data), part, name)
        for subject in subjects
    ]


def measure_text(
    subjects: "list[Subject]", data: "DataConfig | None", run: TrainedRun | None, settings: EvaluateConfig, folder: Path
) -> None:
    """Prints the figures of a text, the run's own or that of `data`; writes evaluation.json and evaluation.png."""
    from tril.model.evaluation.plot import plot_positions
    from tril.model.evaluation.subject import check_comparable, compare

    with user_errors():
        for subject in subjects:
            subject.check_stride(settings.stride)
        if data is not None:
            name = f"the {PARTS[settings.part]} of data.source={data.source.name}"
            texts = [subject.read_text(data, settings.part, name) for subject in subjects]
        else:
            assert run is not None
            texts = own_texts(run, subjects, settings.part)
        if len(subjects) > 1:
            check_comparable(subjects, texts)
        writable(folder, "out")
    strides = {"non_overlapping": None} | ({} if settings.stride is None else {"sliding": settings.stride})
    scored, sides = [], []
    for subject, text in zip(subjects, texts, strict=True):
        print(f"{subject.checkpoint.path}: {len(text.tokens):,} tokens", file=sys.stderr, flush=True)
        scored.append({name: subject.score(text, stride=stride) for name, stride in strides.items()})
        protocols = {name: found.report() for name, found in scored[-1].items()}
        sides.append(subject.describe() | {"text": text.describe(), "protocols": protocols})
    report = sides[0] | {"intervals": "95 %, Student's t over documents, see observations"}
    if len(subjects) > 1:
        equal = subjects[0].same_tokenizer(subjects[1])
        report["other"] = sides[1]
        report["other_minus_checkpoint"] = {
            name: compare(*(side[name] for side in scored), equal_tokens=equal) for name in strides
        }
    write_json(folder / "evaluation.json", plain(report))
    plot_positions(folder / "evaluation.png", report["protocols"])
    show(report)
    print(f"\n{folder}: evaluation.json, evaluation.png", flush=True)


def plain(report: dict) -> dict:
    """The report without dataclasses."""
    return json.loads(json.dumps(report, default=asdict))


def show(report: dict[str, Any]) -> None:
    """Prints the table, with a column for each checkpoint and each kind of windows, and what it is about."""
    sides = {key: side for key, side in (("ckpt", report), ("other", report.get("other"))) if side is not None}
    columns = {f"{key}, {found['name']}": found for key, side in sides.items() for found in side["protocols"].values()}
    lines = [["", *columns]]
    for figure, (heading, digits) in ROWS.items():
        lines.append([heading, *(shown(found["figures"][figure], digits) for found in columns.values())])
    print(f"{report['text']['name']}\n\n{markdown_table(lines)}\n")
    for key, side in sides.items():
        print(f"{key}: {side['checkpoint']}")
        if n_unknown := side["text"]["unknown_tokens"]:
            cause = "of the text stand for characters that the tokenizer lacks; bits per byte are too low"
            print(f"  {plural(n_unknown, 'token')} {cause}")
        for found in side["protocols"].values():
            windows = f"{found['windows']:,} windows of {found['context_length']} tokens, {found['targets']:,} targets"
            print(f"  {found['name']}: {windows}. 95 % intervals over {found['observations']['described']}.")
    for key, rows in report.get("other_minus_checkpoint", {}).items():
        for unit, row in rows.items():
            difference = f"{shown(row['difference'], 4, sign='+')} {unit}"
            print(f"other - ckpt, {report['protocols'][key]['name']}, paired: {difference}: {row['other_is']}")


def shown(interval: "Interval", digits: int, sign: str = "") -> str:
    """The mean and its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}z.{digits}f} [no interval]"
    return f"{interval.mean:{sign}z.{digits}f} [{interval.low:{sign}z.{digits}f}, {interval.high:{sign}z.{digits}f}]"


def measure_tokens(subject: "Subject", text: str, stride: int | None, folder: Path) -> None:
    """Prints the bits of each token of a text, whose sum is its size as coded by the model; writes tokens.json and the
    page tokens.html."""
    from tril.model.evaluation.token_page import token_costs, write_token_page

    with user_errors():
        subject.check_stride(stride)
        costs = token_costs(subject, text, stride)
        writable(folder, "out")
    bits, size = sum(cost.bits for cost in costs), len(text.encode())
    windows = {"length": subject.length, "stride": stride or subject.length}
    rows = [{"token": i, "text": cost.text, "bits": cost.bits} for i, cost in enumerate(costs)]
    totals = {"bits": bits, "bytes": size, "bits_per_byte": bits / size}
    write_json(folder / "tokens.json", subject.describe() | {"windows": windows} | totals | {"tokens": rows})
    summary = (
        f"{bits:,.1f} bits for {plural(size, 'byte')} and {plural(len(costs), 'token')}: {bits / size:.4f} bits per "
        f"byte. Windows of {windows['length']} tokens, stride {windows['stride']}; the first token follows an "
        "end-of-text token."
    )
    write_token_page(folder / "tokens.html", costs, f"Bits by {subject.describe()['checkpoint']}", summary)
    lines = [[str(row["token"]), f"{row['bits']:.2f}", repr(row["text"])] for row in rows]
    print(plain_table([["token", "bits", "text"], *lines], text_columns=(2,)))
    print(f"\n{summary}\n{folder}: tokens.json, tokens.html", flush=True)


def measure_pairs(subject: "Subject", pairs: list[Pair], settings: EvaluateConfig, folder: Path) -> None:
    """Prints the accuracy on minimal pairs; writes pairs.json."""
    file = str(settings.pairs)
    with user_errors():
        found = score_pairs(subject.lm, pairs, file)
        writable(folder, "out")
    write_json(folder / "pairs.json", plain(subject.describe() | {"file": file} | found))
    print(
        f"accuracy {shown(found['accuracy'], 4)} (95 %, Wilson): the good text is more probable in {found['right']} of "
        f"{plural(found['pairs'], 'pair')}.\n{plural(found['ties'], 'tie')}, counted as wrong. Each text is scored "
        f"whole, after an end-of-text token.\n{folder}: pairs.json",
        flush=True,
    )


def find_tasks(tasks: str, include_path: str | None) -> Any:
    """The TaskManager of lm_eval, which has all of `tasks`.

    Raises:
        ValueError: lm_eval is not installed, or has no such task.
        OSError: there is no folder `include_path`.
    """
    folder = None if include_path is None else Path(os.path.expanduser(include_path))
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"include_path={include_path} is not a folder; name one with the YAML files of tasks")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f'tasks={tasks} needs the library lm_eval; pip install "tril[eval]"') from error
    manager = TaskManager(include_path=folder)
    for name in tasks.split(","):
        if not manager.match_tasks([name]):
            raise ValueError(f"there is no task {name!r}; `lm_eval ls tasks` lists all names")
    return manager


def measure_tasks(subject: "Subject", manager: Any, settings: EvaluateConfig, folder: Path) -> None:
    """Prints the table of lm_eval for some of its tasks; writes tasks.json."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    from tril.model.evaluation.task_model import task_model

    options = {"num_fewshot": settings.num_fewshot, "limit": settings.limit, "log_samples": False}
    with user_errors():
        writable(folder, "out")
        names = manager.match_tasks(str(settings.tasks).split(","))
        results = simple_evaluate(task_model(subject.lm), tasks=names, task_manager=manager, **options)
    assert results is not None, "one process"
    results = dict(results)
    report = subject.describe() | {"limit": settings.limit} | {key: results[key] for key in KEPT if key in results}
    write_json(folder / "tasks.json", json.loads(json.dumps(report, default=handle_non_serializable)))
    print(f"{report['checkpoint']}\n\n{make_table(results).strip()}")
    if results.get("groups"):
        print(f"\n{make_table(results, 'groups').strip()}")
    print(f"\n{folder}: tasks.json", flush=True)


if __name__ == "__main__":
    main()
