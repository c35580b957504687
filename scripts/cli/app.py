"""How a command starts: Hydra composes its settings, pydantic checks them, and a mistake is one line with status 2.

A script declares its settings as fields of a class, and its main function gets them:

@entry("sample", SampleConfig)
def main(line: CommandLine[SampleConfig]) -> None:
    print(line.own.temperature)
"""

import contextlib
import functools
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.data.config import SOURCES
from tril.data.settings import Setting, build, declared, defaults, nearest
from tril.model.training.settings import CallbacksConfig
from tril.scripts.cli.config import CONFIGS, FOLDER, GROUPS, TrainCommand, data_defaults, known_settings, refuse_unused
from tril.scripts.cli.errors import MEANT, UserError, fail, unknown_setting, user_errors
from tril.scripts.cli.help import print_help

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
# Objects before a collection: Python's 700 lengthen imports by a fifth, 100,000 let memory grow while a model trains.
COLLECTION_THRESHOLD = 10_000
HELP, GRID = ("-h", "--help", "--help=all"), ("-m", "--multirun")
QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
CALLBACKS = [f"callbacks.{name}" for name in defaults(CallbacksConfig)]
Own = TypeVar("Own")


@dataclass(frozen=True)
class CommandLine(Generic[Own]):
    """The settings of a command, composed.

    Attributes:
        own: the settings that the command declares, checked.
        settings: all others, those of its config groups and of a run, as nested plain values.
        given: dotted key -> text of the settings on the command line; of a key the last one.
        choices: the option of each config group; None: none.
        grid: the values of an ablation, by key.
    """

    own: Own
    settings: dict[str, Any]
    given: dict[str, str]
    choices: dict[str, str | None]
    grid: dict[str, str]


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

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings by dotted key."""
        shared = {
            key: setting
            for key, setting in known_settings().items()
            if self.of_a_run or key.partition(".")[0] in self.groups
            if not key.startswith(self.unused)
        }
        return {each.key: each for each in declared(self.own)} | shared


DECLARED = {"train": Declaration("train", TrainCommand, of_a_run=True)}


def entry(
    name: str,
    own: type = TrainCommand,
    groups: Mapping[str, str | None] | None = None,
    *,
    unused: tuple[str, ...] = (),
    grid: Callable | None = None,
) -> Callable[[Callable[[CommandLine], object]], Callable[[], object]]:
    """Decorator of `main(line)`, which becomes a function without arguments that reads sys.argv.

    A user's mistake ends the process with one line and status 2.

    Args:
        own, groups, unused: see `Declaration`.
        grid: the task of Hydra's multirun; None: the command has no -m.
    """
    declaration = DECLARED.setdefault(name, Declaration(name, own, groups or {}, unused=unused))

    def decorate(task: Callable[[CommandLine], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            gc.set_threshold(COLLECTION_THRESHOLD)
            if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
                sys.stdout.reconfigure(errors="replace")
            try:
                try:
                    return run(declaration, task, grid, sys.argv[1:])
                finally:
                    sys.stdout.flush()  # here, and not at exit: the reader of a pipe may be gone, also after --help
            except UserError as error:
                fail(error)
            except BrokenPipeError:  # `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails
                sys.exit(141)  # 128 + SIGPIPE

        return main

    return decorate


def run(
    declaration: Declaration, task: Callable[[CommandLine], object], grid: Callable | None, arguments: list[str]
) -> object:
    """Runs a command line: the task, a grid, or the help."""
    words = [word for word in arguments if word not in HELP + GRID]
    if asked := [word for word in arguments if word in HELP]:
        line = compose_unchecked(declaration.name, [word for word in words if key_of(word) != "resume"])
        text = sys.modules[task.__module__].__doc__ or ""
        own = declaration.own.__pydantic_fields__
        return print_help(text, declaration.settings, own, line.settings, line.choices, every=HELP[-1] in asked)
    if not any(word in GRID for word in arguments):
        return task(compose(declaration.name, words))
    if grid is None:
        raise UserError(f"-m starts a grid of training runs, which {declaration.name} cannot; leave it out")
    try:
        with hydra_of(declaration, words) as composer:
            return composer.multirun(declaration.name, grid, overrides(declaration, words, is_grid=True))
    except KeyboardInterrupt:  # in a run, or where a launcher waits for its workers
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)


def compose(name: str, arguments: Sequence[str]) -> CommandLine[Any]:
    """The settings of a command with those that are given.

    Raises:
        UserError: a wrong setting, in one line.
    """
    line, kind = compose_unchecked(name, arguments), DECLARED[name].own
    with user_errors():
        own = build(kind, {key: line.settings.pop(key) for key in kind.__pydantic_fields__})
        refuse_unused([("", own)], line.given)
    return replace(line, own=own)


def compose_unchecked(name: str, arguments: Sequence[str]) -> CommandLine[None]:
    """The same, without checking values; `settings` has all of them."""
    with hydra_of(DECLARED[name], arguments):
        try:
            cfg = hydra.compose(name, overrides(DECLARED[name], arguments), return_hydra_config=True)
        except ValueError as error:  # of a config group, such as model=null
            raise HydraException(str(error)) from error
        choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
        given = {key_of(argument): argument.partition("=")[2] for argument in arguments}
        return CommandLine(None, plain_settings(cfg), given, choices, grid)


@contextlib.contextmanager
def hydra_of(declaration: Declaration, arguments: Sequence[str]) -> Iterator[Any]:
    """Hydra with the settings of a command, in place of another command's, which called this one.

    Raises:
        UserError: an error of Hydra in the block, in one line; or an argument that is no setting of the command.
    """
    check(declaration, arguments)
    register_defaults(declaration)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=declaration.name, version_base=VERSION_BASE):
            yield GlobalHydra.instance().hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, declaration.name, arguments)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def check(declaration: Declaration, arguments: Sequence[str]) -> None:
    """Raises UserError for an argument that Hydra would misunderstand, or that removes or sets what has no effect."""
    for argument in arguments:
        key, (given, _, value) = key_of(argument), argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            meant = MEANT.get(given.replace("-", "_"), given.replace("-", "_"))
            raise UserError(f"{argument}: settings have no dashes; write {meant}={value or 'VALUE'}")
        if declaration.unused and key.startswith(declaration.unused):
            raise UserError(f"{argument} has no effect on {declaration.name}; leave it out")
        if argument.startswith("~") and not key.startswith(("callbacks.", "logger.", "hydra")):
            remedy = f"leave out ~{key}, or set {key}=VALUE"
            raise UserError(f"{key} is required, only single callbacks and loggers can be removed; {remedy}")


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


def overrides(declaration: Declaration, arguments: Sequence[str], *, is_grid: bool = False) -> list[str]:
    """The arguments for Hydra's parser. A text is not parsed, apart from the values of a grid, which commas separate.

    data.path=FILE means data=files, unless something else chooses a text that has a path.
    """
    texts = {key for key, setting in declaration.settings.items() if setting.is_text} | {"debug", FOLDER}
    words, given = [], [key_of(argument) for argument in arguments]
    for argument, key in zip(arguments, given, strict=True):
        signed, equals, value = argument.partition("=")
        if key in texts and equals and not is_grid:
            value = quoted(value)
        if key in (*declaration.settings, *CALLBACKS) and not is_grid and not argument.startswith("~"):
            signed = f"++{key}"  # sets it, whether or not the chosen yaml files have it
        words.append(f"{signed}{equals}{value}")
    if "data.path" in given and "data" not in given:
        experiment = [word for word in words if key_of(word) == "experiment"]
        if not experiment or "path" not in hydra.compose(declaration.name, experiment).data:
            return ["data=files", *words]
    return words


def key_of(argument: str) -> str:
    """The dotted key of key=value, without Hydra's signs."""
    return argument.partition("=")[0].lstrip("+~")


