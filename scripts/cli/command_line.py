"""From the command line to settings: what was typed, the declared defaults and the yaml files of configs/.

A script declares its settings as fields of a class, and its main function gets them:

    @entry(Program("sample", SampleCommand))
    def main(line: CommandLine[SampleCommand]) -> None:
        print(line.own.temperature)
"""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.data.config import SOURCES
from tril.data.settings import Setting, build, declared, defaults, nearest
from tril.model.training.settings import TopLevelConfig
from tril.scripts.cli.config import (
    CONFIGS,
    GROUPS,
    OPEN,
    TrainCommand,
    data_defaults,
    known_settings,
    refuse_without_effect,
)
from tril.scripts.cli.errors import MEANT, UserError, command, fail, unknown_setting, user_errors

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
FOLDER = "hydra.run.dir"  # of a run
OPTIONS = {"-h": "help", "-m": "multirun", "-c": "cfg", "-sc": "shell_completion"}
OPTIONS |= {f"--{name}": name for name in ("help", "help=all", "multirun", "cfg")}
Own = TypeVar("Own")


@dataclass(frozen=True)
class Override:
    """One setting of the command line, `typed`. Sign: "" and "+" set the value of the dotted key, "~" removes it."""

    typed: str
    sign: str
    key: str
    value: str


@dataclass(frozen=True)
class Typed:
    """The settings of a command line, in their order."""

    overrides: tuple[Override, ...] = ()

    @classmethod
    def of(cls, arguments: Iterable[str]) -> "Typed":
        """Reads key=value arguments."""
        parts = [(argument, *re.findall(r"\A(~|\+{0,2})([^=]*)", argument)[0]) for argument in arguments]
        return cls(tuple(Override(text, sign[:1], key, text.partition("=")[2]) for text, sign, key in parts))

    def __iter__(self) -> Iterator[Override]:
        return iter(self.overrides)

    def __contains__(self, key: str) -> bool:
        return any(each.key == key for each in self)

    def get(self, key: str) -> str | None:
        """The value of a key as typed, the last one; None: it was not typed."""
        return next((each.value for each in reversed(self.overrides) if each.key == key), None)

    def covers(self, key: str) -> bool:
        """Whether a setting was typed, alone or with its group."""
        return any(f"{key}.".startswith(f"{each.key}.") for each in self)

    def without(self, *keys: str) -> "Typed":
        """The settings of other keys."""
        return Typed(tuple(each for each in self if each.key not in keys))


@dataclass(frozen=True)
class Program:
    """What can be typed for a program.

    Attributes:
        own: the class that declares the program's own settings.
        groups: its config groups, and the option of each; None: none is chosen.
        of_a_run: it has all settings and groups of train.py too.
    """

    name: str
    own: type
    groups: Mapping[str, str | None] = field(default_factory=dict)
    of_a_run: bool = False

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """What can be set, by dotted key."""
        known = known_settings().items()
        shared = {key: each for key, each in known if self.of_a_run or key.partition(".")[0] in self.groups}
        return {each.key: each for each in declared(self.own)} | shared

    @functools.cached_property
    def names(self) -> list[str]:
        """What can be typed: settings, groups of settings, and config groups."""
        names = [*self.settings, *self.groups]
        if self.of_a_run:
            names += [FOLDER]
            names += [f"{group}.{name}" for group in OPEN for name in GROUPS[group].__pydantic_fields__]
            names += sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
        parents = {key[: dot.start()] for key in self.settings for dot in re.finditer(r"\.", key)}
        return list(dict.fromkeys([*names, *sorted(parents)]))

    def check(self, typed: Typed) -> None:
        """Raises UserError for a key that does not exist, or that cannot be removed."""
        for each in typed:
            first, _, rest = each.key.partition(".")
            is_open = first in OPEN and rest and self.of_a_run  # callbacks.mine._target_ adds one
            adds = is_open and rest.partition(".")[0] not in GROUPS[first].__pydantic_fields__
            of_hydra = re.match(r"hydra[./]", each.key)
            of_ablation = "ablation" in typed and not rest  # its yaml file may add settings
            if not (each.key in self.names or of_hydra or adds or of_ablation):
                raise UserError(unknown_setting(each.key, self.names))
            if each.sign == "~" and not (of_hydra or is_open):
                remedy = f"leave out ~{each.key}, or set {each.key}=VALUE"
                raise UserError(f"{each.key} is required, only single callbacks and loggers can be removed; {remedy}")

    def overrides(self, typed: Typed, *, is_grid: bool = False) -> list[str]:
        """For Hydra's parser. A text is not parsed, apart from the values of a grid, which commas separate.

        data.path=FILE means data=files, unless something else chooses a text that has a path.
        """
        texts = {key for key, setting in self.settings.items() if setting.is_text} | {"debug", FOLDER}
        given = []
        for each in typed:
            # A setting is set whether or not a config file has it, since `check` knows all of them.
            sets = each.key in self.settings or "." in each.key and not each.key.startswith("hydra.")
            sign = "++" if sets and (each.sign or not is_grid) else each.sign
            quotes = each.key in texts and not is_grid
            text = f"{sign}{each.key}={quoted(each.value) if quotes else each.value}"
            given.append(each.typed if each.sign == "~" else text)
        if "data.path" in typed and "data" not in typed:
            experiment = [f"experiment={name}" for name in [typed.get("experiment")] if name]
            if not experiment or "path" not in hydra.compose(self.name, experiment).data:
                return ["data=files", *given]
        return given


