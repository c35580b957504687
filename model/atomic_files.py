"""Files that are replaced as a whole, JSON without NaN, and files of somebody else, which may be damaged."""

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tril.data.settings import one_line

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


MAX_RECORDS = 20_000  # of an archive: opening each takes a moment


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder. It replaces `path` when the block ends without an exception.

    A process that is killed in the block leaves `path` unchanged. After a power failure the file is the old or the new
    one, as the content is on the disk before the name changes.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file in an OSError of the block that names none, such as on a full disk, or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None and not str(error.filename).endswith(".part"):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_leftovers(folder: str | Path) -> None:
    """Removes the temporary files that killed processes left below a folder. No other process may write there."""
    for part in Path(folder).rglob(".*.part"):
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value) -> None:
    """Writes indented JSON atomically; NaN and infinities, which JSON does not have, become null."""
    write_text(path, json.dumps(without_nan(value), indent=2) + "\n")


def write_picture(path: str | Path, figure: "Figure", dpi: int) -> None:
    """Writes a PNG atomically. A link at `path` is replaced."""
    with atomic_path(path) as part:
        figure.savefig(part, dpi=dpi, format="png")


def without_nan(value):
    """The plain values of JSON for containers and dataclasses; None in place of every float that is not finite."""
    return json.loads(json.dumps(value, default=vars), parse_constant=lambda name: None)


def read_arrays(path: Path) -> "dict[str, np.ndarray]":
    """The arrays of an .npz file. Raises ValueError for a damaged one."""
    import numpy as np

    with reading(path), zipfile.ZipFile(path) as archive:
        check_archive(archive)
        with np.load(path) as file:
            arrays = dict(file)
        for name, array in arrays.items():  # (10^10, 0) elements take no bytes, and too many as a list
            if math.prod(max(1, n) for n in array.shape) > os.path.getsize(path):
                raise ValueError(f"{name} has the shape {array.shape}")
        return arrays


def check_archive(archive: zipfile.ZipFile) -> None:
    """Raises BadZipFile if an archive holds more than its bytes, too many records to read, or damaged ones.

    Readers stop at the end of what a record declares, which may be before the CRC-32 is compared.
    """
    records, size = archive.infolist(), os.path.getsize(str(archive.filename))
    held = sum(record.file_size for record in records)
    if len(records) > MAX_RECORDS or held > size:
        raise zipfile.BadZipFile(f"a file of {size} bytes has {len(records)} records of {held} bytes")
    with open(str(archive.filename), "rb") as file:
        file.seek(-12 - len(archive.comment), os.SEEK_END)
        declared = int.from_bytes(file.read(2), "little")  # a damaged length can hide a record of the list
    if declared not in (len(records), 0xFFFF):
        raise zipfile.BadZipFile(f"{len(records)} of {declared} records are readable")
    if (record := archive.testzip()) is not None:
        raise zipfile.BadZipFile(f"the CRC-32 of {record} differs")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Raises ValueError that names the file if its content is not what the block reads. An OSError is unchanged.

    A pipe or a device is an error too: nobody may write to a pipe, and some devices do not end.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is a pipe or a device; name a file")
    try:
        yield path
    except OSError:
        raise
    except Exception as error:  # the file decides which of many kinds the parsers raise
        problem = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path} is damaged ({problem}); restore it, or move it away") from error