def quoted(text: str) -> str:
    """The text for Hydra's grammar, which would strip the space of `prompt=def ` and reject `prompt=print(x`.

    A value that needs the grammar (null, a list, a quoted text) is unchanged.
    """
    if text == "null" or re.fullmatch(rf"\[.*\]|{QUOTED}", text, re.DOTALL):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """A composed configuration as nested plain values, without Hydra's own."""
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]


def explain(error: Exception, name: str, arguments: Sequence[str]) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    declaration = DECLARED[name]
    if isinstance(error, OverrideParseException):
        key, equals, _ = error.override.removeprefix("++").partition("=")
        recipe = ", and a recipe is experiment=NAME" if key.endswith((".py", ".yaml")) else ""
        remedy = f"put quotes within quotes, \"{key}='...'\"" if equals else f"settings are written key=value{recipe}"
        return f"cannot read {error.override.removeprefix('++')!r}; {remedy}"
    groups = [path.name for path in CONFIGS.iterdir() if path.is_dir()] if declaration.of_a_run else declaration.groups
    parents = {key[: dot.start()] for key in declaration.settings for dot in re.finditer(r"\.", key)}
    names = [*declaration.settings, *groups, *sorted(parents)]
    if declaration.of_a_run:
        names += [FOLDER, *CALLBACKS]
    for key in map(key_of, arguments):
        if key not in names and not (declaration.of_a_run and key.startswith(("hydra", "logger."))):
            return unknown_setting(key, names)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of a search path, there is none
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = error.options or [path.stem for path in (CONFIGS / group).glob("*.yaml")]
        options = [option for option in options if not option.startswith(("settings", "source_"))]
        return f"there is no {group}={option}{nearest(option, options)}"
    if several := re.match(r"Ambiguous value for argument '\+*(.*?)=(.*)'", str(error)):
        key, value = several.groups()
        remedy = "add -m for a grid of runs" if declaration.of_a_run else "give one"
        return f"{key}={value} has several values; {remedy}, or write a list as {key}=[{value}]"
    if absent := re.match(r"Could not override '\+*(.*?)'", str(error)):
        group = absent[1].partition(".")[0]
        return f"{absent[1]} does not go with the other settings of {group}; leave it out, or choose another {group}"
    return ": ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
