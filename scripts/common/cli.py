"""What all entry points share: they compose their configuration with Hydra and report a user's mistake in one line."""

import contextlib
import difflib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from tril.scripts.common.arguments import rewritten
from tril.scripts.common.help_text import help_text
from tril.scripts.common.known_names import meant

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class UserError(ValueError):
    """A mistake in what the user typed. Its message is one line: value, limit, remedy. Notes list parts of a grid."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError or OSError of the block into a UserError. Wrap only code that reads the user's input."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(message_of(error)) from error


def message_of(error: Exception) -> str:
    """The error in one line."""
    from pydantic import ValidationError

    from tril.data.settings import explain as explain_settings

    return explain_settings(error) if isinstance(error, ValidationError) else " ".join(str(error).split())


def entry(
    config_name: str, text_keys: Collection[str] = ()
) -> Callable[[Callable[[DictConfig], object]], Callable[[], object]]:
    """Decorator of `main(cfg)`: composes the configuration, reports user errors in one line and exits with status 2.

    Args:
        config_name: the yaml in configs/.
        text_keys: keys whose value is free text, such as a path; `quoted` protects it from Hydra's grammar. This does
            not apply with -m, where a comma separates the values of a grid.

    Returns:
        A decorator that returns a function without arguments.
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], object]:
        task_started = False

        @functools.wraps(task)
        def reported(cfg: DictConfig) -> object:
            nonlocal task_started
            task_started = True
            try:
                return task(cfg)
            except UserError as error:  # caught inside of Hydra, which would print a line of its own
                fail(error)
            except OmegaConfBaseException as error:
                fail(explain(error, config_name))

        def main() -> object:
            nonlocal task_started
            task_started = False
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its exceptions instead of printing them
            if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
                sys.stdout.reconfigure(errors="replace")
            sys.argv[1:] = rewritten(sys.argv[1:], config_name, text_keys, CONFIGS / "experiment")
            if {"-h", "--help"} & set(sys.argv):
                return print_help(config_name, sys.modules[task.__module__].__doc__ or "")
            check_flags(config_name)
            try:
                try:
                    return hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(reported)()
                finally:
                    sys.stdout.flush()  # here, and not at exit: the reader of a pipe may be gone, also after --help
            except (HydraException, OmegaConfBaseException) as error:
                fail(explain(error, config_name))
            except BrokenPipeError:  # `--help | head`
                drop_output()
                sys.exit(141)  # 128 + SIGPIPE
            except (OSError, ValueError) as error:
                if task_started:
                    raise
                fail(explain(error, config_name))

        return main

    return decorate