@dataclass(frozen=True)
class CommandLine(Generic[Own]):
    """A command line, read and composed.

    Attributes:
        own: the settings that the program declares, checked.
        settings: all others, those of its config groups and of a run, as nested plain values.
        choices: the option of each config group; None: none.
        grid: the values of an ablation, by key.
    """

    typed: Typed
    own: Own
    settings: dict[str, Any]
    choices: dict[str, str | None]
    grid: dict[str, str]

    def check_single(self) -> None:
        """Raises UserError if a single run has what belongs to a grid, such as an ablation without -m."""
        if self.grid and not any(key in self.typed for key in self.grid):
            remedy = f"run it with {command('train')} -m, or choose a value, such as {next(iter(self.grid))}=..."
            raise UserError(f"the ablation is a grid over {', '.join(self.grid)}; {remedy}")
        for each in self.typed:
            if each.key.partition(".")[0] == "sweep":
                raise UserError(f"{each.typed} has no effect on a single run; leave it out, or add -m")


PROGRAMS = {"train": Program("train", TrainCommand, of_a_run=True)}


def compose(name: str, typed: Typed) -> CommandLine[Any]:
    """The settings of a program with what was typed.

    Raises:
        UserError: a wrong setting, in one line.
    """
    line = compose_values(name, typed)
    kind = PROGRAMS[name].own
    with user_errors():
        own = build(kind, {key: line.settings.pop(key) for key in kind.__pydantic_fields__})
        refuse_without_effect([("", own)], typed)  # pyright: ignore[reportArgumentType] one class, found under two names
    return replace(line, own=own)


def compose_values(name: str, typed: Typed) -> CommandLine[None]:
    """The same, without checking values; `settings` has all of them."""
    program = PROGRAMS[name]
    program.check(typed)
    with hydra_of(program):
        try:
            cfg = hydra.compose(name, program.overrides(typed), return_hydra_config=True)
        except ValueError as error:  # of a config group, such as model=null
            raise HydraException(str(error)) from error
        choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
        tree = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        settings: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    return CommandLine(typed, None, settings, choices, grid)


@contextlib.contextmanager
def hydra_of(program: Program) -> Iterator[Any]:
    """Hydra with the settings of a program, in place of that of another program which called this one.

    Raises:
        UserError: an error of Hydra in the block, in one line.
    """
    register_defaults(program)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=program.name, version_base=VERSION_BASE):
            yield GlobalHydra.instance().hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, program.name)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def register_defaults(program: Program) -> None:
    """Puts the declared defaults where the yaml files of configs/ name them.

    `settings` of a group has its defaults, `run_settings` those that belong to no config group, and `source_NAME` of
    the group `data` those of a text, which is `NAME` too if it has no yaml file. Other programs have none.
    """
    store = ConfigStore.instance()
    single = {name: defaults(group) for name, group in GROUPS.items() if not (CONFIGS / name).is_dir()}
    store.store("run_settings", defaults(TopLevelConfig) | single | defaults(TrainCommand))
    for name in GROUPS.keys() - single.keys():
        store.store("settings", defaults(GROUPS[name]), group=name)
    for name in SOURCES:
        store.store(f"source_{name}", data_defaults(name), group="data")
        if not (CONFIGS / "data" / f"{name}.yaml").is_file():  # data=NAME is the source with its defaults
            store.store(name, data_defaults(name), group="data")
    if program.name != "train":
        options = [{group: option} for group, option in program.groups.items()]
        store.store(program.name, {"defaults": ["_self_", *options], **defaults(program.own)})


