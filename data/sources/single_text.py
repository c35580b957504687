"""One text file, split by position."""

import hashlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tril.data.cache import default_cache_dir, write_file
from tril.data.sources.base import Piece, Split, check_fraction, cut

DOWNLOAD_TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True)
class SingleText:
    """One text, split by position: the first int(n (1 - val_fraction)) of its n characters train, the rest validates.

    That is nanoGPT's split, and like there no end-of-text is put at the cut or at the end. The text is held in memory.

    path: a UTF-8 file; None downloads `url` once into `cache_dir`.
    sha256: what the downloaded file must hash to; None accepts anything.
    """

    path: str | None = None
    url: str = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    sha256: str | None = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    val_fraction: float = 0.1
    cache_dir: str | None = field(default=None, compare=False)
    name = "shakespeare"

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path}: no such file; give a text file, or null to download it")

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "sha256": hashlib.sha256(self._content()).hexdigest(),
            "val_fraction": self.val_fraction,
        }

    def pieces(self, split: Split) -> Iterator[Piece]:
        try:
            text = self._content().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.path={self.path}: not UTF-8 at byte {error.start}; convert the file to UTF-8 first"
            ) from error
        middle = int(len(text) * (1 - self.val_fraction))
        yield from cut(text[:middle] if split == "train" else text[middle:], ends_document=False)

    def _content(self) -> bytes:
        if self.path is not None:
            return Path(self.path).expanduser().read_bytes()
        # The name carries the address: another url never finds this one's file.
        name = f"shakespeare-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.txt"
        folder = Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir()
        if not (folder / name).exists():
            write_file(folder / name, self._download())
        return (folder / name).read_bytes()

    def _download(self) -> bytes:
        try:
            with urllib.request.urlopen(self.url, timeout=DOWNLOAD_TIMEOUT) as answer:
                content = answer.read()
        except (OSError, ValueError) as error:  # ValueError: not an address at all
            raise OSError(
                f"cannot download {self.url} ({error}); fetch the text some other way and pass data.path=FILE"
            ) from error
        found = hashlib.sha256(content).hexdigest()
        if self.sha256 is not None and found != self.sha256:
            raise OSError(
                f"{self.url} has changed: its sha256 is {found}, not {self.sha256}; pass data.path=FILE, or data.sha256=null to accept it"
            )
        return content
