"""Text <-> token ids: trains or loads a `tokenizers.Tokenizer`.

The end-of-text token separates documents. It is inserted as an id and never comes from text: every tokenizer of this
module has `encode_special_tokens` set, so that a document that contains "<|endoftext|>" does not become two. The flag
is not part of the saved JSON; read that with `load`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tril.data.settings import setting, strict_settings
from tril.data.tokenizer_json import MAX_BYTES, defect, read_tokenizer

UNKNOWN = "<|unknown|>"  # of kind "char" only
MIN_BPE_VOCAB_SIZE = 256 + 1  # every byte, and end-of-text
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, config=strict_settings("data.tokenizer"))
class TokenizerConfig:
    """Which tokenizer: "bpe" trains byte-level BPE on the training part, "char" has one token per character of it,
    "byte" has the 256 bytes, "file" loads a tokenizer.json, "hub" loads one from the Hugging Face hub.
    """

    kind: Literal["bpe", "char", "byte", "file", "hub"] = setting("bpe", "bpe | char | byte | file | hub")
    vocab_size: int | None = setting(4096, "tokens with end-of-text; a small text may give fewer", needs="kind=bpe")
    path: str | None = setting(
        None, "kind=file: a tokenizer.json; kind=hub: a name such as openai-community/gpt2", needs="kind=file|hub"
    )
    revision: str = setting("main", "branch, tag or commit; resolved to a commit", needs="kind=hub")
    train_bytes: int = setting(50_000_000, "train on at most this much text", needs="kind=bpe", ge=1)
    # kind "char" has tokens of one character
    eot: str = setting(
        "<|endoftext|>", "end of a document; tokenizers of kind=file and kind=hub must contain it", min_length=2
    )

    @model_validator(mode="after")
    def _check(self) -> "TokenizerConfig":
        kind, size, path, key = self.kind, self.vocab_size, self.path, f"data.tokenizer.path={self.path}"
        if kind == "bpe" and (size is None or size < MIN_BPE_VOCAB_SIZE):
            need = f"must be at least {MIN_BPE_VOCAB_SIZE} with kind=bpe: 256 bytes and end-of-text"
            raise ValueError(f"data.tokenizer.vocab_size={json.dumps(size)} {need}")
        if kind in ("bpe", "char", "byte") and path is not None:
            raise ValueError(f"{key} must be null with kind={kind}; use kind=file or kind=hub to load a tokenizer")
        if kind in ("file", "hub") and not path:
            need = "a tokenizer.json" if kind == "file" else "a repository, such as openai-community/gpt2"
            raise ValueError(f"data.tokenizer.path is missing; kind={kind} needs {need}")
        if kind == "file" and not Path(str(path)).expanduser().is_file():
            raise ValueError(f"{key} does not exist; give a tokenizer.json")
        return self

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that, together with the text, determine the tokenizer.

        Raises:
            OSError: the hub cannot be reached and has never been, or does not know the repository or the revision.
        """
        values: dict[str, Any] = {"kind": self.kind, "eot": self.eot}
        if self.kind == "bpe":
            values |= {"vocab_size": self.vocab_size, "train_bytes": self.train_bytes}
        elif self.kind == "file":
            with self.json_file.open("rb") as file:
                values |= {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        elif self.kind == "hub":
            is_commit = COMMIT.fullmatch(self.revision)
            values |= {"path": self.path, "revision": self.revision if is_commit else self.json_file.parent.name}
        return values

    @cached_property
    def json_file(self) -> Path:
        """The tokenizer.json of kinds "file" and "hub"; a file of the hub lies in a folder named after its commit.

        Raises:
            OSError: the hub cannot be reached, or has no such file; or it is too large.
        """
        assert self.path is not None
        path = Path(self.path).expanduser() if self.kind == "file" else self._downloaded(self.path)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _unreadable(self, ValueError(f"it has {size} bytes, more than {MAX_BYTES}"))
        return path

    def _downloaded(self, repository: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:  # without network, the download of an earlier start is used
            return Path(hf_hub_download(repository, "tokenizer.json", revision=self.revision))
        except Exception as error:  # network, server and library errors have no common base class
            raise _unreadable(self, error) from error


def build(config: TokenizerConfig, texts: Iterable[str], on_read: Callable[[], object] | None = None) -> Tokenizer:
    """Trains or loads the tokenizer.

    Args:
        texts: the training part; only kinds "bpe" and "char" read it.
        on_read: called when BPE has read its text and computes the merges, which takes minutes for a long text.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token, or would lose text.
        OSError: a tokenizer cannot be read, or the hub cannot be reached.
    """
    if config.kind in ("bpe", "byte"):
        return _configured(_byte_level(config, texts, on_read))
    return _configured((_characters if config.kind == "char" else _existing)(config, texts))


def load(state: str) -> Tokenizer:
    """The tokenizer from the output of `Tokenizer.to_str`, ready to encode documents.

    Raises:
        ValueError: it cannot be read.
    """
    return _configured(read_tokenizer(state))


def n_ids(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: more than there are tokens if the ids of a foreign tokenizer have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _configured(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # settings of a downloaded tokenizer; both would change the text
    tokenizer.no_padding()
    return tokenizer


def _byte_level(
    config: TokenizerConfig, texts: Iterable[str], on_read: Callable[[], object] | None = None
) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`; of kind "byte" without merges. Exact for every text."""
    is_bpe = config.kind == "bpe"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_bpe)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=is_bpe and config.vocab_size or MIN_BPE_VOCAB_SIZE,
        special_tokens=[config.eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def read() -> Iterator[str]:
        yield from first_bytes(texts, config.train_bytes)
        if on_read is not None:
            on_read()

    tokenizer.train_from_iterator(read() if is_bpe else (), trainer)
    return tokenizer


def _characters(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per character of `texts`, in code point order: BPE without merges, which is fast."""
    tokens = [config.eot, UNKNOWN, *sorted(set(chain.from_iterable(texts)))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens without a separator
    tokenizer.add_special_tokens([AddedToken(config.eot, special=True, normalized=False)])
    return tokenizer


def _existing(config: TokenizerConfig, _: Iterable[str]) -> Tokenizer:
    path = config.json_file
    try:
        content = path.read_text(encoding="utf-8")
        tokenizer = read_tokenizer(content)
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    if tokenizer.token_to_id(config.eot) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        raise ValueError(
            f"data.tokenizer.eot={config.eot} is not a token of {config.path}; "
            f"its special tokens are {' '.join(special) or 'none'}"
        )
    if problem := defect(tokenizer, content):
        raise ValueError(f"data.tokenizer.path={config.path}: {problem}")
    return tokenizer


def _unreadable(config: TokenizerConfig, error: Exception) -> OSError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    hub_remedy = "check path, revision and network, set HF_ENDPOINT to a mirror, or use kind=file"
    remedy = hub_remedy if config.kind == "hub" else "give a tokenizer.json"
    return OSError(f"cannot read a tokenizer from data.tokenizer.path={config.path} ({reason}); {remedy}")


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text.encode())
        if limit <= 0:
            return
