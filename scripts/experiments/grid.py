"""The runs of a grid: the combinations of a command, whether each is valid, and how large the models are."""

import copy
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from tril.model.formats import plain_table
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import CONFIGS, RunConfig
from tril.scripts.cli.errors import UserError, message_of
from tril.scripts.cli.run import choose_hardware
from tril.scripts.experiments.sweep import label_of, text_of

MAX_FOLDER_NAME = 120  # characters


@dataclass
class PlannedRun:
    """A valid run of a sweep.

    Attributes:
        arguments: of train.py, key=value each.
        settings: nested plain values.
        values: of the swept keys.
        sizes: parameters and FLOPs per token, once `fit_to_text` has set them.
    """

    arguments: list[str]
    settings: dict[str, Any]
    config: RunConfig
    values: dict[str, object] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.top.seed

    @property
    def folder(self) -> str:
        """Its name below the sweep's folder."""
        return folder_name(self.values | {"seed": self.seed})

    @property
    def identity(self) -> str:
        """Equal for two runs whose results are necessarily equal."""
        return json.dumps(self.config.canonical(), sort_keys=True)

    def entry(self) -> dict:
        """Its entry of launches.jsonl."""
        named = {"folder": self.folder, "values": self.values, "seed": self.seed, "arguments": self.arguments}
        return named | self.sizes


class Rejected(NamedTuple):
    """A combination of the grid that cannot be trained, and the reason."""

    arguments: list[str]
    reason: str


def expand(words: Sequence[str]) -> list[list[Override]]:
    """The combinations of the values in a command, the last key fastest.

    Args:
        words: in Hydra's grammar, such as "model.n_heads=1,2" or "seed=range(0,3)".
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for each in parser.parse_overrides(list(words)):
        key, is_swept = each.get_key_element(), each.is_sweep_override()
        texts = [f"{key}={value}" for value in each.sweep_string_iterator()] if is_swept else [str(each.input_line)]
        choices.append(parser.parse_overrides(texts))
    return [list(combination) for combination in itertools.product(*choices)]


def argument_of(override: Override) -> str:
    """An argument of train.py, which takes a text without the quotes of Hydra's grammar."""
    value = override.value()
    return f"{override.get_key_element()}={value}" if isinstance(value, str) else str(override.input_line)


def plan(words: Sequence[str]) -> tuple[list[PlannedRun], list[Rejected]]:
    """Composes and checks each combination of a command. Of runs with the same result, the first one is kept."""
    composed: dict[tuple[str, ...], dict[str, Any]] = {}
    runs, rejected = dict[str, PlannedRun](), []
    for combination in expand(words):
        arguments = [argument_of(each) for each in combination]
        try:
            settings = settings_of(combination, composed)
            config = RunConfig.of(settings)
            run = PlannedRun(arguments, settings, replace(config, hardware=choose_hardware(config)))
        except (ValueError, OSError) as error:
            rejected.append(Rejected(arguments, message_of(error)))
            continue
        first = runs.setdefault(run.identity, run)
        if first is not run:
            differing = " ".join(text for text in first.arguments if text not in arguments)
            rejected.append(Rejected(arguments, f"the same run as {differing}: the difference has no effect"))
    return list(runs.values()), rejected


def settings_of(combination: Sequence[Override], composed: dict[tuple[str, ...], dict[str, Any]]) -> dict[str, Any]:
    """The settings of a run as nested plain values. Hydra takes tenths of a second, so it composes runs that differ in
    numbers once.

    Args:
        composed: the settings of earlier calls.
    """
    numbers = [each for each in combination if not (each.is_add() or each.is_delete() or isinstance(each.value(), str))]
    others = tuple(argument_of(each) for each in combination if each not in numbers)
    if others not in composed:
        composed[others] = compose("train", others).settings
    settings = copy.deepcopy(composed[others])
    for each in numbers:
        *groups, name = each.get_key_element().split(".")
        inner: Any = settings
        for group in groups:
            inner = inner.get(group) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or name not in inner:  # Hydra says why
            return compose("train", [argument_of(each) for each in combination]).settings
        inner[name] = each.value()
    return settings


