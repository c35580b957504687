"""What train.py and the scripts share: Hydra's entry point, and a user's mistake as one line with exit status 2."""

import contextlib
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class UserError(ValueError):
    """Something that the user typed; its message is one line: value, limit, remedy."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Around the code that reads what the user typed: its ValueErrors and OSErrors are the user's. Elsewhere they are bugs."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(message_of(error)) from error


def message_of(error: Exception) -> str:
    """The error in one line."""
    from pydantic import ValidationError

    from tril.model.validation import explain as explain_settings

    return explain_settings(error) if isinstance(error, ValidationError) else " ".join(str(error).split())


def entry(
    config_name: str, texts: Collection[str] = ()
) -> Callable[[Callable[[DictConfig], object]], Callable[[], object]]:
    """Decorates main(cfg): composes configs/<config_name>.yaml with the command line, reports user errors as one line, status 2.

    texts  keys whose value is text as it was typed, such as a path, see `quoted`; not with -m, where a comma makes a grid
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def reported(cfg: DictConfig) -> object:
            nonlocal began
            began = True
            try:
                return task(cfg)
            except UserError as error:  # here and not around Hydra, which would print a line of its own
                fail(error)

        def main() -> object:
            os.environ.setdefault(
                "HYDRA_FULL_ERROR", "1"
            )  # Hydra then hands its exceptions on instead of printing them
            sys.stdout.reconfigure(errors="replace")  # a terminal or a log that lacks a character should end nothing
            if not {"-m", "--multirun"} & set(sys.argv):
                sys.argv[1:] = [quoted(argument, texts) for argument in sys.argv[1:]]
            try:
                result = hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(reported)()
                sys.stdout.flush()
                return result
            except (HydraException, OmegaConfBaseException) as error:
                fail(explain(error, config_name))
            except BrokenPipeError:  # `--help | head`
                drop_output()
                sys.exit(141)  # what a shell says of a program that SIGPIPE ended
            except (OSError, ValueError) as error:
                if began:
                    raise
                fail(explain(error, config_name))

        began = False
        return main

    return decorate


def fail(message: object) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_writable(folder: Path, key: str) -> None:
    """Raises OSError where nothing could be written to the folder that `key` chooses, which need not be there yet."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise OSError(f"cannot write to {folder}; choose another folder with {key}=FOLDER")


def writable(folder: str | Path, key: str) -> Path:
    """Makes the folder that `key` chooses, so that it can be refused before anything is computed for it. Raises OSError."""
    folder = Path(folder)
    check_writable(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def drop_output() -> None:
    """Once nobody reads stdout any more: else Python's own flush at exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(cfg: DictConfig) -> dict:
    """The mapping as resolved plain containers."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def build(cls: type, cfg: DictConfig | dict, where: str):
    """cls(**cfg) with unknown keys refused by name: `+model.foo=1` gets past Hydra, not past this."""
    values = plain(cfg) if isinstance(cfg, DictConfig) else cfg
    legal = cls.__dataclass_fields__
    for key in values:
        if key not in legal:
            raise ValueError(f"there is no setting {where}.{key}{nearest(key, legal, f'{where}.')}")
    return cls(**values)


def quoted(argument: str, texts: Collection[str]) -> str:
    """A command line argument for Hydra, whose grammar would strip the space of `prompt=def ` and stumble over `prompt=print(x`. `texts`:
    keys whose value is text as it was typed.

    What Hydra's grammar is needed for stays as it is: null, a list, a text in quotes.
    """
    key, equals, text = argument.partition("=")
    hydras = re.fullmatch(r"""null|\[.*\]|(["'])(\\.|(?!\1).)*\1""", text, re.DOTALL)
    if key not in texts or not equals or hydras:
        return argument
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # for OmegaConf: no interpolation
    text = re.sub(
        r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text
    )  # no end of the quotes
    return f"{key}='{text}'"


def pick_device(name: str) -> str:
    """`name`, or for "auto" the fastest kind of device that is there."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [kind for kind in there if there[kind]]
    if name != "auto" and name not in usable:
        raise ValueError(f"device={name} is not available; here are auto, {', '.join(usable)}")
    return usable[0] if name == "auto" else name


def task_overrides() -> list[str]:
    """What was typed behind the command, key=value each; nothing where it was not started by Hydra."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def nearest(name: str, legal, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(legal), n=1)
    return (
        f"; did you mean {prefix}{close[0]}?"
        if close
        else f"; legal are {', '.join(prefix + key for key in sorted(legal))}"
    )


def explain(error: Exception, config_name: str) -> str:
    """What Hydra or OmegaConf refuse, in one line that names the nearest legal choice."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"there is no {group}={name}{nearest(name, error.options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"put quotes within quotes, \"{key}='...'\"" if value else "settings are written key=value"
        return f"cannot read {error.override!r}; {remedy}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigKeyError | AttributeError):
        key = getattr(cause, "full_key", None) or str(error).split("'")[1]
        close = difflib.get_close_matches(key, _names(config_name), n=1)
        return f"there is no setting {key}" + (
            f"; did you mean {close[0]}?" if close else f"; see python {sys.argv[0]} --help"
        )
    if isinstance(error, OSError):
        return f"{error}; choose another folder"  # which Hydra could not make for the run
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2])


def _names(config_name: str) -> list[str]:
    """Dotted names of all settings, and of the groups, of the default composition."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose(config_name)

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        for key in node:
            yield f"{prefix}{key}"
            child = node._get_node(key)
            if (
                isinstance(child, DictConfig)
                and not child._is_none()
                and not child._is_missing()
                and not child._is_interpolation()
            ):
                yield from walk(child, f"{prefix}{key}.")

    return list(walk(cfg, ""))
