"""Where downloaded and prepared data lies, and how it gets there without ever being seen half-written."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_cache_dir() -> Path:
    """The first of $TRIL_CACHE, $XDG_CACHE_HOME/tril and ~/.cache/tril; outside the source tree in any case."""
    if os.environ.get("TRIL_CACHE"):
        return Path(os.environ["TRIL_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "tril"
    return Path.home() / ".cache" / "tril"


def keep_compiled_code() -> None:
    """Tells torch's compiler, before it is first used, to keep what it makes beside the data, so that the next start is quicker: its own
    place, which it keeps where ours cannot be written, is below /tmp. $TORCHINDUCTOR_CACHE_DIR names another.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):  # the data may lie elsewhere, or be prepared already
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(make_folder(default_cache_dir() / "compiled"))


def make_folder(folder: Path) -> Path:
    """Makes the cache folder.

    Raises:
        OSError: it cannot be made or written; says how to choose another one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise OSError(
            f"cannot write to the cache folder {folder}; choose one with data.cache_dir=FOLDER or the variable TRIL_CACHE"
        )
    return folder


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file or nothing."""
    with tempfile.TemporaryDirectory(dir=make_folder(path.parent), prefix=".tmp-") as temporary:
        part = Path(temporary) / path.name
        part.write_bytes(content)
        part.replace(path)


def write_folder(folder: Path, fill: Callable[[Path], None], is_valid: Callable[[Path], bool]) -> None:
    """Lets `fill` write into a temporary neighbour of `folder`, which gets the name `folder` when it is complete.

    A valid folder that another process finished meanwhile is kept, an invalid one is replaced.
    """
    with tempfile.TemporaryDirectory(dir=make_folder(folder.parent), prefix=".tmp-") as temporary:
        part = Path(temporary) / folder.name
        part.mkdir()
        fill(part)
        if folder.exists() and not is_valid(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            part.rename(folder)
        except OSError:  # a folder with content is never renamed over: someone else was faster
            if not is_valid(folder):
                raise
