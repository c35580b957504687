"""Documents -> a memory-mapped file of token ids, see `data.prepared`.

The name of a prepared folder contains a fingerprint of source, split, tokenizer and budgets, so a changed setting never
reads stale tokens; a damaged folder is prepared again.
"""

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import REMEDY, locked, resolve_cache_dir, write
from tril.data.encoding import OPENS, TARGET, Encoded, encoded_pieces, first_token_bytes
from tril.data.overlap import measure_overlap
from tril.data.prepared import FLAGS, TOKENIZER, TOKENS, PreparedText, read_meta, sha256_of, write_meta
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig, build, first_bytes, n_ids

FORMAT = 2  # incremented when the same settings produce other files
MAX_UINT16_VOCAB = 1 << 16
MAX_OVERLAP = 0.01  # of the validation tokens; above that, the loss is too low
SHOWN_OVERLAP = 0.00005  # less is 0.00 %
UNKNOWN_EXAMPLES = 10
EXAMPLE_CHARACTERS = 60  # of a passage that occurs in both parts
Content = TypeVar("Content")


@dataclass
class Counts:
    """The size of one part.

    Attributes:
        bytes: of a chat, those of the answers.
        first_bytes: of them, those of the first token, which is not predicted.
        unknown: tokens for characters that the tokenizer does not have.
    """

    documents: int = 0
    bytes: int = 0
    first_bytes: int = 0
    characters: int = 0
    tokens: int = 0
    unknown: int = 0


def prepare(
    source: Source,
    tokenizer_config: TokenizerConfig,
    cache_dir: str | Path | None = None,
    *,
    token_budget: int | None = None,
    val_token_budget: int | None = None,
    progress: bool = True,
) -> PreparedText:
    """Tokenizes `source` into a folder of the cache, or reuses the folder of an earlier call.

    Args:
        cache_dir: see `resolve_cache_dir`.
        token_budget: the training part ends with the first piece that reaches this number of tokens, so only a document
            longer than a piece is truncated. None: no limit.
        val_token_budget: the same for the validation part.

    Raises:
        ValueError: a part of the source is empty, or its text is invalid.
        OSError: text, tokenizer or cache folder cannot be read or written.
    """
    budgets: dict[Split, int | None] = {"train": token_budget, "val": val_token_budget}
    settings = {"format": FORMAT, "source": source.fingerprint()}
    settings |= {"tokenizer": tokenizer_config.fingerprint(), "budgets": budgets}
    fingerprint = sha256_of(settings)
    folder = resolve_cache_dir(cache_dir) / f"{source.name}-{fingerprint[:16]}"

    def fill(part: Path) -> None:
        texts = training_texts(source, tokenizer_config, token_budget, progress)
        tokenizer = build(tokenizer_config, texts)
        sizes, sha256 = _write_tokens(source, tokenizer, tokenizer_config.eot, budgets, part, progress)
        sha256 |= write_tokenizer(part, tokenizer)
        libraries = {"tokenizers": tokenizers.__version__}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        meta = {**settings, "fingerprint": fingerprint, **sizes, "libraries": libraries, "created": created}
        meta |= _measured_split(source, PreparedText(part, meta, tokenizer))
        write_meta(part, meta, sha256)

    prepared, is_new = write_once(folder, "prepares", fill, lambda folder: PreparedText.read(folder, fingerprint))
    if is_new and progress:
        print(describe_split(prepared), file=sys.stderr)
    return prepared