def report_rejected(runs: Sequence[PlannedRun], rejected: Sequence[Rejected], *, skip_invalid: bool) -> None:
    """Prints the combinations that are left out, each once for all its seeds.

    Raises:
        UserError: there are some and `skip_invalid` is False, or no valid run remains.
    """
    if not rejected:
        return
    every = [*runs, *rejected]
    columns = list(zip(*(run.arguments for run in every), strict=True))
    varied = [i for i, texts in enumerate(columns) if len(set(texts)) > 1 and not texts[0].startswith("seed=")]
    lines = dict.fromkeys(f"  {' '.join(run.arguments[i] for i in varied)}: {run.reason}" for run in rejected)
    counts = f"{len(rejected)} of {len(every)} runs"
    if skip_invalid and runs:
        print("\n".join([f"{counts} are left out:", *lines]), flush=True)
        return
    remedy = "correct them, or leave them out with sweep.skip_invalid=true" if runs else "correct them"
    error = UserError(f"{counts} of the grid are invalid; {remedy}")
    for line in lines:
        error.add_note(line)
    raise error


def name_runs(runs: Sequence[PlannedRun]) -> list[str]:
    """Sets the values of each run; returns the swept keys, those in whose text the runs differ, without the seed."""
    texts = [
        {key.lstrip("+"): text for key, _, text in (argument.partition("=") for argument in run.arguments)}
        for run in runs
    ]
    keys = dict.fromkeys(key for text in texts for key in text if key != "seed")
    swept = [key for key in keys if len({text.get(key) for text in texts}) > 1]
    for run, text in zip(runs, texts, strict=True):
        run.values = {key: value_of(run.settings, key, text.get(key)) for key in swept}
    return swept


def value_of(settings: Mapping[str, Any], key: str, choice: str | None) -> object:
    """The value of a key; for a config group `choice`, the name of its option, and as given for a group of settings."""
    if (CONFIGS / key).is_dir():
        return choice
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return choice if isinstance(value, Mapping) else value


def folder_name(values: Mapping[str, object]) -> str:
    """The values as a name that file systems accept, with a hash if it had to be changed."""
    text = ",".join(f"{key}={text_of(value)}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_FOLDER_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def fit_to_text(runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], list[Rejected]]:
    """Prepares the text and sets the sizes of each run; rejects runs for which the text is too short."""
    from tril.data.batches import TrainWindows, ValWindows
    from tril.model.gpt import GPT, sizes

    fitted, rejected = [], []
    for run in runs:
        try:
            data, length = run.config.data, run.config.model.context_length
            text = data.prepare()
            TrainWindows(text.tokens("train"), length, data.batch_size, run.seed)  # raises if the text is too short
            ValWindows(text.tokens("val"), length, data.batch_size)
            assert run.config.hardware is not None
            run.config = run.config.complete(run.config.hardware, text.meta["vocab_size"])
        except (ValueError, OSError) as error:
            rejected.append(Rejected(run.arguments, message_of(error)))
            continue
        run.sizes |= sizes(GPT.without_values(run.config.model), data.window_lengths(length))
        fitted.append(run)
    return fitted, rejected


def grid_table(runs: Sequence[PlannedRun], states: Sequence[str]) -> str:
    """One line for each variant: seeds, sizes, and the states of its runs."""
    lines = [["", "seeds", "parameters", "MFLOP per token", "so far"]]
    for label in dict.fromkeys(label_of(run.values) for run in runs):
        members = [(run, state) for run, state in zip(runs, states, strict=True) if label_of(run.values) == label]
        run = members[0][0]
        sizes = [f"{run.sizes['parameters']:,}", f"{run.sizes['flops_per_token'] / 1e6:,.1f}"]
        ended = [state for _, state in members if state != "not started"]
        so_far = ", ".join(f"{ended.count(state)} {state}" for state in sorted(set(ended)))
        lines.append([label, ",".join(str(run.seed) for run, _ in members), *sizes, so_far])
    return plain_table(lines, text_columns=(0, len(lines[0]) - 1))
