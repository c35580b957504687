"""The runs of a grid: the combinations of a command, whether each is valid, and how large the models are."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from tril.data.settings import flatten
from tril.model.formats import markdown_table
from tril.scripts.cli.app import Composed, compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, message_of
from tril.scripts.cli.init_from import take_over
from tril.scripts.cli.run import choose_hardware
from tril.scripts.experiments.sweep import label_of, text_of

MAX_FOLDER_NAME = 120  # characters


@dataclass
class PlannedRun:
    """A run of a sweep.

    Attributes:
        arguments: of train.py, key=value each.
        settings: nested plain values, and the same checked, once `check_settings` has set them.
        choices: the option of each config group, likewise.
        values: of the swept keys, once `name_runs` has set them.
        sizes: parameters and FLOPs per token, once `check_text` has set them.
    """

    arguments: list[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str | None] = field(default_factory=dict)
    config: RunConfig = field(init=False)
    values: dict[str, object] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.top.seed

    @property
    def folder(self) -> str:
        """Its name below the sweep's folder."""
        return folder_name(self.values | {"seed": self.seed})

    def entry(self) -> dict:
        """Its entry of launches.jsonl."""
        named = {"folder": self.folder, "values": self.values, "seed": self.seed, "arguments": self.arguments}
        return named | self.sizes


def expand(words: Sequence[str]) -> list[list[str]]:
    """The combinations of the values in a command, as arguments of train.py; the last key is the fastest.

    Args:
        words: in Hydra's grammar, such as "model.n_heads=1,2" or "seed=range(0,3)".

    Raises:
        UserError: a value is repeated.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for each in parser.parse_overrides(list(words)):
        texts = [str(each.input_line)]
        if each.is_sweep_override():
            texts = [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        arguments = [argument_of(value) for value in parser.parse_overrides(texts)]
        if repeated := [text for i, text in enumerate(arguments) if text in arguments[:i]]:
            raise UserError(f"{each.input_line} has {repeated[0]} twice, which gives the same run; leave one out")
        choices.append(arguments)
    return [list(combination) for combination in itertools.product(*choices)]


def argument_of(override: Override) -> str:
    """An argument of train.py, which takes a text without the quotes of Hydra's grammar."""
    value = override.value()
    return f"{override.get_key_element()}={value}" if isinstance(value, str) else str(override.input_line)


def plan(combinations: Sequence[list[str]], *, skip_invalid: bool | None = None) -> tuple[list[PlannedRun], list[str]]:
    """Composes and checks the runs with these arguments, and prepares their text. Nothing is trained.

    Returns:
        The runs, and the swept keys.

    Raises:
        UserError: see `keep_valid`.
    """
    composed: dict[tuple[str, ...], Composed] = {}  # without the seed, since Hydra takes tenths of a second
    first: dict[str, PlannedRun] = {}  # by all that decides the results

    def check_settings(run: PlannedRun) -> None:
        others = tuple(text for text in run.arguments if not text.startswith("seed="))
        if others not in composed:
            composed[others] = compose_run(others)
        seeds = [("seed", yaml.safe_load(x.removeprefix("seed="))) for x in run.arguments if x not in others]
        run.settings, run.choices = composed[others].settings | dict(seeds), composed[others].choices
        config = RunConfig.of(run.settings)
        run.config = replace(config, hardware=choose_hardware(config))
        results = json.dumps([config.canonical(), run.settings["init_from"]], sort_keys=True)
        if (same := first.setdefault(results, run)) is not run:
            differing = " ".join(text for text in same.arguments if text not in run.arguments)
            raise ValueError(f"the same run as {differing or 'without it'}; the difference has no effect")

    runs = keep_valid([PlannedRun(each) for each in combinations], check_settings, skip_invalid=skip_invalid)
    swept = name_runs(runs)
    return keep_valid(runs, check_text, skip_invalid=skip_invalid), swept


def compose_run(arguments: Sequence[str]) -> Composed:
    """The settings of a run, with the model and the tokenizer of `init_from`."""
    composed = compose("train", arguments)
    source = composed.settings["init_from"]
    return composed if source is None else replace(composed, settings=take_over(source, composed)[0])


