"""Tasks of lm-evaluation-harness: a model that answers its requests, log-likelihoods of texts and generated text."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tril.model.evaluation.config import EvaluateConfig
from tril.model.evaluation.scores import score_windows
from tril.model.generation.generate import TOKENS_PER_BATCH
from tril.model.generation.language_model import LanguageModel

MAX_NEW_TOKENS = 256  # where a task sets none, as in lm_eval's own models
KEPT = ("results", "groups", "group_subtasks", "n-samples", "n-shot", "versions", "higher_is_better", "configs")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Ids = Sequence[int]


def run_tasks(lm: LanguageModel, settings: EvaluateConfig) -> tuple[dict[str, Any], str]:
    """The results of the tasks as plain values, and the tables of lm_eval.

    Raises:
        ValueError: lm_eval is not installed, or has no such task; see also `task_model`.
        OSError: there is no folder `include_path`.
    """
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise ValueError('tasks= needs the library lm_eval; pip install -e ".[eval]"') from error
    folder = None if settings.include_path is None else Path(settings.include_path).expanduser()
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"include_path={folder} is not a folder; name one with the YAML files of tasks")
    manager, names = TaskManager(include_path=folder), str(settings.tasks).split(",")
    for name in names:
        if not manager.match_tasks([name]):
            raise ValueError(f"there is no task {name!r}; `lm_eval ls tasks` lists all names")
    options = {"num_fewshot": settings.num_fewshot, "limit": settings.limit, "log_samples": False}
    tasks = manager.match_tasks(names)
    results = simple_evaluate(task_model(lm), tasks=tasks, task_manager=manager, **options)  # pyright: ignore
    assert results is not None, "one process"
    results = dict(results)
    report = {"limit": settings.limit} | {key: results[key] for key in KEPT if key in results}
    tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    text = "\n\n".join(table.strip() for table in tables)
    return json.loads(json.dumps(report, default=handle_non_serializable)), text


def task_model(lm: LanguageModel) -> Any:
    """An instance of `lm_eval.api.model.TemplateLM`, which splits contexts from continuations as for its own models.

    A text without context follows an end-of-text token, as in training. A prompt that is not empty follows nothing, as
    in sampling. Its methods raise ValueError if a text has characters that the tokenizer does not know, or a task an
    option of generation that is not supported.

    Args:
        lm: with a causal mask. Special tokens in a text are encoded as its tokenizer is set to.

    Raises:
        ImportError: lm_eval is not installed.
    """
    from lm_eval.api.model import TemplateLM

    class TaskModel(TemplateLM):
        eot_token_id = lm.eot_id  # pyright: ignore[reportAssignmentType] a property of the base class

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
            return lm.encode(string) if string else []

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            return score_targets(lm, [(context or [lm.eot_id], targets) for _, context, targets in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            pairs = [([lm.eot_id], self.tok_encode(*request.args)) for request in requests]
            return [score for score, _ in score_targets(lm, pairs)]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            return generate_texts(lm, [request.args for request in requests])

    return TaskModel()


def score_targets(lm: LanguageModel, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
    """The log-probability of the targets after their context, and whether each is the most probable token."""
    parts = [(i, window) for i, pair in enumerate(pairs) for window in windows(*pair, lm.config.context_length)]
    totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
    found = score_windows(lm.model, [window for _, window in parts], n_ids=lm.n_ids)
    for (i, _), scores in zip(parts, found, strict=True):
        totals[i] -= scores.nll.sum(dtype=float).item()
        greedy[i] &= bool(scores.correct.all())
    return list(zip(totals, greedy, strict=True))


def windows(context: Ids, targets: Ids, length: int) -> list[tuple[Ids, int]]:
    """The ids of each window and how many of them, at its end, are targets.

    A window has at most `length` inputs: what is too long is cut from the left of its context. Only targets that do not
    fit into one window need several.
    """
    ids, n_context = [*context, *targets], len(context)
    ends = [*range(length, len(targets), length), len(targets)] if targets else []
    return [
        (ids[max(0, n_context + end - length - 1) : n_context + end], end - begin)
        for begin, end in itertools.pairwise([0, *ends])
    ]


def generate_texts(lm: LanguageModel, requests: Sequence[tuple[str, dict]]) -> list[str]:
    """For each prompt and its generation_kwargs: the text that follows, up to the first stop string."""
    texts: dict[int, str] = {}
    groups: dict[str, list[int]] = {}
    for i, (_, kwargs) in enumerate(requests):  # a batch has the same options
        groups.setdefault(json.dumps(kwargs, sort_keys=True), []).append(i)
    size = max(1, TOKENS_PER_BATCH // lm.config.context_length)
    for rows in groups.values():
        options = generation_options(requests[rows[0]][1])
        rows.sort(key=lambda i: -len(requests[i][0]))  # little padding
        for seed, batch in enumerate(rows[first : first + size] for first in range(0, len(rows), size)):
            found = lm.generate([requests[i][0] for i in batch], seed=seed, **options)
            texts |= zip(batch, found, strict=True)
    return [texts[i] for i in range(len(requests))]


def generation_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LanguageModel.generate` for the generation_kwargs of a task.

    Raises:
        ValueError: one is not supported.
    """
    from lm_eval.models.utils import normalize_gen_kwargs  # knows the names that tasks use

    values: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), MAX_NEW_TOKENS))
    stop = [text for text in values.pop("until") if text]
    options = {"max_new_tokens": values.pop("max_gen_toks"), "stop": stop or None, "top_k": None, "temperature": 1.0}
    is_random = values.pop("do_sample")
    if unknown := sorted(values.keys() - set(SAMPLING)):
        supported = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
        raise ValueError(f"generation_kwargs.{unknown[0]} of a task is not supported; use {supported}")
    return options | values | ({} if is_random else {"temperature": 0.0})
