"""The runs of a grid: the combinations of a command, whether each is valid, and how large the models are."""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
Arguments = tuple[str, ...]  # of train.py, key=value each


def expand(words: Sequence[str]) -> list[Arguments]:
    """The combinations of the values in a command, as arguments of train.py; the last key is the fastest.

    Args:
        words: in Hydra's grammar, such as "model.n_heads=1,2" or "seed=range(0,3)".

    Raises:
        UserError: a value is repeated, or a key has none.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for each in parser.parse_overrides(list(words)):
        texts = [str(each.input_line)]
        if each.is_sweep_override():
            texts = [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        choices.append([argument_of(value) for value in parser.parse_overrides(texts)])
        if not texts:
            raise UserError(f"{each.input_line} has no values; give at least one, as in {each.get_key_element()}=0,1")
        if repeated := [text for text, n in Counter(choices[-1]).items() if n > 1]:
            raise UserError(f"{each.input_line} has {repeated[0]} twice, which gives the same run; leave one out")
    return list(itertools.product(*choices))


def argument_of(override: Override) -> str:
    """An argument of train.py, which takes a text without the quotes of Hydra's grammar."""
    value = override.value()
    return f"{override.get_key_element()}={value}" if isinstance(value, str) else str(override.input_line)


def plan(combinations: Sequence[Arguments]) -> tuple[list[dict[str, Any]], list[str]]:
    """Composes and checks the runs with these arguments, and prepares their text. Nothing is trained.

    Returns:
        The runs as launches.jsonl has them: folder, values of the swept keys, seed, arguments, parameters and FLOPs per
        token. And the swept keys, those in whose text the runs differ, without the seed.

    Raises:
        UserError: see `check_each`.
    """
    composed = functools.cache(compose_run)  # without the seed, since Hydra takes tenths of a second
    first: dict[str, Arguments] = {}  # by all that decides the results

    def check_settings(arguments: Arguments) -> tuple[Composed, RunConfig]:
        variant = composed(tuple(text for text in arguments if not text.startswith("seed=")))
        seeds = [("seed", yaml.safe_load(x.removeprefix("seed="))) for x in arguments if x.startswith("seed=")]
        config = RunConfig.of(variant.settings | dict(seeds))
        config = replace(config, hardware=choose_hardware(config))
        results = json.dumps([config.canonical(), variant.settings["init_from"]], sort_keys=True)
        if (same := first.setdefault(results, arguments)) is not arguments:
            differing = " ".join(text for text in same if text not in arguments)
            raise ValueError(f"the same run as {differing or 'without it'}; the difference has no effect")
        return variant, config

    def describe(arguments: Arguments) -> dict[str, Any]:
        variant, config = runs[arguments]
        values = {key: value_of(variant, key, texts[arguments].get(key)) for key in swept}
        named = {"folder": folder_name(values | {"seed": config.top.seed}), "values": values, "seed": config.top.seed}
        return named | {"arguments": list(arguments)} | sizes_of(config)

    runs = check_each(combinations, check_settings)
    split = {arguments: [text.lstrip("+").partition("=") for text in arguments] for arguments in runs}
    texts = {arguments: {key: text for key, _, text in each} for arguments, each in split.items()}
    keys = dict.fromkeys(key for text in texts.values() for key in text if key != "seed")
    swept = [key for key in keys if len({text.get(key) for text in texts.values()}) > 1]
    return list(check_each(combinations, describe).values()), swept


def compose_run(arguments: Sequence[str]) -> Composed:
    """The settings of a run, with the model and the tokenizer of `init_from`."""
    composed = compose("train", arguments)
    source = composed.settings["init_from"]
    return composed if source is None else replace(composed, settings=take_over(source, composed)[0])


def check_each(runs: Sequence[Arguments], check: Callable[[Arguments], Any]) -> dict[Arguments, Any]:
    """The results of `check`, which raises ValueError or OSError, by the arguments of the runs.

    Raises:
        UserError: the errors of all runs, each once for all seeds.
    """
    shared = set.intersection(*map(set, runs))
    results, reasons = {}, dict[str, None]()
    for arguments in runs:
        try:
            results[arguments] = check(arguments)
        except (ValueError, OSError) as error:
            words = [text for text in arguments if text not in shared and not text.startswith("seed=")]
            reasons[": ".join([" ".join(words)] * bool(words) + [message_of(error)])] = None
    if reasons:
        problem, *more = reasons
        error = UserError(f"{len(runs) - len(results)} of {len(runs)} runs of the grid are invalid; {problem}")
        for each in more:
            error.add_note(f"  {each}")
        raise error
    return results


def sizes_of(config: RunConfig) -> dict[str, int]:
    """Parameters and FLOPs per token of a run, whose text is prepared. Raises ValueError if the text is too short."""
    from tril.data.batches import TrainWindows, ValWindows
    from tril.data.prepare import prepare
    from tril.model.gpt import GPT, sizes

    data, length, hardware = config.data, config.model.context_length, config.hardware
    text = prepare(data)
    TrainWindows(text.tokens("train"), length, data.batch_size, config.top.seed)  # raises if the text is too short
    ValWindows(text.tokens("val"), length, data.batch_size)
    assert hardware is not None
    model = config.complete(hardware, text.meta["vocab_size"]).model
    return sizes(GPT.without_values(model), data.window_lengths(length))


def value_of(composed: Composed, key: str, text: str | None = None) -> object:
    """The value of a setting; of a config group or a whole group of settings `text`, as it was given, or the option."""
    choice = composed.choices.get(key) if text is None else text
    value = flatten(composed.settings).get(key, choice)
    return choice if isinstance(value, Mapping) else value


def folder_name(values: Mapping[str, object]) -> str:
    """The values as a name that file systems accept, with a hash if it had to be changed."""
    text = ",".join(f"{key}={text_of(value)}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:MAX_FOLDER_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def grid_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line for each variant: its seeds and sizes."""
    variants: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        variants.setdefault(label_of(run["values"]), []).append(run)
    lines = [["", "seeds", "parameters", "MFLOP per token"]]
    for label, members in variants.items():
        sizes = [f"{members[0]['parameters']:,}", f"{members[0]['flops_per_token'] / 1e6:,.1f}"]
        lines.append([label, ",".join(str(run["seed"]) for run in members), *sizes])
    return markdown_table(lines)
