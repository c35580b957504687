"""Text <-> token ids: trains or loads a `tokenizers.Tokenizer`.

The end-of-text token separates documents. It is inserted as an id and never comes from text: `build` sets
`encode_special_tokens`, so that a document that contains "<|endoftext|>" does not become two. The flag is not part of
the saved JSON; `for_documents` sets it again.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tril.data.settings import first_line, setting, strict_settings

UNKNOWN = "<|unknown|>"  # of kind "char" only
MIN_BPE_VOCAB_SIZE = 256 + 1  # every byte, and end-of-text
AUTO_VOCAB_SIZE, BYTES_PER_MERGE = 4096, 512  # without a chosen size
COMMIT = re.compile("[0-9a-f]{40}")
MAX_IDS = 1 << 21  # XLM-V has 901,629
MAX_GROWTH = 64  # characters that a normalizer or a decoder may make of one
# Together they have nearly every byte of UTF-8: a tokenizer that loses none of them loses no other letter.
CODES = (*range(0x30, 0x7B), *range(0xC0, 0x100), *range(0x100, 0x800, 0x40), *range(0x800, 0x21000, 0x400))
LETTERS = [char for char in map(chr, CODES) if char.isalnum()]


@dataclass(frozen=True, config=strict_settings("data.tokenizer"))
class TokenizerConfig:
    """Which tokenizer: "bpe" trains byte-level BPE on the training part, "char" has one token per character of it,
    "byte" has the 256 bytes, "file" loads a tokenizer.json, "hub" loads one from the Hugging Face hub.
    """

    kind: Literal["bpe", "char", "byte", "file", "hub"] = setting("bpe", "bpe | char | byte | file | hub", common=True)
    vocab_size: Annotated[int, Field(ge=MIN_BPE_VOCAB_SIZE, le=MAX_IDS)] | None = setting(
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
            need = "a tokenizer.json" if self.kind == "file" else "a repository, such as openai-community/gpt2"
            raise ValueError(f"data.tokenizer.path is missing; kind={self.kind} needs {need}")
        if self.kind == "file" and not Path(str(self.path)).expanduser().is_file():
            raise ValueError(f"data.tokenizer.path={self.path} does not exist; give a tokenizer.json")
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
            values |= {"sha256": hashlib.sha256(self.json_file.read_bytes()).hexdigest()}
        elif self.kind == "hub":
            is_commit = COMMIT.fullmatch(self.revision)
            values |= {"path": self.path, "revision": self.revision if is_commit else self.json_file.parent.name}
        return values

    @cached_property
    def json_file(self) -> Path:
        """The tokenizer.json of kinds "file" and "hub"; a file of the hub lies in a folder named after its commit.

        Raises:
            OSError: the hub cannot be reached, or has no such file.
        """
        if self.kind == "file":
            return Path(str(self.path)).expanduser()
        from huggingface_hub import hf_hub_download

        try:  # without network, the download of an earlier start is used
            return Path(hf_hub_download(str(self.path), "tokenizer.json", revision=self.revision))
        except Exception as error:  # network, server and library errors have no common base class
            raise _unreadable(self, error) from error


def build(config: TokenizerConfig, texts: Iterable[str] = ()) -> Tokenizer:
    """Trains or loads the tokenizer.

    Args:
        texts: the training part; only kinds "bpe" and "char" read it.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token, or would lose text.
        OSError: a tokenizer cannot be read, or the hub cannot be reached.
    """
    if config.kind in ("file", "hub"):
        return for_documents(_existing(config))
    if config.kind == "char":
        return for_documents(_characters(config, texts))
    return for_documents(_byte_level(config, first_bytes(texts, config.train_bytes) if config.kind == "bpe" else ()))


def for_documents(tokenizer: Tokenizer) -> Tokenizer:
    """The same object, which now encodes all of a text as text."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def n_ids(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: more than there are tokens if the ids of a foreign tokenizer have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def load_tokenizer(content: str, vocab_size: int = MAX_IDS) -> Tokenizer:
    """The tokenizer of a tokenizer.json, checked before and after the `tokenizers` library reads it.

    The library allocates memory up to the largest id, raises bare Exceptions, lets its panics through, and drops
    characters that it cannot encode.

    Args:
        vocab_size: rows of the embedding: ids must be smaller.

    Raises:
        ValueError: it cannot be read, or its ids would not represent a text; one line.
    """
    try:
        _check(json.loads(content), vocab_size)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the tokenizer cannot be read ({reason}); it needs a model with a vocabulary") from error
    tokenizer = guarded("cannot be read", Tokenizer.from_str, content)
    tokenizer.no_truncation()  # settings of a downloaded tokenizer; both would change the text
    tokenizer.no_padding()
    encodings = guarded("cannot encode a letter", tokenizer.encode_batch, LETTERS, add_special_tokens=False)
    decoded = guarded("cannot decode a letter", tokenizer.decode_batch, [encoding.ids for encoding in encodings])
    for letter, encoding, text in zip(LETTERS, encodings, decoded, strict=True):
        if not encoding.ids or "\ufffd" in text:  # or the token of one of its bytes is missing
            raise ValueError(f"the tokenizer has no token for {letter!r}, which would vanish; set its model.unk_token")
    return tokenizer


