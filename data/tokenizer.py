"""Text <-> token ids: trains or loads a `tokenizers.Tokenizer`.

The end-of-text token separates documents. It is inserted as an id and never comes from text: `build` sets
`encode_special_tokens`, so that a document that contains "<|endoftext|>" does not become two. The flag is not part of
the saved JSON.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tril.data.cache import sha256_of_file
from tril.data.settings import one_line, printable, setting, strict_settings

LOADED = ("file", "hub")  # kinds of a tokenizer.json of others
UNKNOWN = "<|unknown|>"  # of kind "char" only
MIN_BPE_VOCAB_SIZE = 256 + 1  # every byte, and end-of-text
CHECKED_BYTES = 1 << 20  # of the text, for a tokenizer of others: bits per byte count the bytes of the text
SHOWN = 20  # characters
AUTO_VOCAB_SIZE, BYTES_PER_MERGE = 4096, 512  # without a chosen size


@dataclass(frozen=True, config=strict_settings("data.tokenizer"))
class TokenizerConfig:
    """Which tokenizer: "bpe" trains byte-level BPE on the training part, "char" has one token per character of it,
    "byte" has the 256 bytes, "file" loads a tokenizer.json, "hub" loads one from the Hugging Face hub.
    """

    kind: Literal["bpe", "char", "byte", "file", "hub"] = setting("bpe", "bpe | char | byte | file | hub", common=True)
    vocab_size: Annotated[int, Field(ge=MIN_BPE_VOCAB_SIZE, le=1 << 21)] | None = setting(
        None,
        "tokens; null: 256, and one for each 512 bytes of the training text, at most 4096",
        common=True,
        needs="kind=bpe",
    )
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
        if self.kind in LOADED and not self.path:
            needs = "kind=file needs a tokenizer.json, and kind=hub a repository, such as openai-community/gpt2"
            raise ValueError(f"data.tokenizer.path is missing; {needs}")
        return self

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that, together with the text, determine the tokenizer.

        Raises:
            OSError: see `json_file`.
        """
        values: dict[str, Any] = {"kind": self.kind, "eot": self.eot}
        if self.kind == "bpe":
            values |= {"vocab_size": self.vocab_size, "train_bytes": self.train_bytes}
        elif self.kind == "file":
            values |= {"sha256": sha256_of_file(self.json_file)}
        elif self.kind == "hub":
            values |= {"path": self.path, "revision": self.json_file.parent.name}
        return values

    @cached_property
    def json_file(self) -> Path:
        """The tokenizer.json of kinds "file" and "hub"; a file of the hub lies in a folder named after its commit.

        Raises:
            OSError: there is no such file; or the hub cannot be reached and has never been, or does not know the
                repository or the revision.
        """
        try:
            if self.kind == "hub":  # without network, the download of an earlier start is used
                from huggingface_hub import hf_hub_download

                return Path(hf_hub_download(str(self.path), "tokenizer.json", revision=self.revision))
            return Path(os.path.expanduser(str(self.path))).resolve(strict=True)
        except Exception as error:  # network, server and library errors have no common base class
            remedy = "give a tokenizer.json with kind=file; with kind=hub, check path, revision and network"
            raise OSError(f"cannot read data.tokenizer.path={self.path}: {one_line(error)}; {remedy}") from error


def build(config: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """Trains or loads the tokenizer, which encodes all of a text as text.

    Args:
        texts: the training part; a loaded tokenizer is tested on its beginning.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token, or changes the text.
        OSError: a tokenizer cannot be read, or the hub cannot be reached.
    """
    if config.kind in LOADED:
        return load_checked(config, texts)
    tokenizer = train_characters(config.eot, texts) if config.kind == "char" else train_byte_level(config, texts)
    tokenizer.encode_special_tokens = True
    return tokenizer


def train_byte_level(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`; of kind "byte" without merges. Exact for every text."""
    is_bpe = config.kind == "bpe"
    read = list(first_bytes(texts, config.train_bytes)) if is_bpe else []
    n_bytes = sum(len(text.encode()) for text in read)
    auto_size = max(MIN_BPE_VOCAB_SIZE, min(256 + n_bytes // BYTES_PER_MERGE, AUTO_VOCAB_SIZE))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_bpe)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size or auto_size,
        special_tokens=[config.eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read, trainer)
    return tokenizer


def train_characters(eot: str, texts: Iterable[str]) -> Tokenizer:
    """One token per character of `texts`, in code point order: BPE without merges, which is fast."""
    tokens = [eot, UNKNOWN, *sorted(set(chain.from_iterable(texts)))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens without a separator
    tokenizer.add_special_tokens([AddedToken(eot, special=True, normalized=False)])
    return tokenizer


def load_checked(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer.json of the settings, if it gives the first CHECKED_BYTES of `texts` back."""
    name = f"data.tokenizer.path={config.path}"
    try:
        tokenizer = load_tokenizer(config.json_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    tokenizer.encode_special_tokens = True
    if tokenizer.token_to_id(config.eot) is None:
        shown = " ".join(printable(x.content) for x in tokenizer.get_added_tokens_decoder().values() if x.special)
        raise ValueError(f"{name} has no data.tokenizer.eot={config.eot}; choose one of {shown or 'none'}")
    for text in first_bytes(texts, CHECKED_BYTES):
        with library_errors(f"{name}: "):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != text and unknown_id(tokenizer) not in ids:
            start = len(os.path.commonprefix([text, decoded]))
            change = f"{text[start : start + SHOWN]!r} becomes {decoded[start : start + SHOWN]!r}"
            raise ValueError(f"{name} changes the text: {change}; use one that keeps it, such as byte-level BPE")
    return tokenizer


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The texts, up to about `limit` bytes."""
    for text in texts:
        yield text[:limit]
        limit -= len(text.encode())
        if limit <= 0:
            return


def load_tokenizer(content: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Raises:
        ValueError: it cannot be read; one line.
    """
    with library_errors():
        tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()  # settings of a downloaded tokenizer; both would change the text
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def library_errors(start: str = "") -> Iterator[None]:
    """Turns an error of the library `tokenizers` into a ValueError of one line, which begins with `start`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and a panic of Rust, which is none
        raise ValueError(f"{start}the tokenizer cannot be used ({one_line(error)}); use another one") from error


def n_ids(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: more than there are tokens if the ids of a foreign tokenizer have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def unknown_id(tokenizer: Tokenizer) -> int:
    """The id that stands for what the tokenizer does not know; -1: it has none."""
    i = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    return -1 if i is None else i


def check_ids(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if an id is no row of an embedding of `vocab_size` rows."""
    if (needed := n_ids(tokenizer)) > vocab_size:
        limit = f"the model's vocab_size={vocab_size}; use the tokenizer of the model's run"
        raise ValueError(f"the tokenizer's {needed} tokens exceed {limit}")


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt.

    Raises:
        ValueError: it contains characters that the tokenizer does not know, or half a surrogate pair; or the tokenizer
            cannot be used.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # the tokenizer would raise TypeError
        raise ValueError("the prompt has bytes that are not UTF-8 (surrogates); convert it to UTF-8") from error
    with library_errors():
        encoding, unknown = tokenizer.encode(prompt, add_special_tokens=False), unknown_id(tokenizer)
    spans = zip(encoding.ids, encoding.offsets, strict=True)
    if missing := sorted({prompt[start:end] for i, (start, end) in spans if i == unknown}):
        cause = f"the prompt has {', '.join(map(repr, missing))}, which the tokenizer does not know"
        raise ValueError(f"{cause}; use only characters of the training text")
    return encoding.ids
