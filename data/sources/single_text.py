"""One text file, split by position."""

import hashlib
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import read_or_write, resolve_cache_dir
from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.formats import read_text

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True, config=strict_settings("data"))
class SingleText(Source):
    """One text, of which the first int(n (1 - val_fraction)) of n characters are for training, the rest for validation.

    This is nanoGPT's split of tiny shakespeare. No end-of-text token is inserted.
    """

    path: str | None = setting(
        None, "a text file; null: tiny shakespeare, downloaded once into the cache folder", common=True
    )
    val_fraction: float = setting(0.1, "the end of the text", common=True, gt=0, lt=1)
    cache_dir: str | None = field(default=None, compare=False)
    name = "shakespeare"
    ends_documents = False

    @model_validator(mode="after")
    def _check_path(self) -> "SingleText":
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    @property
    def split_rule(self) -> str:
        return "the end of the text"

    def fingerprint(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(self._file().read_bytes()).hexdigest()
        return {"kind": self.name, "sha256": sha256, "val_fraction": self.val_fraction}

    def documents(self, split: Split) -> Iterator[Document]:
        yield Document("text", read_text(self._file()))

    def _part(self, document: Document, split: Split) -> str:
        middle = int(len(document.text) * (1 - self.val_fraction))
        return document.text[:middle] if split == "train" else document.text[middle:]

    def _file(self) -> Path:
        if self.path is not None:
            return Path(self.path).expanduser()
        download = resolve_cache_dir(self.cache_dir) / "shakespeare.txt"
        if not download.exists():
            read_or_write(download, "downloads", lambda part: part.write_bytes(_download()), Path.stat)
        return download


def _download() -> bytes:
    """
    Raises:
        OSError: the server cannot be reached, or has another text.
    """
    import urllib.request

    remedy = "download the text and pass data.path=FILE"
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as response:
            content = response.read()
    except OSError as error:
        raise OSError(f"cannot download {URL} ({error}); {remedy}") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{URL} has another text than tiny shakespeare; {remedy}")
    return content
