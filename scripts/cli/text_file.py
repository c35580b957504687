"""Reads a text file that a setting names."""

import os
from pathlib import Path

ICONV = "convert it first, e.g. iconv -f latin1 -t utf-8"


def read_utf8(key: str, file: str, max_bytes: int | None = None) -> str:
    """The content of the file, with its line ends; "~" is expanded.

    Args:
        key: the setting that names it, for messages.
        max_bytes: a larger file is refused; None: no limit.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or too large.
    """
    path = Path(os.path.expanduser(file))
    try:
        if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
            raise ValueError(f"{key}={file} has {size:,} bytes, at most {max_bytes:,} are read; cut it into parts")
        content = path.read_bytes()  # read_text would change line ends
    except OSError as error:
        raise OSError(f"{key}={file} cannot be read ({error.strerror}); name a text file") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={file} is not UTF-8 ({error.reason}); {ICONV}") from error
