"""How a command starts: Hydra composes its settings, pydantic checks them, and a mistake is one line with status 2.

A script declares its settings as fields of a class, and its main function gets them:

@command("sample", SampleConfig)
def main(settings: SampleConfig, composed: Composed) -> None:
    print(settings.temperature)
"""

import contextlib
import functools
import gc
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.data.config import SOURCES
from tril.data.settings import Setting, build, declared, defaults, nearest
from tril.model.training.settings import CallbacksConfig
from tril.scripts.cli import interrupt
from tril.scripts.cli.config import (
    CONFIGS,
    FOLDER,
    GROUPS,
    TrainCommand,
    data_defaults,
    flatten,
    known_settings,
    refuse_unused,
)
from tril.scripts.cli.errors import UserError, one_line, unknown_setting, unreadable, user_errors
from tril.scripts.cli.help import ADDED, print_help

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
HELP, GRID = ("-h", "--help", "--help=all"), ("-m", "--multirun")
# Objects before a collection: Python's 700 lengthen imports by a fifth, 100,000 let memory grow while a model trains.
COLLECTION_THRESHOLD = 10_000
REMOVABLE = ("callbacks.", "logger.")
OF_A_GRID = ("hydra.sweep.", "hydra.launcher.", "hydra.sweeper.", "hydra/launcher", "hydra/sweeper")


@dataclass(frozen=True)
class Composed:
    """The settings of a command.

    Attributes:
        settings: nested plain values: the command's own settings and its config groups.
        given: dotted key -> text of the settings on the command line.
        choices: the option of each config group; None: none.
        grid: the values of an ablation, by key.
    """

    settings: dict[str, Any]
    given: dict[str, str]
    choices: dict[str, str | None] = field(default_factory=dict)
    grid: dict[str, str] = field(default_factory=dict)

    def own(self, kind: type) -> Any:
        """The settings that a command declares; raises UserError for wrong values."""
        with user_errors():
            own = build(kind, {key: self.settings[key] for key in kind.__pydantic_fields__})
            refuse_unused([("", own)], self.given)
        return own


@dataclass(frozen=True)
class Declaration:
    """The settings that a command has.

    Attributes:
        own: the class that declares the command's own settings.
        groups: its config groups, and the option of each; None: none is chosen.
        of_a_run: it has all settings and groups of train.py too.
        unused: settings of its groups that have no effect: how their keys start.
    """

    name: str
    own: type
    groups: Mapping[str, str | None] = field(default_factory=dict)
    of_a_run: bool = False
    unused: tuple[str, ...] = ()

    def settings(self, source: str | None = None) -> dict[str, Setting]:
        """The settings by dotted key; of the texts those of `source`, or of all."""
        shared = {
            key: setting
            for key, setting in known_settings(source).items()
            if self.of_a_run or key.partition(".")[0] in self.groups
            if not key.startswith(self.unused)
        }
        return {each.key: each for each in declared(self.own)} | shared

    def group_names(self) -> list[str]:
        return [path.name for path in CONFIGS.iterdir() if path.is_dir()] if self.of_a_run else [*self.groups]


DECLARED = {"train": Declaration("train", TrainCommand, of_a_run=True)}


