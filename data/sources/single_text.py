"""One text file, split by position."""

import hashlib
import urllib.request
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import read_or_write, resolve_cache_dir
from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Piece, Split, cut

DOWNLOAD_TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True, config=strict_settings("data"))
class SingleText:
    """One text, of which the first int(n (1 - val_fraction)) of n characters are for training, the rest for validation.

    This is nanoGPT's split of tiny shakespeare. No end-of-text token is inserted. The text is held in memory.
    """

    path: str | None = setting(None, "a text file; null: downloaded once into the cache folder")
    url: str = setting(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "of the download",
        needs="path=null",
        typed_only=True,
    )
    sha256: str | None = setting(
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "of the download; null: do not check",
        needs="path=null",
    )
    val_fraction: float = setting(0.1, "the end of the text", gt=0, lt=1)
    cache_dir: str | None = field(default=None, compare=False)
    name = "shakespeare"
    split_rule = "the end of the text"

    @model_validator(mode="after")
    def _check_path(self) -> "SingleText":
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    def fingerprint(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(self._content()).hexdigest()
        return {"kind": self.name, "sha256": sha256, "val_fraction": self.val_fraction}

    def pieces(self, split: Split) -> Iterator[Piece]:
        try:
            text = self._content().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"data.path={self.path} is not UTF-8 at byte {error.start}; convert the file") from error
        middle = int(len(text) * (1 - self.val_fraction))
        yield from cut(text[:middle] if split == "train" else text[middle:], ends_document=False)

    def _content(self) -> bytes:
        if self.path is not None:
            return Path(self.path).expanduser().read_bytes()
        url_hash = hashlib.sha256(self.url.encode()).hexdigest()
        download = resolve_cache_dir(self.cache_dir) / f"shakespeare-{url_hash[:16]}.txt"
        return read_or_write(download, "downloads", lambda part: part.write_bytes(self._download()), _existing)[0]

    def _download(self) -> bytes:
        try:
            with urllib.request.urlopen(self.url, timeout=DOWNLOAD_TIMEOUT) as response:
                content = response.read()
        except (OSError, ValueError) as error:  # ValueError: not a URL
            raise OSError(
                f"cannot download data.url={self.url} ({error}); download the text and pass data.path=FILE"
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256 not in (None, digest):
            raise OSError(
                f"data.url={self.url} has sha256 {digest} instead of data.sha256={self.sha256}; "
                "pass data.path=FILE, or data.sha256=null to accept it"
            )
        return content


def _existing(path: Path) -> bytes:
    if not path.exists():
        raise ValueError("it does not exist")
    return path.read_bytes()