def prepare_tokenizer(
    sources: list[Source], config: TokenizerConfig, cache_dir: str | Path | None, token_budgets: list[int | None]
) -> TokenizerConfig:
    """The common tokenizer of several sources: trained on the text of each, it is a file of the cache.

    It does not depend on the weights of a mixture, so that runs with other weights have the same tokens.
    """
    if config.kind not in ("bpe", "char"):
        return config
    settings = {"format": FORMAT, "tokenizer": config.fingerprint(), "sources": [s.fingerprint() for s in sources]}
    if config.kind == "char":
        settings |= {"budgets": token_budgets}
    fingerprint = sha256_of(settings)
    folder = resolve_cache_dir(cache_dir) / f"tokenizer-{fingerprint[:16]}"

    def texts() -> Iterator[str]:
        for source, budget in zip(sources, token_budgets, strict=True):
            read = training_texts(source, config, budget, progress=True)
            yield from first_bytes(read, config.train_bytes // len(sources)) if config.kind == "bpe" else read

    def fill(part: Path) -> None:
        write_meta(part, {"fingerprint": fingerprint}, write_tokenizer(part, build(config, texts())))

    write_once(folder, "trains", fill, lambda folder: read_meta(folder, fingerprint))
    return TokenizerConfig(kind="file", path=str(folder / TOKENIZER), eot=config.eot)


def write_once(
    folder: Path, task: str, fill: Callable[[Path], None], read: Callable[[Path], Content]
) -> tuple[Content, bool]:
    """Fills a folder of the cache that does not exist or is damaged; of several processes, one does.

    Args:
        read: raises ValueError if the folder is damaged.

    Returns:
        What `read` returns, and whether this call filled the folder.
    """

    def create(part: Path) -> None:
        part.mkdir()
        fill(part)

    with contextlib.suppress(ValueError):
        return read(folder), False
    with locked(folder, task):
        try:
            return read(folder), False  # another process has written it
        except ValueError as error:
            if os.path.lexists(folder):
                logging.getLogger(__name__).warning("%s is damaged (%s); preparing it again", folder, error)
        write(folder, create)
        try:
            return read(folder), True
        except ValueError as error:
            raise OSError(f"{folder} was written and is damaged ({error}); check the disk, or {REMEDY}") from error


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Writes tokenizer.json, and returns its name and sha256."""
    content = tokenizer.to_str(pretty=True).encode()
    (folder / TOKENIZER).write_bytes(content)  # not tokenizer.save, which raises a bare Exception if the disk is full
    return {TOKENIZER: hashlib.sha256(content).hexdigest()}


def training_texts(source: Source, config: TokenizerConfig, budget: int | None, progress: bool) -> Iterator[str]:
    """The text to train a tokenizer on."""
    n_characters = 0
    with _progress_bar("reading text for the tokenizer", "B", None, progress) as bar:
        for piece in source.pieces("train"):
            bar.update(len(piece.text.encode()))
            yield piece.text
            n_characters += len(piece.text)
            if config.kind == "char" and budget is not None and n_characters >= budget:
                return  # a character is a token: later ones are not encoded


def describe_split(prepared: PreparedText) -> str:
    """One line about the validation part, and how much of it occurs in the training part."""
    split, overlap = prepared.meta["split"], prepared.meta["overlap"]
    line = f"validation is {split['val_share']:.1%} of the text ({split['rule']})"
    if overlap["share"] < SHOWN_OVERLAP:
        return line
    line += f"; {100 * overlap['share']:.2f} % of its tokens lie in passages that also occur in the training part"
    if overlap["share"] <= MAX_OVERLAP:
        return line
    ids = prepared.predicted("val")[overlap["example"] : overlap["example"] + overlap["passage_tokens"]]
    example = " ".join(prepared.tokenizer.decode(ids.tolist()).split())[:EXAMPLE_CHARACTERS]
    remedy = "so the loss on them is too low; remove repeated text, or give separate text with data.val_path"
    return f"{line}, such as {example!r}, {remedy}"


def _measured_split(source: Source, text: PreparedText) -> dict[str, Any]:
    """The entries "split" and "overlap" (see `measure_overlap`) of meta.json."""
    sizes = {split: counts["bytes"] for split, counts in text.meta["counts"].items()}
    train, val = (text.predicted(split) for split in ("train", "val"))
    overlap = measure_overlap(train, val, text.meta["vocab_size"], sizes["val"] / len(val))
    val_share = sizes["val"] / (sizes["train"] + sizes["val"])
    return {"split": {"rule": source.split_rule, "val_share": val_share}, "overlap": overlap}


def _write_tokens(
    source: Source, tokenizer: Tokenizer, eot: str, budgets: dict[Split, int | None], folder: Path, progress: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes both parts and returns their entries of meta.json, and the sha256 of each file that it wrote."""
    vocab_size, eot_id = n_ids(tokenizer), tokenizer.token_to_id(eot)
    dtype = np.dtype(np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32)
    is_chat = getattr(source, "is_chat", False)
    counts, targets = {}, {}
    with contextlib.ExitStack() as stack:
        names = (TOKENS, FLAGS) if is_chat else (TOKENS,)
        files = {name: (stack.enter_context(open(folder / name, "wb")), hashlib.sha256()) for name in names}

        def write(name: str, content: bytes) -> None:
            file, sha256 = files[name]
            file.write(content)
            sha256.update(content)

        for split, budget in budgets.items():
            unit = "token" if budget else "B"
            with _progress_bar(f"encoding the {split} part", unit, budget, progress) as bar:
                encoded = encoded_pieces(source.pieces(split), tokenizer, eot, dtype)
                part, targets[split] = _write_part(encoded, tokenizer, write, budget, bar)
            if part.tokens == 0:
                remedy = "give more text, or change data.val_fraction, data.val_path or data.val_split"
                raise ValueError(f"data: the {split} part of {source.name} is empty; {remedy}")
            if is_chat and part.bytes == 0:
                remedy = "choose another data.chat_template"
                raise ValueError(f"data: the {split} part of {source.name} has no answer to train on; {remedy}")
            counts[split] = asdict(part)
    entries = {"dtype": dtype.name, "vocab_size": vocab_size, "eot_id": eot_id, "counts": counts}
    entries |= {"targets": targets} if is_chat else {}
    return entries, {name: sha256.hexdigest() for name, (_, sha256) in files.items()}


def _write_part(
    encoded: Iterable[Encoded], tokenizer: Tokenizer, write: Callable[[str, bytes], None], budget: int | None, bar: tqdm
) -> tuple[Counts, int]:
    """Writes ids and flags of the pieces until these end or `budget` tokens are reached.

    Returns:
        The counts, and of a chat the number of targets.
    """
    unknown_token = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(unknown_token) if unknown_token else None
    counts, targets, unknown_characters, starts_document = Counts(), 0, set(), True
    for piece, ids, n_bytes, flags in encoded:
        write(TOKENS, ids.tobytes())
        if flags is not None:
            flags[: counts.tokens == 0] &= OPENS  # the first token of a part is not predicted
            write(FLAGS, flags.tobytes())
            targets += int((flags & TARGET > 0).sum())
        elif counts.tokens == 0:
            counts.first_bytes = first_token_bytes(tokenizer, piece.text)
        if unknown_id is not None and (ids == unknown_id).any():
            counts.unknown += int((ids == unknown_id).sum())
            unknown_characters |= {char for char in set(piece.text) if tokenizer.token_to_id(char) is None}
        counts.documents += starts_document
        counts.bytes += n_bytes
        counts.characters += len(piece.text)
        counts.tokens += len(ids)
        starts_document = piece.ends_document
        bar.update(len(ids) if budget else n_bytes)
        if budget is not None and counts.tokens >= budget:
            break
    if counts.unknown:
        examples = " ".join(map(repr, sorted(unknown_characters)[:UNKNOWN_EXAMPLES]))
        message = "%d of %d tokens are unknown to the tokenizer, such as %s"
        logging.getLogger(__name__).warning(message, counts.unknown, counts.tokens, examples)
    return counts, targets


def _progress_bar(title: str, unit: str, total: int | None, shown: bool) -> tqdm:
    """In a terminal only."""
    return tqdm(desc=title, unit=unit, unit_scale=True, total=total, delay=0.1, disable=None if shown else True)