def explain(error: Exception, program: str) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of a search path, there is none
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = error.options or [path.stem for path in (CONFIGS / group).glob("*.yaml")]
        options = [option for option in options if not option.startswith(("settings", "source_"))]
        return f"there is no {group}={name}{nearest(name, options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.lstrip("+").partition("=")
        remedy = f"put quotes within quotes, \"{key}='...'\"" if value else "settings are written key=value"
        return f"cannot read {error.override.lstrip('+')!r}; {remedy}"
    if several := re.match(r"Ambiguous value for argument '\+*(.*?)=(.*)'", str(error)):
        key, value = several.groups()
        remedy = "add -m for a grid of runs" if program == "train" else "give one"
        return f"{key}={value} has several values; {remedy}, or write a list as {key}=[{value}]"
    lines = [line.strip() for line in str(error).replace("++", "").splitlines() if line.strip()]
    return ": ".join(lines[:2])


def quoted(text: str) -> str:
    """The text for Hydra's grammar, which would strip the space of `prompt=def ` and reject `prompt=print(x`.

    A value that needs the grammar (null, a list, a quoted text) stays unchanged.
    """
    if re.fullmatch(r"""null|\[.*\]|(["'])(\\.|(?!\1).)*\1""", text, re.DOTALL):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"


def entry(program: Program, grid: Callable | None = None) -> Callable[[Callable[[CommandLine], object]], Callable]:
    """Decorator of `main(line)`, which becomes a function without arguments that reads sys.argv.

    A user's mistake ends the process with one line and status 2.

    Args:
        grid: the task of Hydra's multirun; None: the program has no -m.
    """
    PROGRAMS[program.name] = program

    def decorate(task: Callable[[CommandLine], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
                sys.stdout.reconfigure(errors="replace")
            try:
                try:
                    return run(program, task, grid, sys.argv[1:])
                finally:
                    sys.stdout.flush()  # here, and not at exit: the reader of a pipe may be gone, also after --help
            except UserError as error:
                fail(error)
            except BrokenPipeError:  # `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails
                sys.exit(141)  # 128 + SIGPIPE

        return main

    return decorate


def run(program: Program, task: Callable[[CommandLine], object], grid: Callable | None, arguments: list[str]) -> object:
    """Runs a command line: the task, a grid, or an option that prints something."""
    options = {OPTIONS[word] for word in arguments if word in OPTIONS}
    words = [word for word in arguments if word not in OPTIONS]
    if options & {"help", "help=all"}:
        from tril.scripts.cli.console import print_help

        return print_help(program.name, sys.modules[task.__module__].__doc__ or "", words, every="help=all" in options)
    if "shell_completion" in options:
        with hydra_of(program) as composer:
            return composer.shell_completion(program.name, words)
    if "cfg" in options:
        words = [word for word in words if word != "job"]
    for word in words:
        key, _, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            key = key.replace("-", "_")
            remedy = f"write {MEANT.get(key, key)}={value or 'VALUE'}"
            raise UserError(f"{word}: settings have no dashes; {remedy}")
        if "=" not in word and not word.startswith("~"):
            recipe = ", and a recipe is experiment=NAME" if word.endswith((".py", ".yaml")) else ""
            raise UserError(f"cannot read {word!r}; settings are written key=value{recipe}")
    typed, is_grid = Typed.of(words), "multirun" in options
    if "cfg" not in options and not is_grid:
        return task(compose(program.name, typed))
    if is_grid and grid is None:
        raise UserError(f"-m starts a grid of training runs, which {program.name} cannot; leave it out")
    program.check(typed)
    with hydra_of(program) as composer:
        overrides = program.overrides(typed, is_grid=is_grid)
        if is_grid:
            return composer.multirun(program.name, grid, overrides)
        return composer.show_cfg(program.name, overrides, "job", None)
