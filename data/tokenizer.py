"""Text <-> token ids: trains or loads a `tokenizers.Tokenizer`.

The end-of-text token separates documents and is put there by hand. Text that merely spells it is ordinary text: every tokenizer
made here has `encode_special_tokens` set, so that encoding never turns what a document says into a control token. That flag is
not part of the saved json, so tokenizers are read back with `load`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

KINDS = ("bpe", "char", "byte", "file", "hub")
UNKNOWN = "<|unknown|>"  # of kind "char" only
SMALLEST_BPE = 256 + 1  # every byte, and end-of-text


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer.

    kind: "bpe" byte-level BPE trained on the training part; "char" one token for each character of the training part; "byte" the
        256 bytes; "file" an existing tokenizer.json; "hub" one of the Hugging Face hub.
    vocab_size: of "bpe", with end-of-text; a small text may give fewer. The other kinds have the size they have.
    path: the file of "file", or the name of "hub" such as openai-community/gpt2.
    train_bytes: BPE is trained on this much of the text's beginning at most, so that memory stays flat.
    eot: the end-of-text token.
    """

    kind: str = "bpe"
    vocab_size: int | None = 4096
    path: str | None = None
    train_bytes: int = 50_000_000
    eot: str = "<|endoftext|>"

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(f"data.tokenizer.{problem}" for problem in problems))

    def _problems(self) -> Iterator[str]:
        if self.kind not in KINDS:
            yield f"kind={self.kind}: must be one of {', '.join(KINDS)}"
        if self.kind == "bpe" and not (_is_int(self.vocab_size) and self.vocab_size >= SMALLEST_BPE):
            yield f"vocab_size={self.vocab_size}: kind=bpe needs an integer, at least {SMALLEST_BPE} (256 bytes and end-of-text)"
        if self.kind in ("file", "hub") and not (isinstance(self.path, str) and self.path):
            wanted = "a tokenizer.json" if self.kind == "file" else "a name such as openai-community/gpt2"
            yield f"path={self.path}: kind={self.kind} needs {wanted}"
        elif self.kind == "file" and not Path(self.path).expanduser().is_file():
            yield f"path={self.path}: no such file; give a tokenizer.json"
        elif self.kind in ("bpe", "char", "byte") and self.path is not None:
            yield f"path={self.path}: has no meaning with kind={self.kind}; set it to null, or use kind=file or kind=hub"
        if not (_is_int(self.train_bytes) and self.train_bytes > 0):
            yield f"train_bytes={self.train_bytes}: must be a positive integer"
        if not (isinstance(self.eot, str) and len(self.eot) > 1):
            yield f"eot={self.eot!r}: must be a text of at least two characters, such as <|endoftext|>"

    def identity(self) -> dict[str, Any]:
        """Plain json of what decides the tokenizer, given the text; a file counts with its content, wherever it lies."""
        fields: dict[str, Any] = {"kind": self.kind, "eot": self.eot}
        if self.kind == "bpe":
            fields |= {"vocab_size": self.vocab_size, "train_bytes": self.train_bytes}
        elif self.kind == "file":
            fields |= {"sha256": hashlib.sha256(Path(self.path).expanduser().read_bytes()).hexdigest()}
        elif self.kind == "hub":
            fields |= {"path": self.path}
        return fields


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def build(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Trains or loads the tokenizer; `texts`, the training part, is read by kinds "bpe" and "char" only.

    Raises:
        ValueError: a loaded tokenizer has no end-of-text token.
        OSError: a tokenizer cannot be read, or the hub not be reached.
    """
    if config.kind == "bpe":
        return _ready(_byte_level(config, _first_bytes(texts, config.train_bytes)))
    if config.kind == "byte":
        return _ready(_byte_level(config, ()))
    if config.kind == "char":
        return _ready(_characters(config, texts))
    return _ready(_existing(config))


def load(json: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_str` gave, ready to encode documents."""
    return _ready(Tokenizer.from_str(json))


def n_ids(tokenizer: Tokenizer) -> int:
    """How many ids an embedding needs: more than there are tokens where a foreign tokenizer leaves gaps between them."""
    return max(tokenizer.get_vocab().values()) + 1


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # a downloaded tokenizer may come with either, and both would change the text
    tokenizer.no_padding()
    return tokenizer


def _byte_level(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) over `texts`; without texts no merges, i.e. bytes. Exact for every text."""
    tokenizer = Tokenizer(models.BPE())
    # Without merges there is nothing that words could protect from being merged
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=config.kind == "bpe")
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size if config.kind == "bpe" else SMALLEST_BPE,
        special_tokens=[config.eot],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _characters(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """One token for each character of `texts`, in code point order: BPE without merges does just that, and is fast."""
    characters: set[str] = set()
    for text in texts:
        characters |= set(text)
    tokens = [config.eot, UNKNOWN, *sorted(characters)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()  # joins tokens with nothing between
    tokenizer.add_special_tokens([AddedToken(config.eot, special=True, normalized=False)])
    return tokenizer


def _existing(config: TokenizerConfig) -> Tokenizer:
    try:
        if config.kind == "file":
            tokenizer = Tokenizer.from_file(str(Path(config.path).expanduser()))
        else:
            tokenizer = Tokenizer.from_pretrained(config.path)
    except Exception as error:  # the library raises bare Exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = (
            "give a tokenizer.json"
            if config.kind == "file"
            else "check name and network, set HF_ENDPOINT, or use kind=file"
        )
        raise OSError(f"data.tokenizer.path={config.path}: cannot read a tokenizer ({reason}); {remedy}") from error
    if tokenizer.token_to_id(config.eot) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        raise ValueError(
            f"data.tokenizer.eot={config.eot}: {config.path} has no such token; its special tokens are {' '.join(special) or 'none'}"
        )
    return tokenizer


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text.encode())
        if limit <= 0:
            return
