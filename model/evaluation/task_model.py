"""A model that answers the requests of lm-evaluation-harness: log-likelihoods of texts, and generated text.

Only `harness_model` imports the package `lm_eval`, whose base class is abstract and computes nothing.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tril.model.evaluation.scores import score_windows
from tril.model.generation.generate import TOKENS_PER_BATCH
from tril.model.generation.language_model import LanguageModel

MAX_NEW_TOKENS = 256  # where a task sets none, as in lm_eval's own models
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Ids = Sequence[int]


class TaskModel:
    """Answers requests, whose `args` are as in `lm_eval.api.model.LM`.

    A text without context follows an end-of-text token, as in training. A prompt that is not empty follows nothing, as
    in sampling and in lm_eval's model of Hugging Face `transformers`. Each method raises ValueError if a text has
    characters that the tokenizer does not know.

    Args:
        lm: with a causal mask. Special tokens in a text are encoded as its tokenizer is set to.
    """

    def __init__(self, lm: LanguageModel):
        assert lm.config.causal, "the losses of a model without causal mask use the tokens that they predict"
        self.lm = lm

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log-probability of the continuation, and whether it is the greedy one.

        White space at the end of the context moves into the continuation, since a tokenizer joins a space with the word
        after it. Both are encoded as one text, unless a token of it would belong to both.
        """
        pairs = []
        for context, continuation in (request.args for request in requests):
            kept = context.rstrip()
            continuation = context[len(kept) :] + continuation
            before, whole = self._ids(kept), self._ids(kept + continuation)
            targets = whole[len(before) :] if whole[: len(before)] == before else self._ids(continuation)
            pairs.append((before or [self.lm.eot_id], targets))
        return self._scores(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each (text,): its log-probability. Windows are full, and each token is scored once."""
        pairs = [([self.lm.eot_id], self._ids(*request.args)) for request in requests]
        return [score for score, _ in self._scores(pairs, disable_tqdm)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each (prompt, generation_kwargs): the text that follows, up to the first stop string.

        Raises:
            ValueError: an option that is not supported.
        """
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):  # a batch has the same options
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        size = max(1, TOKENS_PER_BATCH // self.lm.config.context_length)
        with _progress(len(requests), "generated", disable_tqdm) as bar:
            for rows in groups.values():
                options = generation_options(requests[rows[0]].args[1])
                rows.sort(key=lambda i: -len(requests[i].args[0]))  # little padding
                for seed, first in enumerate(range(0, len(rows), size)):
                    batch = rows[first : first + size]
                    found = self.lm.generate([requests[i].args[0] for i in batch], seed=seed, **options)
                    texts |= zip(batch, found, strict=True)
                    bar.update(len(batch))
        return [texts[i] for i in range(len(requests))]

    def _ids(self, text: str) -> list[int]:
        return self.lm.encode(text) if text else []

    def _scores(self, pairs: Sequence[tuple[Ids, Ids]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """The log-probability of the targets after their context, and whether each is the most probable token."""
        owners, parts = [], []
        for i, pair in enumerate(pairs):
            for window in windows(*pair, self.lm.config.context_length):
                owners.append(i)
                parts.append(window)
        totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
        with _progress(len(parts), "scored windows", disable_tqdm) as bar:
            for number, scores in score_windows(self.lm.model, parts, n_ids=self.lm.n_ids):
                totals[owners[number]] -= scores.nll.sum(dtype=float).item()
                greedy[owners[number]] &= bool(scores.correct.all())
                bar.update()
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


def _progress(total: int, name: str, is_off: bool) -> Any:
    """A bar, which is shown on terminals only."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, disable=is_off or None)


def harness_model(lm: LanguageModel) -> Any:
    """A TaskModel as an instance of `lm_eval.api.model.LM`. Raises ImportError if lm_eval is not installed."""
    from lm_eval.api.model import LM

    class HarnessModel(TaskModel, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            TaskModel.__init__(self, lm)

    return HarnessModel()