def command(
    name: str,
    own: type = TrainCommand,
    groups: Mapping[str, str | None] | None = None,
    *,
    unused: tuple[str, ...] = (),
    grid: Callable | None = None,
) -> Callable[[Callable[[Any, Composed], object]], Callable[[], object]]:
    """Decorator of `main(settings, composed)`, which becomes a function without arguments that reads sys.argv.

    A user's mistake ends the process with one line and status 2.

    Args:
        own, groups, unused: see `Declaration`.
        grid: runs a grid, given its arguments; None: the command has no -m.
    """
    declaration = DECLARED.setdefault(name, Declaration(name, own, groups or {}, unused=unused))

    def decorate(task: Callable[[Any, Composed], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            gc.set_threshold(COLLECTION_THRESHOLD)
            with one_line():
                words = [word for word in sys.argv[1:] if word not in HELP + GRID]
                if asked := [word for word in sys.argv[1:] if word in HELP]:
                    composed = compose(name, words, is_complete=False)
                    settings = declaration.settings(composed.settings.get("data", {}).get("source"))
                    text, keys = sys.modules[task.__module__].__doc__ or "", own.__pydantic_fields__
                    values, options = composed.settings, composed.choices
                    return print_help(text, settings, keys, values, options, every=HELP[-1] in asked)
                if set(sys.argv[1:]) & set(GRID):
                    return start_grid(declaration, grid, words)
                composed = compose(name, words)
                if not declaration.of_a_run:  # a run first imports torch
                    interrupt.end()
                return task(composed.own(own), composed)

        return main

    return decorate


def start_grid(declaration: Declaration, run_grid: Callable | None, arguments: Sequence[str]) -> object:
    """Calls `run_grid` with the arguments in Hydra's grammar, and with Hydra at hand."""
    if run_grid is None:
        raise UserError(f"-m starts a grid of training runs, which {declaration.name} cannot; leave it out")
    parsed = parse(declaration, arguments, is_grid=True)
    interrupt.end()
    try:
        with hydra_of(declaration, parsed):
            return run_grid(with_files(declaration, parsed))
    except KeyboardInterrupt:  # in a run, or where a launcher waits for its workers
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)


def compose(name: str, arguments: Sequence[str], *, is_complete: bool = True) -> Composed:
    """The settings of a command, as Hydra composes them of configs/, the declared defaults and the command line.

    Args:
        is_complete: a required setting without a value is an error.

    Raises:
        UserError: a wrong setting, in one line.
    """
    declaration = DECLARED[name]
    parsed = parse(declaration, arguments)
    with hydra_of(declaration, parsed):
        cfg = hydra.compose(name, with_files(declaration, parsed), return_hydra_config=True)
        choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
        given = {key_of(each): text.partition("=")[2] for each, text in zip(parsed, arguments, strict=True)}
        composed = Composed(plain_settings(cfg, is_complete=is_complete), given, choices, grid)
    for key, setting in declaration.settings().items():
        if setting.escapes and key in given:
            *groups, last = key.split(".")
            group = functools.reduce(dict.__getitem__, groups, composed.settings)
            value = group[last]
            group[last] = [*map(unescaped, value)] if isinstance(value, list) else value and unescaped(value)
    return composed


@contextlib.contextmanager
def hydra_of(declaration: Declaration, parsed: Sequence[Override]) -> Iterator[None]:
    """Hydra with the settings of a command, in place of another command's, which called this one.

    Raises:
        UserError: an error of Hydra in the block, in one line.
    """
    register_defaults(declaration)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=declaration.name, version_base=VERSION_BASE):
            try:
                yield
            except (HydraException, OmegaConfBaseException) as error:
                raise UserError(explain(error, declaration.name, parsed)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def register_defaults(declaration: Declaration) -> None:
    """Puts the declared defaults where the yaml files of configs/ name them.

    `settings` of a group has its defaults, and `source_NAME` of the group `data` has those of a text, which is `NAME`
    too if it has no yaml file. Other commands have none.
    """
    store = ConfigStore.instance()
    for name in ("model", "optim", "trainer"):
        store.store("settings", defaults(GROUPS[name]), group=name)
    for name in SOURCES:
        store.store(f"source_{name}", data_defaults(name), group="data")
        if not (CONFIGS / "data" / f"{name}.yaml").is_file():  # data=NAME is the source with its defaults
            store.store(name, data_defaults(name), group="data")
    if not declaration.of_a_run:
        options = [{group: option} for group, option in declaration.groups.items()]
        store.store(declaration.name, {"defaults": ["_self_", *options], **defaults(declaration.own)})


def parse(declaration: Declaration, arguments: Sequence[str], *, is_grid: bool = False) -> list[Override]:
    """The arguments as Hydra's parser reads them. Outside of a grid, a text needs no quotes.

    Raises:
        UserError: an argument that is no setting, or that has no effect, or that removes what is required.
    """
    kinds, parsed = {key: each.kinds for key, each in declaration.settings().items()} | {FOLDER: {str}}, []
    kinds |= dict.fromkeys(declaration.group_names(), {str, list, type(None)})  # debug=true is no truth value
    for argument in arguments:
        try:
            if argument.startswith("-"):
                raise HydraException
            word = argument if is_grid else quoted_argument(argument, kinds)
            [override] = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            raise UserError(unreadable(argument, kinds)) from error
        if problem := problem_of(override, argument.partition("=")[2], declaration, is_grid=is_grid):
            raise UserError(f"{argument} {problem}")
        parsed.append(override)
    return parsed


def problem_of(override: Override, value: str, declaration: Declaration, *, is_grid: bool) -> str | None:
    """Why a command does not take a setting with this text, whatever the others are."""
    key = key_of(override)
    if override.is_delete() and not key.startswith(REMOVABLE):
        return f"removes a setting, and only single callbacks and loggers can be removed; set {key}=VALUE"
    if override.is_sweep_override() and not is_grid:
        remedy = "add -m for a grid of runs" if declaration.of_a_run else "give one"
        return f"has several values; {remedy}, or write a list as {key}=[{value}]"
    used = OF_A_GRID if is_grid else (FOLDER,)
    if key.startswith(("hydra.", "hydra/")) and not (declaration.of_a_run and key.startswith(used)):
        return f"has no effect on {'a grid' if is_grid else 'a single run'}; leave it out"
    if declaration.unused and key.startswith(declaration.unused):
        return f"has no effect on {declaration.name}; leave it out"
    if key == ADDED and declaration.of_a_run and not override.is_add():
        return f"is added to the other settings, as a grid; write -m +{key}={value}"
    if key in declaration.group_names() and value == "null":
        return f"is no option of the group{nearest('', options_of(key))}"
    return None


def with_files(declaration: Declaration, parsed: Sequence[Override]) -> list[str]:
    """What Hydra composes: data.path=FILE means data=files, unless something else chooses a text that has a path."""
    words, keys = [str(each.input_line) for each in parsed], [key_of(each) for each in parsed]
    if "data.path" in keys and "data" not in keys:
        experiment = [word for word, key in zip(words, keys, strict=True) if key == "experiment"]
        if not experiment or "path" not in hydra.compose(declaration.name, experiment).data:
            return ["data=files", *words]
    return words


def key_of(override: Override) -> str:
    """The dotted key of an override."""
    return override.get_key_element().lstrip("+~")


def options_of(group: str) -> list[str]:
    """The options of a config group."""
    return [path.stem for path in (CONFIGS / group).glob("*.yaml")]


def quoted_argument(argument: str, kinds_of: Mapping[str, Collection[type]]) -> str:
    """key=value for Hydra's grammar, with a text in quotes, so that the user needs only those of the shell.

    The grammar reads `null` where a text can be none, and `[...]` where it can be a list.
    """
    key, equals, text = argument.partition("=")
    kinds = kinds_of.get(key.lstrip("+"), ())
    is_list = (list in kinds or tuple in kinds) and text.startswith("[") and text.endswith("]")
    if not equals or str not in kinds or is_list or (text == "null" and type(None) in kinds):
        return argument
    return f"{key}={quoted(text)}"


def quoted(text: str) -> str:
    """The text as a quoted string of Hydra's grammar."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"


def unescaped(text: str) -> str:
    r"""The text with `\n` as a line end, `\t` as a tab and `\\` as a backslash. Other backslashes are kept."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], text)


def plain_settings(cfg: DictConfig, *, is_complete: bool = True) -> dict[str, Any]:
    """A composed configuration as nested plain values, without Hydra's own."""
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(settings, resolve=True, throw_on_missing=is_complete)  # pyright: ignore[reportReturnType]


def explain(error: Exception, name: str, parsed: Sequence[Override]) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    declaration, groups = DECLARED[name], DECLARED[name].group_names()
    settings = declaration.settings()
    parents = {key[: dot.start()] for key in settings for dot in re.finditer(r"\.", key)}
    names = [*settings, *groups, *sorted(parents)]
    names += [FOLDER, *(f"callbacks.{name}" for name in defaults(CallbacksConfig))] * declaration.of_a_run
    for key in map(key_of, parsed):
        if key not in names and not (declaration.of_a_run and key.startswith(("hydra", "logger."))):
            return unknown_setting(key, names)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of a search path, there is none
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"there is no {group}={option}{nearest(option, options_of(group) or error.options or [])}"
    with contextlib.suppress(HydraException, OmegaConfBaseException):
        chosen = [word for word in with_files(declaration, parsed) if word.lstrip("+~").partition("=")[0] in groups]
        composed = flatten(plain_settings(hydra.compose(name, chosen), is_complete=False))
        for each in parsed:
            key, (group, _, rest) = key_of(each), key_of(each).partition(".")
            if rest and not each.is_add() and not any(f"{known}.".startswith(f"{key}.") for known in composed):
                option = rest.partition(".")[0]
                remedy = f"add {group}={option}" if option in options_of(group) else f"choose another {group}"
                return f"{key} does not go with the other settings of {group}; leave it out, or {remedy}"
    return ": ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
