"""Tasks of lm-evaluation-harness on a checkpoint, which it reads as an exported folder of `transformers`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tril.model.checkpoint import Checkpoint
from tril.model.evaluation.config import EvaluateConfig
from tril.model.generation.generate import TOKENS_PER_BATCH
from tril.model.interop.hf import export_hf

KEPT = ("results", "groups", "group_subtasks", "n-samples", "n-shot", "versions", "higher_is_better", "configs")


def run_tasks(checkpoint: Checkpoint, settings: EvaluateConfig, device: str) -> tuple[dict[str, Any], str]:
    """The results of the tasks as plain values, and the tables of lm_eval; as `lm_eval --model hf` computes them.

    Raises:
        ValueError: lm_eval is not installed, or has no such task; or as `export_hf`.
        OSError: there is no folder `include_path`.
    """
    try:
        import lm_eval.models.huggingface  # noqa: F401  which needs accelerate
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise ValueError('tasks= needs the library lm_eval; pip install -e ".[eval]"') from error
    include = None if settings.include_path is None else Path(settings.include_path).expanduser()
    if include is not None and not include.is_dir():
        raise FileNotFoundError(f"include_path={include} is not a folder; name one with the YAML files of tasks")
    manager, names = TaskManager(include_path=include), str(settings.tasks).split(",")
    for name in names:
        if not manager.match_tasks([name]):
            raise ValueError(f"there is no task {name!r}; `lm_eval ls tasks` lists all names")
    with TemporaryDirectory() as temporary:
        export_hf(folder := Path(temporary) / "model", checkpoint)
        results = simple_evaluate(
            "hf",
            model_args={"pretrained": str(folder), "trust_remote_code": True},
            tasks=manager.match_tasks(names),  # pyright: ignore[reportArgumentType] names
            task_manager=manager,
            device=device,
            batch_size=max(1, TOKENS_PER_BATCH // checkpoint.config.context_length),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            log_samples=False,
        )
    assert results is not None, "one process"
    results = dict(results)
    report = {"limit": settings.limit} | {key: results[key] for key in KEPT if key in results}
    tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    text = "\n\n".join(table.strip() for table in tables)
    return json.loads(json.dumps(report, default=handle_non_serializable)), text
