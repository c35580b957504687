"""The cache folder, and files and folders that appear in it only when they are complete."""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tril.data.cache_locks import locked, locked_if_free

PREFIX = ".tmp-"  # of folders that are being written: PREFIX, the name of what is written, "-", random letters
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
REMEDY = "choose another cache folder with data.cache_dir=FOLDER or the environment variable TRIL_CACHE"


def resolve_cache_dir(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`; None: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril."""
    if chosen := cache_dir or os.environ.get("TRIL_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tril"


def keep_compiled_code() -> None:
    """Makes torch's compiler keep its output in the cache folder, so that the next start is faster.

    Call it before the compiler is first used. $TORCHINDUCTOR_CACHE_DIR has precedence. If the cache folder cannot be
    written, the compiler uses its default, a folder in /tmp.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):  # the run may need no cache folder
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(make_folder(resolve_cache_dir() / "compiled"))


def make_folder(folder: Path) -> Path:
    """Creates a folder of the cache if it does not exist.

    Raises:
        OSError: it cannot be created or written.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OSError(f"cannot write to the cache folder {folder}; {REMEDY}")
    return folder


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: it cannot be written.
    """
    with _temporary(path) as part:
        part.write_bytes(content)
        sync(part)
        part.replace(path)
        sync(path.parent)


def write_folder(folder: Path, fill: Callable[[Path], None], is_valid: Callable[[Path], bool]) -> None:
    """Creates a folder atomically: `fill` writes files to a temporary folder, which is renamed when it is complete.

    If another process has created a valid `folder` in the meantime, that one is kept. An invalid one is replaced.

    Raises:
        OSError: it cannot be written.
    """
    with _temporary(folder) as part:
        part.mkdir()
        fill(part)
        for path in [*part.iterdir(), part]:  # a rename may reach the disk before the content does
            sync(path)
        try:
            if os.path.lexists(folder) and not is_valid(folder):
                _remove(folder)
            part.rename(folder)
        except OSError as error:  # a non-empty folder cannot be renamed over
            if not is_valid(folder):
                raise OSError(f"cannot replace {folder} ({error.strerror}); remove it, or {REMEDY}") from error
        sync(folder.parent)


def remove_leftovers(cache_dir: Path) -> None:
    """Removes the temporary folders of processes that were killed: those whose lock is free."""
    for leftover in cache_dir.glob(f"{PREFIX}*"):
        name = leftover.name.removeprefix(PREFIX).rpartition("-")[0] or "tmp"  # no name: of version 0.1
        with contextlib.suppress(OSError), locked_if_free(cache_dir / name) as is_free:
            if is_free:
                shutil.rmtree(leftover, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk."""
    is_folder = path.is_dir()
    if is_folder and sys.platform == "win32":
        return
    with contextlib.suppress(OSError) if is_folder else contextlib.nullcontext():  # not on every file system
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    """Says what to do if there is no space for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise OSError(f"cannot write {path} ({error.strerror}); free space on that disk, or {REMEDY}") from error


@contextlib.contextmanager
def preparing(folder: Path, task: str) -> Iterator[None]:
    """Holds the lock of a folder of prepared data, with its parent in place and errors as in `explained_errors`.

    Args:
        task: what the holder does, for processes that wait.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
    make_folder(folder.parent)
    with explained_errors(folder), locked(folder, f"which {task} {folder}"):
        yield


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path of the same name in a temporary folder next to `path`."""
    make_folder(path.parent)
    prefix = f"{PREFIX}{path.name}-"
    with explained_errors(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as temporary:
        yield Path(temporary, path.name)


def _remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink()
