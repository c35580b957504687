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

from tril.data.settings import setting, strict_settings

UNKNOWN = "<|unknown|>"  # of kind "char" only
MIN_BPE_VOCAB_SIZE = 256 + 1  # every byte, and end-of-text
AUTO_VOCAB_SIZE, BYTES_PER_MERGE = 4096, 512  # without a chosen size
COMMIT = re.compile("[0-9a-f]{40}")
MAX_IDS = 1 << 21  # XLM-V has 901,629
MAX_BYTES = 1 << 27  # of a tokenizer.json; the largest published ones have about 35 MB
MAX_GROWTH = 64  # characters that a normalizer or a decoder may make of one
PROBE = "The caf\u00e9 \u6f22\U0001f469\n\x00 1"
TEXT_BYTES = set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # of UTF-8


@dataclass(frozen=True, config=strict_settings("data.tokenizer"))
class TokenizerConfig:
    """Which tokenizer: "bpe" trains byte-level BPE on the training part, "char" has one token per character of it,
    "byte" has the 256 bytes, "file" loads a tokenizer.json, "hub" loads one from the Hugging Face hub.
    """

    kind: Literal["bpe", "char", "byte", "file", "hub"] = setting("bpe", "bpe | char | byte | file | hub")
    vocab_size: Annotated[int, Field(ge=MIN_BPE_VOCAB_SIZE, le=MAX_IDS)] | None = setting(
        None, "of kind=bpe: tokens; null: 256, and one for each 512 bytes of the training text, at most 4096"
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
        kind, path, key = self.kind, self.path, f"data.tokenizer.path={self.path}"
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
        path = Path(str(self.path)).expanduser() if self.kind == "file" else self._downloaded()
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _unreadable(self, ValueError(f"it has {size} bytes, more than {MAX_BYTES}"))
        return path

    def _downloaded(self) -> Path:
        from huggingface_hub import hf_hub_download

        try:  # without network, the download of an earlier start is used
            return Path(hf_hub_download(str(self.path), "tokenizer.json", revision=self.revision))
        except Exception as error:  # network, server and library errors have no common base class
            raise _unreadable(self, error) from error


def build(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Trains or loads the tokenizer.

    Args:
        texts: the training part; only kinds "bpe" and "char" read it.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token, or would lose text.
        OSError: a tokenizer cannot be read, or the hub cannot be reached.
    """
    if config.kind in ("bpe", "byte"):
        return for_documents(_byte_level(config, texts))
    return for_documents(_characters(config, texts) if config.kind == "char" else _existing(config))


def for_documents(tokenizer: Tokenizer) -> Tokenizer:
    """The same object, which now encodes all of a text as text."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # settings of a downloaded tokenizer; both would change the text
    tokenizer.no_padding()
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
        ValueError: it cannot be read, or its ids would not represent a text; the message is the end of a sentence
            about it.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has {len(content)} characters, more than {MAX_BYTES}")
    try:
        problem = _defect(json.loads(content), vocab_size)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("it has no model with a vocabulary, or no added_tokens") from error
    if problem:
        raise ValueError(problem)
    tokenizer = guarded(Tokenizer.from_str, content)
    try:
        guarded(lambda: tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False).ids))
    except ValueError as error:
        raise ValueError(f"it cannot encode {PROBE!r} ({error}); choose another one") from error
    return tokenizer


def _defect(state: dict[str, Any], vocab_size: int) -> str | None:
    """Why a tokenizer.json is not used, and the remedy."""
    model, vocab = state["model"], state["model"]["vocab"]
    if not isinstance(vocab, dict):  # of a unigram model: tokens and scores
        vocab = {entry[0]: i for i, entry in enumerate(vocab)}
    ids = [*vocab.values(), *(token["id"] for token in state["added_tokens"])]
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < MAX_IDS]:
        return f"the id {wrong[0]!r} must be an integer from 0 to {MAX_IDS - 1}"
    if not ids or len(set(vocab.values())) < len(vocab):
        return "several tokens of its vocabulary have the same id" if ids else "it has no tokens"
    if max(ids) >= vocab_size:
        return f"its {max(ids) + 1} tokens exceed the model's vocab_size={vocab_size}; use that of the model's run"
    if model.get("dropout"):
        return f"model.dropout={model['dropout']:g} makes its ids random; set it to null in the file"
    if max(_growth(state.get("normalizer")), _growth(state.get("decoder"))) > MAX_GROWTH:
        return f"its normalizer or decoder makes more than {MAX_GROWTH} characters of one; choose another one"
    # The library removes the prefix from the second part of a merge without looking at it, which can abort.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    if (prefix := model.get("continuing_subword_prefix")) and not all(
        second.startswith(prefix) for _, second in merges
    ):
        return f"it has merges without the continuing_subword_prefix={prefix!r}"
    if not _knows_all(state, vocab):
        return "it has no unknown token, so characters that it lacks would vanish; set model.unk_token in the file"
    return None


def _growth(step: dict[str, Any] | None) -> int:
    """The most characters that a normalizer or a decoder replaces one by."""
    if step is None:
        return 1
    inner = step.get("normalizers") or step.get("decoders") or ()
    return max(1, len(step.get("content") or step.get("prepend") or "")) * math.prod(map(_growth, inner))


def _knows_all(state: dict[str, Any], vocab: dict[str, int]) -> bool:
    """Whether each character gets an id: that of the unknown token, or those of its bytes."""
    model = state["model"]
    if model.get("unk_id") is not None or model.get("unk_token") in vocab:
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in TEXT_BYTES):
        return True
    # ByteLevel writes the bytes that no text has as the characters of the same number
    characters = [char for char in pre_tokenizers.ByteLevel.alphabet() if ord(char) > 255 or ord(char) in TEXT_BYTES]
    return is_byte_level(state) and model.get("unk_token") is None and all(char in vocab for char in characters)


def is_byte_level(state: dict[str, Any]) -> bool:
    """Whether each character of a token stands for a byte."""
    steps = [state.get("normalizer"), state.get("pre_tokenizer")]
    for step in filter(None, steps):
        steps += step.get("normalizers") or step.get("pretokenizers") or ()
    return any(step is not None and step["type"] == "ByteLevel" for step in steps)


def guarded(task: Any, *arguments: Any) -> Any:
    """The result of a call of the library, whose errors become a ValueError of one line."""
    try:
        return task(*arguments)
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError((str(error).strip() or type(error).__name__).splitlines()[0]) from error


def _byte_level(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`; of kind "byte" without merges. Exact for every text."""
    is_bpe = config.kind == "bpe"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_bpe)
    tokenizer.decoder = decoders.ByteLevel()
    size, texts = config.vocab_size or MIN_BPE_VOCAB_SIZE, iter(texts if is_bpe else ())
    if is_bpe and config.vocab_size is None:
        size, texts = _auto_vocab_size(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=size if is_bpe else MIN_BPE_VOCAB_SIZE,
        special_tokens=[config.eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_bytes(texts, config.train_bytes), trainer)
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