def fail(message: object, status: int = 2) -> None:
    """Prints the error in one line, its notes in lines of their own, and exits."""
    print(f"error: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr)
    for note in getattr(message, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    sys.exit(status)


def printable(text: str) -> str:
    """The text with escapes for line ends and control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_flags(config_name: str) -> None:
    """Ends the process for wrong flags in one line; Hydra's own parser would print its usage as well."""
    from hydra._internal.utils import get_args_parser

    def error(message: str) -> None:
        dashed = re.search(r" --?([A-Za-z][\w.-]*)(?:[= ](\S+))?", message) if "unrecognized" in message else None
        key = dashed[1].replace("-", "_") if dashed else ""
        known = meant(key, list(_setting_names(config_name))) if dashed else None
        if dashed is None or not (known or dashed[2]):
            fail(f"{message}; see {program()} --help")
        else:
            fail(f"{dashed[0].strip()}: settings have no dashes; write {known or key}={dashed[2] or 'VALUE'}")

    parser = get_args_parser()
    parser.error = error  # pyright: ignore[reportAttributeAccessIssue] it exits
    if parser.parse_args().multirun and config_name != "train":
        fail(f"-m starts a grid of training runs, which {program()} cannot; leave it out")


def print_help(config_name: str, description: str) -> None:
    """Prints the help for the settings that are typed with --help, such as those of model=small."""
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra.compose(config_name, overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        return fail(explain(error, config_name))
    choices = {k: v for k, v in cfg.hydra.runtime.choices.items() if "/" not in k and (CONFIGS / k).is_dir()}
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    try:
        print(help_text(description, CONFIGS, config_name, tree, choices), flush=True)
    except BrokenPipeError:  # `--help | head`
        drop_output()
        sys.exit(141)  # 128 + SIGPIPE


def command(script: str) -> str:
    """How the user starts a script: `tril report` from the console command, else `python scripts/report.py`."""
    if sys.argv[0].startswith("tril "):
        return f"tril {script}"
    return "python train.py" if script == "train" else f"python scripts/{script}.py"


def check_writable(folder: Path, key: str) -> None:
    """Raises OSError if `folder`, which need not exist, cannot be written to; the setting `key` chooses it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OSError(f"cannot write to {folder}; choose another folder with {key}=FOLDER")


def writable(folder: str | Path, key: str) -> Path:
    """Creates the folder that the setting `key` chooses, before anything is computed for it.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = Path(folder)
    check_writable(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def drop_output() -> None:
    """Discards further output. Without this, Python's flush at exit fails when the reader of stdout is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(cfg: DictConfig) -> dict:
    """The configuration as plain containers, interpolations resolved."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType] a dict


def flatten(tree: Mapping[str, object], separator: str = ".") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in tree.items():
        below = flatten(value, separator) if isinstance(value, Mapping) else None
        flat |= {key: value} if below is None else {f"{key}{separator}{name}": item for name, item in below.items()}
    return flat


def build(cls: type, cfg: DictConfig | dict, where: str = ""):
    """`cls(**cfg)` for a dataclass of settings.

    Args:
        cls: a dataclass; a pydantic one validates its values and names them by its title.
        cfg: its settings. Hydra accepts unknown ones (`+model.foo=1`), this function does not.
        where: prefix of the keys on the command line, such as "model"; "" for top-level keys.

    Raises:
        ValueError: an unknown key, or values that `cls` refuses.
    """
    values = plain(cfg) if isinstance(cfg, DictConfig) else cfg
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in cls.__dataclass_fields__:
            raise ValueError(f"there is no setting {prefix}{key}{nearest(key, cls.__dataclass_fields__, prefix)}")
    return cls(**values)


def pick_device(name: str) -> str:
    """`name`, or the fastest available kind of device for "auto"."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [kind for kind in available if available[kind]]
    if name != "auto" and name not in usable:
        raise ValueError(f"device={name} is not available; use auto, {', '.join(usable)}")
    return usable[0] if name == "auto" else name


def task_overrides() -> list[str]:
    """The overrides of the command line, key=value each; none outside of Hydra."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def nearest(name: str, choices: Collection[str], prefix: str = "") -> str:
    """The end of an error message: the choice most similar to `name`, or all choices."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; choose one of {', '.join(prefix + key for key in sorted(choices))}"


def explain(error: Exception, config_name: str) -> str:
    """An error of Hydra or OmegaConf in one line that names the nearest valid choice or a remedy."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for path in (CONFIGS / group).glob("*.yaml") if group]  # none of a list
        # --config-name has none, and a search path with a line each
        return f"there is no {group}={name}{nearest(name, options)}" if options else str(error).splitlines()[0]
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"put quotes within quotes, \"{key}='...'\"" if value else "settings are written key=value"
        return f"cannot read {error.override!r}; {remedy}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigKeyError | AttributeError):
        key, settings = getattr(cause, "full_key", None) or str(error).split("'")[1], _setting_names(config_name)
        if key.startswith("logger.") and key in settings:
            return f"there is no setting {key} without its logger; add logger={key.split('.')[1]}"
        close = [known] if (known := meant(key, settings)) else difflib.get_close_matches(key, settings, n=1)
        return f"there is no setting {key}; " + (f"did you mean {close[0]}?" if close else f"see {program()} --help")
    if grid := re.match(r"Ambiguous value for argument '(.*?)=(.*)'", str(error)):
        key, value = grid.groups()
        several = f"; add -m for a grid of runs, or write a list as {key}=[{value}]" if config_name == "train" else ""
        return f"{key}={value} has several values{several or '; give one'}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):  # read by our code after `~key` removed it
        return f"{error.full_key} is missing and required; leave out ~{error.full_key}, or set {error.full_key}=VALUE"
    if isinstance(error, OSError):  # Hydra could not create the run's folder
        return f"{error}; choose another folder"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2])


def program() -> str:
    """The running program as typed: `tril report`, or `python PATH/report.py`."""
    return sys.argv[0] if sys.argv[0].startswith("tril ") else f"python {sys.argv[0]}"


def _setting_names(config_name: str) -> list[str]:
    """Dotted names of all settings and groups of the default composition, with those of all loggers."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        loggers = ["logger=[tensorboard,wandb]"] if config_name in ("train", "plan", "bench") else []
        return list(_dotted_names(OmegaConf.to_container(hydra.compose(config_name, loggers), resolve=False)))


def _dotted_names(tree: object, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            yield from _dotted_names(value, f"{prefix}{key}.")
