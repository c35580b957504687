"""The cache folder, and files and folders that appear in it only when they are complete."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


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
        remedy = "choose another one with data.cache_dir=FOLDER or the environment variable TRIL_CACHE"
        raise OSError(f"cannot write to the cache folder {folder}; {remedy}")
    return folder


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with tempfile.TemporaryDirectory(dir=make_folder(path.parent), prefix=".tmp-") as temporary:
        part = Path(temporary, path.name)
        part.write_bytes(content)
        part.replace(path)


def write_folder(folder: Path, fill: Callable[[Path], None], is_valid: Callable[[Path], bool]) -> None:
    """Creates a folder atomically: `fill` writes to a temporary folder, which is renamed when it is complete.

    If another process has created a valid `folder` in the meantime, that one is kept. An invalid one is replaced.
    """
    with tempfile.TemporaryDirectory(dir=make_folder(folder.parent), prefix=".tmp-") as temporary:
        part = Path(temporary, folder.name)
        part.mkdir()
        fill(part)
        if folder.exists() and not is_valid(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            part.rename(folder)
        except OSError:  # a non-empty folder cannot be renamed over
            if not is_valid(folder):
                raise
