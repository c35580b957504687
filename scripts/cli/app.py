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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from tril.data.settings import build, declared, defaults, extra_of, nearest, parts_of
from tril.data.sources import SOURCES
from tril.scripts.cli import console
from tril.scripts.cli.config import CONFIGS, FOLDER, GROUPS, TrainCommand, known_settings, options_of, refuse_unused
from tril.scripts.cli.errors import UserError, exit_with_one_line, unknown_setting, unreadable, user_errors

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory
HELP, GRID = {"-h", "--help", "--help=all"}, {"-m", "--multirun"}
# Objects before a collection: Python's 700 lengthen imports by a fifth, 100,000 let memory grow while a model trains.
COLLECTION_THRESHOLD = 10_000
REMOVABLE = ("callbacks.", "logger.")
CHOICE = FieldInfo.from_annotation(str | list | None)  # pyright: ignore[reportArgumentType]  of a config group
OF_A_GRID = ("hydra.sweep.", "hydra.launcher.", "hydra.sweeper.", "hydra/launcher", "hydra/sweeper")
STORE = ConfigStore.instance()


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
class Command:
    """The settings of a command: those of the class `own`, and those of its config groups."""

    own: type
    groups: tuple[str, ...]

    def settings(self, source: str | None = None) -> dict[str, FieldInfo]:
        """The settings by dotted key; for `data`, those of the text `source`, or of all texts."""
        everything, is_train = known_settings(source), self.own is TrainCommand
        shared = {key: each for key, each in everything.items() if is_train or key.partition(".")[0] in self.groups}
        return declared(self.own) | shared


COMMANDS = {"train": Command(TrainCommand, tuple(path.name for path in CONFIGS.iterdir() if path.is_dir()))}
# The declared defaults, where the yaml files of configs/ name them: `settings` of a group, `source_NAME` of a text,
# which is `NAME` too if it has no yaml file.
for group in ("model", "optim", "trainer"):
    STORE.store("settings", defaults(GROUPS[group]), group=group)
for source in SOURCES:
    of_text = {"source": source} | defaults(SOURCES[source])
    for option in (f"source_{source}", *({source} - {*options_of("data")})):
        STORE.store(option, of_text, group="data")


def command(
    name: str, own: type, groups: Mapping[str, str | None] | None = None, *, grid: Callable | None = None
) -> Callable[[Callable[[Any, Composed], object]], Callable[[], object]]:
    """Decorator of `main(settings, composed)`, which becomes a function without arguments that reads sys.argv.

    A user's mistake ends the process with one line and status 2.

    Args:
        own: the class that declares the command's own settings.
        groups: its config groups, and the option of each; None: none is chosen. `train` has all.
        grid: runs a grid, given its arguments in Hydra's grammar; None: the command has no -m.
    """
    if name not in COMMANDS:
        groups = groups or {}
        COMMANDS[name] = Command(own, tuple(groups))
        STORE.store(name, {"defaults": ["_self_", *({key: groups[key]} for key in groups)], **defaults(own)})

    def decorate(task: Callable[[Any, Composed], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            gc.set_threshold(COLLECTION_THRESHOLD)
            flags = {*sys.argv[1:]} & (HELP | GRID)
            words = [word for word in sys.argv[1:] if word not in flags]
            with exit_with_one_line():
                if HELP & flags:
                    from tril.scripts.cli.help import help_text

                    composed = compose(name, words, is_complete=False)
                    settings = COMMANDS[name].settings(composed.settings.get("data", {}).get("source"))
                    text, keys, every = task.__globals__["__doc__"], own.__pydantic_fields__, "--help=all" in flags
                    return print(help_text(text, settings, keys, composed.settings, composed.choices, every=every))
                if GRID & flags:
                    console.raise_at_interrupt()
                    return start_grid(name, grid, words)
                composed = compose(name, words)
                chosen = composed.own(own)
                console.raise_at_interrupt()  # not before: OmegaConf makes another exception of it
                return task(chosen, composed)

        return main

    return decorate


def start_grid(name: str, run_grid: Callable | None, arguments: Sequence[str]) -> object:
    """Calls `run_grid` with the arguments in Hydra's grammar, and with Hydra at hand."""
    if run_grid is None:
        raise UserError(f"-m starts a grid of training runs, which {name} cannot; leave it out")
    words, _ = parse(name, arguments, is_grid=True)
    try:
        with hydra_of(name):
            return run_grid(words)
    except KeyboardInterrupt:  # in a run, or where a launcher waits for its workers
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(130)


def compose(name: str, arguments: Sequence[str], *, is_complete: bool = True) -> Composed:
    """The settings of a command, as Hydra composes them of configs/, the declared defaults and the command line.

    Args:
        is_complete: a required setting without a value is an error.

    Raises:
        UserError: a wrong setting, in one line.
    """
    words, given = parse(name, arguments)
    with hydra_of(name):
        cfg = hydra.compose(name, words, return_hydra_config=True)
        choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
        own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        settings: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=is_complete)
    return Composed(settings, given, choices, grid)


@contextlib.contextmanager
def hydra_of(name: str) -> Iterator[None]:
    """Hydra with the settings of a command, in place of the Hydra of a program that called it.

    Raises:
        UserError: an error of Hydra in the block, in one line.
    """
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name=name, version_base=VERSION_BASE):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, COMMANDS[name])) from error
    finally:
        GlobalHydra.instance().hydra = outer


