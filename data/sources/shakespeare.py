"""One text, split by position, as nanoGPT splits tiny shakespeare."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import make_folder, resolve_cache_dir, sha256_of_file
from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.files import expanded
from tril.data.sources.rows import read_documents

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True, config=strict_settings("data"))
class Shakespeare(Source):
    """A text of n characters, of which the first int(n (1 - val_fraction)) are for training, the rest for validation.

    No end-of-text token is inserted.
    """

    path: str | None = setting(
        None, "a text file; null: tiny shakespeare, downloaded once into the cache folder", common=True
    )
    val_fraction: float = setting(0.1, "the end of the text", common=True, gt=0, lt=1)
    name = "shakespeare"
    own_split = "the end of the text"
    ends_documents = False

    @model_validator(mode="after")
    def _check(self) -> "Shakespeare":
        if self.path is not None and not expanded(self.path).is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "sha256": sha256_of_file(self.file()), "val_fraction": self.val_fraction}

    def documents(self, split: Split) -> Iterator[Document]:
        text = "".join(document.text for document in read_documents("text", self.file(), "text"))
        middle = int(len(text) * (1 - self.val_fraction))
        yield Document("text", text[:middle] if split == "train" else text[middle:])

    def file(self) -> Path:
        """The file of the text, which is downloaded if it is not there."""
        if self.path is not None:
            return expanded(self.path)
        file = make_folder(resolve_cache_dir(self.cache_dir)) / "shakespeare.txt"
        if not file.exists():
            from torch.hub import download_url_to_file

            try:
                download_url_to_file(URL, str(file), hash_prefix=SHA256, progress=False)
            except (OSError, RuntimeError) as error:  # the latter of another text
                cause = f"cannot download {URL} ({error})"
                raise OSError(f"{cause}; download the text and pass data.path=FILE") from error
        return file
