"""Text <-> token ids: trains or loads a `tokenizers.Tokenizer`.

The end-of-text token separates documents. It is inserted as an id and never comes from text: `build` sets
`encode_special_tokens`, so that a document that contains "<|endoftext|>" does not become two. The flag is not part of
the saved JSON; `for_documents` sets it again.
"""

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
from tril.data.settings import first_line, setting, strict_settings

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
        if self.kind in ("file", "hub") and not self.path:
            needs = "kind=file needs a tokenizer.json, and kind=hub a repository, such as openai-community/gpt2"
            raise ValueError(f"data.tokenizer.path is missing; {needs}")
        return self

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that, together with the text, determine the tokenizer.

        Raises:
            OSError: there is no such file; or the hub cannot be reached and has never been, or does not know the
                repository or the revision.
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
            OSError: there is no such file, or the hub cannot be reached.
        """
        try:
            if self.kind == "hub":  # without network, the download of an earlier start is used
                from huggingface_hub import hf_hub_download

                return Path(hf_hub_download(str(self.path), "tokenizer.json", revision=self.revision))
            return Path(str(self.path)).expanduser().resolve(strict=True)
        except Exception as error:  # network, server and library errors have no common base class
            raise _unreadable(self, error) from error


def build(config: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """Trains or loads the tokenizer.

    Args:
        texts: the training part; only kinds "bpe" and "char" read it.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token.
        OSError: a tokenizer cannot be read, or the hub cannot be reached.
    """
    kinds = {"bpe": _byte_level, "byte": _byte_level, "char": _characters, "file": _existing, "hub": _existing}
    return for_documents(kinds[config.kind](config, texts))


def for_documents(tokenizer: Tokenizer) -> Tokenizer:
    """The same object, which now encodes all of a text as text."""
    tokenizer.encode_special_tokens = True
    return tokenizer


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


def load_tokenizer(content: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Raises:
        ValueError: it cannot be read; one line.
    """
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises no other class
        raise ValueError(f"the tokenizer cannot be read ({first_line(error)}); use another one") from error
    tokenizer.no_truncation()  # settings of a downloaded tokenizer; both would change the text
    tokenizer.no_padding()
    return tokenizer


def _byte_level(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`; of kind "byte" without merges. Exact for every text."""
    is_bpe = config.kind == "bpe"
    texts = first_bytes(texts, config.train_bytes) if is_bpe else iter(())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_bpe)
    tokenizer.decoder = decoders.ByteLevel()
    size = config.vocab_size if is_bpe else MIN_BPE_VOCAB_SIZE
    if size is None:
        size, texts = _auto_vocab_size(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[config.eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _auto_vocab_size(texts: Iterator[str]) -> tuple[int, Iterator[str]]:
    """256, and one token for each BYTES_PER_MERGE bytes of the texts, at most AUTO_VOCAB_SIZE; and the same texts."""
    first, size = [], 0
    for text in texts:
        first.append(text)
        size += len(text.encode())
        if size >= AUTO_VOCAB_SIZE * BYTES_PER_MERGE:
            break
    return max(MIN_BPE_VOCAB_SIZE, min(256 + size // BYTES_PER_MERGE, AUTO_VOCAB_SIZE)), chain(first, texts)


def _characters(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token per character of `texts`, in code point order: BPE without merges, which is fast."""
    tokens = [config.eot, UNKNOWN, *sorted(set(chain.from_iterable(texts)))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens without a separator
    tokenizer.add_special_tokens([AddedToken(config.eot, special=True, normalized=False)])
    return tokenizer


def _existing(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer.json of the settings, if it gives the first CHECKED_BYTES of `texts` back."""
    try:
        tokenizer = for_documents(load_tokenizer(config.json_file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    if tokenizer.token_to_id(config.eot) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        known = f"its special tokens are {' '.join(special) or 'none'}"
        raise ValueError(f"data.tokenizer.eot={config.eot} is not a token of {config.path}; {known}")
    for text in first_bytes(texts, CHECKED_BYTES):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != text and unknown_id(tokenizer) not in ids:
            start = len(os.path.commonprefix([text, decoded]))
            change = f"{text[start : start + SHOWN]!r} becomes {decoded[start : start + SHOWN]!r}"
            remedy = "use one that keeps it, such as byte-level BPE"
            raise ValueError(f"data.tokenizer.path={config.path} changes the text: {change}; {remedy}")
    return tokenizer


def _unreadable(config: TokenizerConfig, error: Exception) -> OSError:
    hub_remedy = "check path, revision and network, set HF_ENDPOINT to a mirror, or use kind=file"
    remedy = hub_remedy if config.kind == "hub" else "give a tokenizer.json"
    return OSError(f"cannot read a tokenizer from data.tokenizer.path={config.path} ({first_line(error)}); {remedy}")


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt.

    Raises:
        ValueError: it contains characters that the tokenizer does not know, or half a surrogate pair.
    """
    prompt.encode()  # of half a pair, the tokenizer would raise TypeError
    encoding, unknown = tokenizer.encode(prompt, add_special_tokens=False), unknown_id(tokenizer)
    spans = zip(encoding.ids, encoding.offsets, strict=True)
    if missing := sorted({prompt[start:end] for i, (start, end) in spans if i == unknown}):
        cause = f"the prompt has {', '.join(map(repr, missing))}, which the tokenizer does not know"
        raise ValueError(f"{cause}; use only characters of the training text")
    return encoding.ids


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text.encode())
        if limit <= 0:
            return
