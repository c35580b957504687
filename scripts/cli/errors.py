"""A user's mistake is one line: value, limit, remedy; exit status 2."""

import contextlib
import difflib
import errno
import io
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tril.data.cache import NO_SPACE
from tril.data.settings import explain, one_line, printable
from tril.model.formats import wrapped
from tril.model.runs import CHECKPOINTS, SETTINGS, SWEEP
from tril.model.training.settings import Stopped, UserError


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError or OSError of the block into a UserError. Wrap only code that reads the user's input."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except (ValueError, OSError) as error:
        raise UserError(message_of(error) + remedy_of(error)) from error


@contextlib.contextmanager
def exit_with_one_line() -> Iterator[None]:
    """Ends the process where a UserError, a signal, a full disk or the end of a pipe's reader ends the block."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it; print() would use the other one, and files get its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # here, and not at exit: the reader of a pipe may be gone, also after --help
    except UserError as error:
        fail(error)
    except Stopped as stopped:
        if stopped.code:  # 0 in ranks other than 0
            print(stopped.text, file=sys.stderr)
        raise
    except MemoryError as error:  # numpy and the reader of safetensors raise it for sizes that a file says
        fail(f"this machine has too little memory ({one_line(error)}); make the model, the batch or the file smaller")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if remedy := remedy_of(error):
            fail(message_of(error) + remedy)
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's flush at exit fails
        sys.exit(141) if error.errno == errno.EPIPE else fail(f"cannot write the output: {error.strerror}")


@contextlib.contextmanager
def printed_too(text: str) -> Iterator[None]:
    """Prints the result that the block writes, even if it cannot be written, which is a UserError then."""
    try:
        yield
    except OSError as error:
        cause = f"cannot write the result ({message_of(error)})"
        raise UserError(f"{cause}; choose another folder with out=FOLDER") from error
    finally:
        print(wrapped(text), flush=True)


def message_of(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"  # without "[Errno 2]"
    return explain(error) if isinstance(error, ValidationError) else " ".join(str(error).split())


def remedy_of(error: BaseException) -> str:
    """The end of the line for a file on a full disk; empty for other errors."""
    is_full = isinstance(error, OSError) and error.filename is not None and error.errno in NO_SPACE
    return "; free space on that disk and start again, or choose another folder" if is_full else ""


def unknown_setting(key: str, settings: Mapping[str, FieldInfo], groups: Collection[str]) -> str:
    """The message for a setting that does not exist, with the one that was probably meant.

    Args:
        settings, groups: those that exist, by dotted key.
    """
    without_group = {name.rpartition(".")[2]: name for name in settings}
    close = difflib.get_close_matches(key.lower(), [*settings, *groups], n=1)
    close += [without_group[name] for name in difflib.get_close_matches(key.lower(), without_group, n=1, cutoff=0.75)]
    close += [name for name, x in settings.items() if key in name or key.replace("_", " ") in (x.description or "")]
    if not close:
        return f"there is no setting {key}; --help=all lists all"
    description = settings[close[0]].description if close[0] in settings else ""
    return f"there is no setting {key}; did you mean {close[0]}? {description or ''}".strip()


def unreadable(argument: str, settings: Collection[str]) -> str:
    """The message for an argument that is not key=value, or whose value Hydra's grammar does not read."""
    key, equals, value = argument.partition("=")
    if argument.startswith("-"):
        name = key.lstrip("-").replace("-", "_")
        name = next((each for each in settings if name in (each, each.rpartition(".")[2])), "KEY")
        return f"{argument}: settings have no dashes; write {name}={value or 'VALUE'}, and --help lists all"
    if equals and key.strip("+~"):
        plain = "write KEY=VALUE without spaces, a list as [1,2]"
        return f"cannot read {argument!a}; {plain}, and other text in quotes within quotes, \"{key}='...'\""
    remedy = ", and a recipe is experiment=NAME" if "init_from" in settings else ""
    is_path = (Path(key).suffix or "/" in key) and key.partition(".")[0] not in {x.partition(".")[0] for x in settings}
    if name := next((x for x in ("ckpt", "dir", "data.path") if is_path and x in settings), None):
        remedy += f"; a file or folder is {name}={key}"
    return f"cannot read {argument!a}; settings are written key=value, in quotes if they have spaces{remedy}"


def fail(message: object, status: int = 2) -> None:
    """Prints the error in one line, its notes in lines of their own, and exits."""
    print(f"error: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr)
    for note in getattr(message, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    sys.exit(status)


def check_writable(folder: Path, key: str) -> None:
    """Raises OSError if `folder`, which need not exist, cannot be written to; the setting `key` chooses it.

    A link in the folder of a run, which may come from somebody else, is not followed.
    """
    if folder.is_symlink() and any((folder.parent / name).exists() for name in (SETTINGS, SWEEP, CHECKPOINTS)):
        raise OSError(f"{folder} is a link to another place; choose a folder with {key}=FOLDER")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # root has the right to write everywhere, and cannot in /proc
    except OSError as error:
        cause = f"cannot write to {folder} ({error.strerror})"
        raise OSError(f"{cause}; choose another folder with {key}=FOLDER") from error


def writable(folder: str | Path, key: str) -> Path:
    """Creates the folder that the setting `key` chooses, before anything is computed for it; see `check_writable`."""
    check_writable(folder := Path(folder), key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
