"""Runs tasks of lm-evaluation-harness on a checkpoint:  python scripts/eval.py ckpt=latest tasks=NAME[,NAME]

The package `lm_eval` (pip install "tril[eval]") has the tasks, downloads their data and computes their metrics; the
checkpoint answers their requests. include_path=FOLDER adds tasks of your own. Prints a table; writes the results as
JSON. scripts/evaluate.py measures a text, without lm_eval.
"""

import difflib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.atomic_files import write_text
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors, writable
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.evaluation.subject import Subject

TEXTS = ("ckpt", "tasks", "include_path", "out")
INSTALL = 'needs the library lm_eval; pip install "tril[eval]"'
KEPT = ("results", "groups", "group_subtasks", "n-samples", "n-shot", "versions", "higher_is_better", "configs")
N_NEAR = 3  # names that the error for an unknown task shows


@dataclass(frozen=True, config=strict_settings())
class EvalConfig:
    """The keys of configs/eval.yaml."""

    ckpt: str
    tasks: str | None
    include_path: str | None
    num_fewshot: Annotated[int, Field(ge=0)] | None
    limit: Annotated[int, Field(ge=1)] | None
    device: str
    out: str | None

    def names(self) -> list[str]:
        """The tasks. Raises ValueError if none is named."""
        names = [name.strip() for name in (self.tasks or "").split(",")]
        if not all(names):
            raise ValueError(f"tasks={self.tasks or ''} must name tasks, separated by commas; use tasks=NAME[,NAME]")
        return names


@entry("eval", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(EvalConfig, cfg)
        names, checkpoint = settings.names(), find_checkpoint(settings.ckpt)
        file = Path(os.path.expanduser(settings.out or run_folder(checkpoint) / "evaluation" / "tasks.json"))
        if file.is_dir():
            raise IsADirectoryError(f"out={settings.out} is a folder; name a file")
        manager, found = find_tasks(names, settings.include_path)
    from tril.model.evaluation.subject import Subject

    with user_errors():
        device = pick_device(settings.device)
        subject = Subject.of(checkpoint, device)
        writable(file.parent, "out")
        results = run_tasks(subject, manager, found, settings)
    from lm_eval.utils import handle_non_serializable, make_table

    report = subject.describe() | {"limit": settings.limit} | {key: results[key] for key in KEPT if key in results}
    write_text(file, json.dumps(report, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")
    print(f"{report['checkpoint']}\n\n{make_table(results).strip()}")
    if results.get("groups"):
        print(f"\n{make_table(results, 'groups').strip()}")
    print(f"\n{file}", flush=True)


def find_tasks(names: list[str], include_path: str | None) -> tuple[Any, list[str]]:
    """lm_eval's TaskManager, and the names of all tasks and groups that `names` stands for.

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
        raise ValueError(f"tasks={','.join(names)} {INSTALL}") from error
    if folder is not None:  # reading the thousands of tasks of lm_eval takes seconds
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # a group may contain tasks of lm_eval
            return own, names
    manager = TaskManager(include_path=folder)
    matches = {name: manager.match_tasks([name]) for name in names}
    for name in names:
        if not matches[name]:
            near = difflib.get_close_matches(name, manager.all_tasks, n=N_NEAR)
            remedy = f"did you mean {', '.join(near)}?" if near else "lm_eval ls tasks lists all names"
            raise ValueError(f"there is no task {name}; {remedy}")
    return manager, list(dict.fromkeys(match for name in names for match in matches[name]))


def run_tasks(subject: "Subject", manager: Any, names: list[str], settings: EvalConfig) -> dict[str, Any]:
    """The results as lm_eval returns them.

    Raises:
        ValueError: a task does not work with this model, or has errors.
        OSError: its data cannot be read.
    """
    from jinja2 import TemplateError
    from lm_eval.evaluator import simple_evaluate

    from tril.model.evaluation.task_model import harness_model

    try:
        results = simple_evaluate(
            model=harness_model(subject.lm),
            tasks=list(names),
            task_manager=manager,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            log_samples=False,
        )
    except (KeyError, TemplateError) as error:  # of a task's YAML
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"tasks={','.join(names)} cannot be run ({cause}); correct the task") from error
    assert results is not None, "one process"
    return dict(results)


if __name__ == "__main__":
    main()