def keep_valid(
    runs: Sequence[PlannedRun], check: Callable[[PlannedRun], None], *, skip_invalid: bool | None
) -> list[PlannedRun]:
    """The runs for which `check` raises no ValueError or OSError. Prints the others, each once for all its seeds.

    Args:
        skip_invalid: the setting of a grid; None: there is none.

    Raises:
        UserError: there are others and `skip_invalid` is not True, or no valid run remains.
    """
    shared = set.intersection(*(set(run.arguments) for run in runs))
    valid, reasons = [], dict[str, None]()
    for run in runs:
        try:
            check(run)
            valid.append(run)
        except (ValueError, OSError) as error:
            words = [text for text in run.arguments if text not in shared and not text.startswith("seed=")]
            reasons[": ".join([" ".join(words)] * bool(words) + [message_of(error)])] = None
    counts = f"{len(runs) - len(valid)} of {len(runs)} runs"
    if reasons and valid and skip_invalid:
        print("\n  ".join([f"{counts} are left out:", *reasons]), flush=True)
    elif reasons:
        remedy = ", or leave them out with sweep.skip_invalid=true" if valid and skip_invalid is False else ""
        problem, *more = reasons if len(reasons) == 1 else ["correct the values", *reasons]
        error = UserError(f"{counts} of the grid are invalid; {problem}{remedy}")
        for each in more:
            error.add_note(f"  {each}")
        raise error
    return valid


def check_text(run: PlannedRun) -> None:
    """Prepares the text and sets the sizes of a run. Raises ValueError if the text is too short."""
    from tril.data.batches import TrainWindows, ValWindows
    from tril.data.prepare import prepare
    from tril.model.gpt import GPT, sizes

    data, length, hardware = run.config.data, run.config.model.context_length, run.config.hardware
    text = prepare(data)
    TrainWindows(text.tokens("train"), length, data.batch_size, run.seed)  # raises if the text is too short
    ValWindows(text.tokens("val"), length, data.batch_size)
    assert hardware is not None
    model = run.config.complete(hardware, text.meta["vocab_size"]).model
    run.sizes |= sizes(GPT.without_values(model), data.window_lengths(length))


def name_runs(runs: Sequence[PlannedRun]) -> list[str]:
    """Sets the values of each run; returns the swept keys, those in whose text the runs differ, without the seed."""
    words = [[argument.lstrip("+").partition("=") for argument in run.arguments] for run in runs]
    texts = [{key: text for key, _, text in each} for each in words]
    keys = dict.fromkeys(key for text in texts for key in text if key != "seed")
    swept = [key for key in keys if len({text.get(key) for text in texts}) > 1]
    for run, text in zip(runs, texts, strict=True):
        run.values = {key: value_of(run.settings, key, text.get(key, run.choices.get(key))) for key in swept}
    return swept


def value_of(settings: Mapping[str, Any], key: str, choice: str | None) -> object:
    """The value of a setting; of a config group or a whole group of settings `choice`, as it was given."""
    value = flatten(settings).get(key, choice)
    return choice if isinstance(value, Mapping) else value


def folder_name(values: Mapping[str, object]) -> str:
    """The values as a name that file systems accept, with a hash if it had to be changed."""
    text = ",".join(f"{key}={text_of(value)}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_FOLDER_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def grid_table(runs: Sequence[PlannedRun], states: Sequence[str]) -> str:
    """One line for each variant: seeds, sizes, and the states of its runs."""
    variants: dict[str, list[tuple[PlannedRun, str]]] = {}
    for run, state in zip(runs, states, strict=True):
        variants.setdefault(label_of(run.values), []).append((run, state))
    lines = [["", "seeds", "parameters", "MFLOP per token", "so far"]]
    for label, members in variants.items():
        sizes, ended = members[0][0].sizes, Counter(state for _, state in members if state != "not started")
        row = [label, ",".join(str(run.seed) for run, _ in members)]
        row += [f"{sizes['parameters']:,}", f"{sizes['flops_per_token'] / 1e6:,.1f}"]
        lines.append([*row, ", ".join(f"{n} {state}" for state, n in sorted(ended.items()))])
    return markdown_table(lines, text_columns=(0, 4))
