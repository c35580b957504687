"""Documents -> a memory-mapped file of token ids.

A prepared folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json. Its name
contains a fingerprint of source, split, tokenizer and budgets, so a changed setting never reads stale tokens; a damaged
folder is prepared again. How much of the validation part also occurs in the training part is measured and stored.
"""

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import REMEDY, explained_errors, make_folder, remove_leftovers, resolve_cache_dir, write_folder
from tril.data.cache_locks import locked
from tril.data.encoding import encoded_pieces
from tril.data.integrity import TOKENIZER, TOKENS, open_verified, write_meta
from tril.data.overlap import MAX_SHARE, Overlap, measure_overlap, passage_length
from tril.data.sources.base import Piece, Source, Split
from tril.data.tokenizer import TokenizerConfig, build, n_ids

FORMAT = 1  # incremented when the same settings produce other files
MAX_UINT16_VOCAB = 1 << 16
LOG_INTERVAL = 60  # seconds between lines of the progress bar if stderr is not a terminal
UNKNOWN_EXAMPLES = 10
DECODED_TOKENS = 1 << 16  # tokens decoded at a time
EXAMPLE_CHARACTERS = 60  # of a passage that occurs in both parts


@dataclass
class Counts:
    """The size of one part; `unknown` counts the tokens for characters that the tokenizer does not have."""

    documents: int = 0
    bytes: int = 0
    characters: int = 0
    tokens: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class PreparedText:
    """A prepared text: its folder, the content of meta.json, and its tokenizer."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def texts(self) -> dict[str, "PreparedText"]:
        """This text alone, as `PreparedMixture.texts` has several."""
        return {"": self}

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, (number of tokens,), memory-mapped and read-only, in the dtype of the file."""
        both = np.memmap(self.folder / TOKENS, dtype=self.meta["dtype"], mode="r")
        middle = self.meta["counts"]["train"]["tokens"]
        return both[:middle] if split == "train" else both[middle:]


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
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = resolve_cache_dir(cache_dir) / f"{source.name}-{fingerprint[:16]}"

    def fill(part: Path) -> None:
        tokenizer = build(tokenizer_config, training_texts(source, tokenizer_config, token_budget, progress))
        # not tokenizer.save, which raises a bare Exception if the disk is full
        (part / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        sizes, sha256 = _write_tokens(source, tokenizer, tokenizer_config.eot, budgets, part / TOKENS, progress)
        libraries = {"tokenizers": tokenizers.__version__}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        meta = {**settings, "fingerprint": fingerprint, **sizes, "libraries": libraries, "created": created}
        write_meta(part, meta | _measured_split(source, part, meta), sha256)

    prepared = _prepare_once(folder, fingerprint, fill, progress)
    _warn_of_overlap(prepared)
    return prepared


def _prepare_once(folder: Path, fingerprint: str, fill: Callable[[Path], None], progress: bool) -> PreparedText:
    """The text of `folder`, which `fill` writes if it does not exist or is damaged; of several processes, one does."""
    remove_leftovers(folder.parent)
    prepared, _ = _opened(folder, fingerprint)
    if prepared is not None:
        return prepared
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
    make_folder(folder.parent)
    with explained_errors(folder), locked(folder, f"which prepares {folder}"):
        prepared, damage = _opened(folder, fingerprint)  # another process may have written it
        if prepared is not None:
            return prepared
        if damage:
            logging.getLogger(__name__).warning("%s is damaged (%s); preparing it again", folder, damage)
        write_folder(folder, fill, lambda folder: _opened(folder, fingerprint)[0] is not None)
        prepared, damage = _opened(folder, fingerprint)
    if prepared is None:
        raise OSError(f"{folder} was written and is damaged ({damage}); check the disk, or {REMEDY}")
    if progress:
        split, overlap = prepared.meta["split"], Overlap(**prepared.meta["overlap"])
        print(f"validation is {split['val_share']:.1%} of the text ({split['rule']}); {overlap}", file=sys.stderr)
    return prepared


def _opened(folder: Path, fingerprint: str) -> tuple[PreparedText | None, str]:
    """The verified text of `folder`; None if it does not exist, or is damaged, with what is wrong."""
    if not os.path.lexists(folder):
        return None, ""
    try:
        return PreparedText(folder, *open_verified(folder, fingerprint)), ""
    except ValueError as error:
        return None, str(error)


def val_bytes(prepared: PreparedText, n_targets: int) -> int:
    """UTF-8 bytes of the first `n_targets` predicted tokens of the validation part.

    They are those of the text where a part is read, as with trainer.limit_val_batches: bytes per token differ between
    documents. Of a part the bytes of the decoded tokens are counted, without end-of-text.
    """
    counts = prepared.meta["counts"]["val"]
    if n_targets >= counts["tokens"] - 1:
        return counts["bytes"]
    tokens, size = prepared.tokens("val"), 0
    for start in range(1, n_targets + 1, DECODED_TOKENS):  # the first token is not predicted
        ids = tokens[start : min(start + DECODED_TOKENS, n_targets + 1)]
        ids = ids[ids != prepared.meta["eot_id"]]
        size += len(prepared.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
    return max(size, 1)


def val_bytes_per_token(meta: dict[str, Any]) -> float:
    """UTF-8 bytes of the validation part per predicted token, which converts nats per token into bits per byte."""
    counts = meta["counts"]["val"]
    n_texts = len(meta.get("sources", ())) or 1  # of a mixture
    return counts["bytes"] / (counts["tokens"] - n_texts)  # the first token of a text is not predicted


def _measured_split(source: Source, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The entries "split" and "overlap" (the fields of `data.overlap.Overlap`) of meta.json.

    Raises:
        ValueError: the overlap is larger than the source allows.
    """
    train, val = meta["counts"]["train"], meta["counts"]["val"]
    tokens = np.memmap(folder / TOKENS, dtype=meta["dtype"], mode="r")
    length = passage_length(val["bytes"] / val["tokens"])
    overlap = measure_overlap(tokens[: train["tokens"]], tokens[train["tokens"] :], meta["vocab_size"], length)
    if source.max_overlap is not None and overlap.share > source.max_overlap:
        limit = f"at most {source.max_overlap:.0%} is accepted; choose a smaller data.val_fraction"
        raise ValueError(f"data={source.name}: {overlap}; {limit}")
    val_share = val["bytes"] / (train["bytes"] + val["bytes"])
    return {"split": {"rule": source.split_rule, "val_share": val_share}, "overlap": asdict(overlap)}


def _warn_of_overlap(prepared: PreparedText) -> None:
    overlap = Overlap(**prepared.meta["overlap"])
    if overlap.share > MAX_SHARE and overlap.example is not None:
        ids = prepared.tokens("val")[overlap.example : overlap.example + overlap.passage_tokens]
        remedy = "the loss on them is too low. Remove repeated text, or give separate text with data.val_path"
        example = " ".join(prepared.tokenizer.decode(ids.tolist()).split())[:EXAMPLE_CHARACTERS]
        logging.getLogger(__name__).warning("%s, so %s; for example %r", overlap, remedy, example)


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


def _write_tokens(
    source: Source, tokenizer: Tokenizer, eot: str, budgets: dict[Split, int | None], path: Path, progress: bool
) -> tuple[dict[str, Any], str]:
    """Writes both parts to `path` and returns their entries of meta.json, and the sha256 of what it wrote."""
    vocab_size, eot_id = n_ids(tokenizer), tokenizer.token_to_id(eot)
    dtype = np.dtype(np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32)
    counts, sha256 = {}, hashlib.sha256()
    with open(path, "wb") as file:

        def write(content: bytes) -> None:
            file.write(content)
            sha256.update(content)

        for split, budget in budgets.items():
            unit = "token" if budget else "B"
            with _progress_bar(f"encoding the {split} part", unit, budget, progress) as bar:
                encoded = encoded_pieces(source.pieces(split), tokenizer, np.array([eot_id], dtype))
                part = _write_part(encoded, tokenizer, write, budget, bar)
            if part.tokens == 0:
                remedy = "give more text, or change data.val_fraction, data.val_path or data.val_split"
                raise ValueError(f"data: the {split} part of {source.name} is empty; {remedy}")
            counts[split] = asdict(part)
    entries = {"dtype": dtype.name, "vocab_size": vocab_size, "eot_id": eot_id, "counts": counts}
    return entries, sha256.hexdigest()


def _write_part(
    encoded: Iterable[tuple[Piece, np.ndarray]],
    tokenizer: Tokenizer,
    write: Callable[[bytes], None],
    budget: int | None,
    bar: tqdm,
) -> Counts:
    """Writes the ids of the pieces until these end or `budget` tokens are reached."""
    unknown_token = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(unknown_token) if unknown_token else None
    counts, unknown_characters, starts_document = Counts(), set(), True
    for piece, ids in encoded:
        write(ids.tobytes())
        if unknown_id is not None and (ids == unknown_id).any():
            counts.unknown += int((ids == unknown_id).sum())
            unknown_characters |= {char for char in set(piece.text) if tokenizer.token_to_id(char) is None}
        n_bytes = len(piece.text.encode())
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
    return counts


def _progress_bar(title: str, unit: str, total: int | None, shown: bool) -> tqdm:
    interval = 0.1 if sys.stderr.isatty() else LOG_INTERVAL
    return tqdm(
        desc=title, unit=unit, unit_scale=True, total=total, disable=not shown, mininterval=interval, delay=interval
    )
