"""The cache folder, and folders that appear in it only when they are complete."""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
REMEDY = "choose another cache folder with data.cache_dir=FOLDER or the environment variable TRIL_CACHE"
HASH_LIMIT = 1 << 28  # bytes; larger files are identified by size and modification time, to keep later starts fast
PROGRESS: dict[str, Any] = {"delay": 2, "disable": None, "leave": False}  # a bar after two seconds, in terminals
Content = TypeVar("Content")


def resolve_cache_dir(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`; None: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril."""
    if chosen := cache_dir or os.environ.get("TRIL_CACHE"):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tril"


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


def read_or_write(folder: Path, write: Callable[[Path], object], read: Callable[[Path], Content]) -> Content:
    """Reads a folder of the cache, which is written first if it does not exist or is damaged.

    Of several processes, one writes, and the others say so in one line and wait.

    Args:
        write: writes to a temporary folder, which is renamed when it is complete.
        read: raises ValueError if the folder is damaged.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with contextlib.suppress(ValueError, FileNotFoundError, NotADirectoryError):
        return read(folder)
    from filelock import FileLock, Timeout

    make_folder(folder.parent)
    lock, part = FileLock(folder.with_name(f".{folder.name}.lock")), folder.with_name(f".{folder.name}.part")
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process, which prepares {folder}", file=sys.stderr, flush=True)
        held = lock.acquire()
    with held:
        try:
            return read(folder)  # another process has written it
        except FileNotFoundError:
            pass
        except ValueError as error:
            logging.getLogger(__name__).warning("%s is damaged (%s); preparing it again", folder, error)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            write(part)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise OSError(f"cannot write {folder} ({error.strerror}); free space on that disk, or {REMEDY}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
            Path(lock.lock_file).unlink()  # those who wait for the removed file start again with a new one
        return read(folder)


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """One sha256 of (name, path) pairs: of the names and the contents, see HASH_LIMIT."""
    total = hashlib.sha256()
    for name, path in files:
        stat = path.stat()
        is_large = stat.st_size > HASH_LIMIT
        content = f"{stat.st_size} bytes, changed {stat.st_mtime_ns}" if is_large else sha256_of_file(path)
        total.update(os.fsencode(f"{name}\0{content}\0"))
    return total.hexdigest()