def parse(name: str, arguments: Sequence[str], *, is_grid: bool = False) -> tuple[list[str], dict[str, str]]:
    """The arguments in Hydra's grammar, and the text of each key. Outside of a grid, a text needs no quotes.

    `data.path=FILE` alone means `data=files`.

    Raises:
        UserError: an argument that is no setting, that has no effect, or that removes a setting.
    """
    settings = COMMANDS[name].settings()
    fields = settings | dict.fromkeys(COMMANDS[name].groups, CHOICE) | {FOLDER: FieldInfo.from_annotation(str)}
    words, given = [], {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            if argument.startswith("-") or not key.strip("+~"):
                raise HydraException
            words.append(argument if is_grid else quoted_argument(argument, fields.get(key.lstrip("+"))))
            [override] = OverridesParser.create().parse_overrides([words[-1]])
        except (HydraException, ValueError) as error:  # ValueError: of a number with too many digits
            raise UserError(unreadable(argument, settings)) from error
        if problem := problem_of(override, text, name, is_grid=is_grid):
            raise UserError(f"{argument} {problem}")
        key = override.get_key_element().lstrip("+~")
        if key in given and key in COMMANDS[name].groups:
            raise UserError(f"{argument} replaces all of {key}={given[key]}; leave one out")
        given[key] = text
    if "data.path" in given and not {"data", "experiment"} & given.keys():
        words.insert(0, "data=files")
    return words, given


def problem_of(override: Override, text: str, name: str, *, is_grid: bool) -> str | None:
    """Why a command does not take a setting with this text, whatever the others are, where Hydra does not say it."""
    key, groups = override.get_key_element().lstrip("+~"), COMMANDS[name].groups
    if override.is_delete() and not key.startswith(REMOVABLE):
        return f"removes a setting, and only callbacks and loggers can be removed; write {key}=VALUE"
    if override.is_add() or override.is_force_add():
        known = {each.partition(".")[0] for each in (*COMMANDS[name].settings(), *groups)}
        if key.partition(".")[0] not in known:
            return "adds a setting that does not exist; --help=all lists all"
    if override.is_sweep_override() and not is_grid:
        return f"has several values; add -m for a grid of runs, or write a list as {key}=[{text}]"
    used = OF_A_GRID if is_grid else (FOLDER,) * (name == "train")
    if f"{key}.".startswith(("hydra.", "hydra/")) and not key.startswith(used):
        return f"has no effect on {'a grid' if is_grid else 'a single run'}; leave it out"
    if key == "ablation" and key in groups and not override.is_add():
        return f"is added to the other settings, as a grid; write -m +{key}={text}"
    if key in groups and (text == "null" or text.startswith("[") and f"{key}." not in REMOVABLE):
        return f"is no option of the group{nearest('', options_of(key))}"
    return None


def quoted_argument(argument: str, setting: FieldInfo | None) -> str:
    """key=value for Hydra's grammar, with a text in quotes, so that the user needs only those of the shell.

    The grammar reads `null` where a text can be none, and `[...]` where it can be a list.
    """
    key, equals, text = argument.partition("=")
    kinds = [*parts_of(setting.annotation)] if setting else []
    if setting and extra_of(setting).get("escapes"):
        text = unescaped(text)
    is_list = (list in kinds or tuple in kinds) and text.startswith("[") and text.endswith("]")
    if not equals or str not in kinds or is_list or (text == "null" and type(None) in kinds):
        return f"{key}{equals}{text}"
    return f"{key}={quoted(text)}"


def quoted(text: str) -> str:
    """The text as a quoted string of Hydra's grammar."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"


def unescaped(text: str) -> str:
    r"""The text with `\n` as a line end, `\t` as a tab and `\\` as a backslash. Other backslashes are kept."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], text)


def explain(error: Exception, command: Command) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of a search path, there is none
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"there is no {group}={option}{nearest(option, options_of(group) or error.options or [])}"
    absent = re.match(r"Could not (?:override|delete from config\.) '(.+?)'", str(error))
    if absent is None:
        return ": ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
    key, (group, option, *_) = absent[1], [*absent[1].split("."), ""]
    if option in options_of(group):  # logger.wandb.project
        return f"{key} has no effect without {group}={option}; add that, or leave it out"
    if key in command.settings():  # of another text
        return f"{key} does not go with this {group}; choose another {group}, or leave it out"
    if key in COMMANDS["train"].settings():
        return f"{key} is a setting of tril train, and not of this command; --help lists its settings"
    return unknown_setting(key, command.settings(), command.groups)
