"""Composes config groups with Hydra: the declared defaults, the yaml files of configs/ and what was typed.

Only this file uses Hydra, apart from grids of runs.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tril.data.config import SOURCES
from tril.data.settings import defaults, nearest
from tril.model.training.settings import TopLevelConfig
from tril.scripts.cli.command_line import FOLDER, CommandLine, Program, Typed
from tril.scripts.cli.compose import QUOTED
from tril.scripts.cli.config import CONFIGS, GROUPS, TrainCommand, data_defaults
from tril.scripts.cli.errors import UserError

VERSION_BASE = "1.3"  # of Hydra's behavior: since 1.2, it does not change the working directory


def compose_groups(program: Program, typed: Typed) -> CommandLine[None]:
    """The settings of a program that has config groups, with what was typed; unchecked.

    Raises:
        UserError: what Hydra refuses, in one line.
    """
    with hydra_of(program):
        try:
            cfg = hydra.compose(program.name, overrides(program, typed), return_hydra_config=True)
        except ValueError as error:  # of a config group, such as model=null
            raise HydraException(str(error)) from error
        choices, grid = dict(cfg.hydra.runtime.choices), dict(cfg.hydra.sweeper.get("params") or {})
        settings = plain_settings(cfg)
    return CommandLine(typed, None, settings, choices, grid)


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """A composed configuration as nested plain values, without Hydra's own."""
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]


def run_grid(program: Program, typed: Typed, task: Callable) -> object:
    """Runs `task` for each combination of the values that are typed for the settings, with Hydra's multirun."""
    program.check(typed)
    try:
        with hydra_of(program) as composer:
            return composer.multirun(program.name, task, overrides(program, typed, is_grid=True))
    except KeyboardInterrupt:  # in a run, or where a launcher waits for its workers
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)


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


def overrides(program: Program, typed: Typed, *, is_grid: bool = False) -> list[str]:
    """For Hydra's parser. A text is not parsed, apart from the values of a grid, which commas separate.

    data.path=FILE means data=files, unless something else chooses a text that has a path.
    """
    texts = {key for key, setting in program.settings.items() if setting.is_text} | {"debug", FOLDER}
    given = []
    for each in typed:
        # A setting is set whether or not a config file has it, since `check` knows all of them.
        sets = each.key in program.settings or "." in each.key and not each.key.startswith("hydra.")
        sign = "++" if sets and (each.sign or not is_grid) else each.sign
        quotes = each.key in texts and not is_grid
        text = f"{sign}{each.key}={quoted(each.value) if quotes else each.value}"
        given.append(each.typed if each.sign == "~" else text)
    if "data.path" in typed and "data" not in typed:
        experiment = [f"experiment={name}" for name in [typed.get("experiment")] if name]
        if not experiment or "path" not in hydra.compose(program.name, experiment).data:
            return ["data=files", *given]
    return given


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
    if text == "null" or re.fullmatch(rf"\[.*\]|{QUOTED}", text, re.DOTALL):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"