def _check(state: dict[str, Any], vocab_size: int) -> None:
    """Raises ValueError for a tokenizer.json that is not used; fails on other types than the library writes."""
    model, vocab = state["model"], state["model"]["vocab"]
    if not isinstance(vocab, dict):  # of a unigram model: tokens and scores
        vocab = {entry[0]: i for i, entry in enumerate(vocab)}
    ids = [*vocab.values(), *(token["id"] for token in state.get("added_tokens") or ())]
    if wrong := [i for i in ids if type(i) is not int or i < 0]:
        raise ValueError(f"the tokenizer has the id {wrong[0]!r}, which must be an integer from 0 on; use another one")
    if max(ids, default=0) >= vocab_size:
        limit = f"the model's vocab_size={vocab_size}"
        raise ValueError(f"the tokenizer's {max(ids) + 1} tokens exceed {limit}; use the tokenizer of the model's run")
    if model.get("dropout"):
        raise ValueError(f"the tokenizer has model.dropout={model['dropout']:g}, so its ids are random; set it to null")
    if max(_growth(state.get("normalizer")), _growth(state.get("decoder"))) > MAX_GROWTH:
        raise ValueError(f"the tokenizer makes more than {MAX_GROWTH} characters of one; use another one")


def _growth(step: dict[str, Any] | None) -> int:
    """The most characters that a normalizer or a decoder replaces one by."""
    if step is None:
        return 1
    inner = step.get("normalizers") or step.get("decoders") or ()
    return max(1, len(step.get("content") or step.get("prepend") or "")) * math.prod(map(_growth, inner))


def guarded(problem: str, task: Any, *arguments: Any, **options: Any) -> Any:
    """The result of a call of the library, whose errors become a ValueError of one line that names the problem."""
    try:
        return task(*arguments, **options)
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer {problem} ({first_line(error)}); use another one") from error


def _byte_level(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`; of kind "byte" without merges. Exact for every text."""
    is_bpe, texts = config.kind == "bpe", iter(texts)
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


def _existing(config: TokenizerConfig) -> Tokenizer:
    try:
        tokenizer = load_tokenizer(config.json_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    if tokenizer.token_to_id(config.eot) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        raise ValueError(
            f"data.tokenizer.eot={config.eot} is not a token of {config.path}; "
            f"its special tokens are {' '.join(special) or 'none'}"
        )
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
    encoding = tokenizer.encode(prompt, add_special_tokens=False)
    unk = getattr(tokenizer.model, "unk_token", None)
    spans = zip(encoding.tokens, encoding.offsets, strict=True)
    if unknown := {prompt[start:end] for token, (start, end) in spans if token == unk}:
        cause = f"the prompt has {', '.join(map(repr, sorted(unknown)))}, which the tokenizer does not know"
        raise ValueError(f"{cause}; use only characters of the training text")
    return encoding.ids


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text.encode())
        if limit <= 0:
            return
