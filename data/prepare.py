"""Documents -> a memory-mapped file of token ids.

A prepared folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json, and of a
chat flags.bin, which tells the tokens that are trained on. Its name contains a fingerprint of source, split, tokenizer
and budgets, so a changed setting never reads stale tokens; a damaged folder is prepared again. How much of the
validation part also occurs in the training part is measured and stored.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import REMEDY, preparing, remove_leftovers, resolve_cache_dir, write_folder
from tril.data.encoding import OPENS, TARGET, Encoded, encoded_pieces
from tril.data.integrity import FLAGS, TOKENIZER, TOKENS, open_verified, write_meta
from tril.data.overlap import MAX_SHARE, Overlap, measure_overlap, passage_length
from tril.data.prepared import PreparedText
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig, build, n_ids

FORMAT = 1  # incremented when the same settings produce other files
MAX_UINT16_VOCAB = 1 << 16
LOG_INTERVAL = 10  # seconds between lines of the progress bar if stderr is not a terminal
UNKNOWN_EXAMPLES = 10
EXAMPLE_CHARACTERS = 60  # of a passage that occurs in both parts


@dataclass
class Counts:
    """The size of one part; `unknown` counts the tokens for characters that the tokenizer does not have.

    Of a chat, `bytes` are those of the answers.
    """

    documents: int = 0
    bytes: int = 0
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
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = resolve_cache_dir(cache_dir) / f"{source.name}-{fingerprint[:16]}"

    def fill(part: Path) -> None:
        texts = training_texts(source, tokenizer_config, token_budget, progress)
        tokenizer = train_tokenizer(tokenizer_config, texts, progress)
        # not tokenizer.save, which raises a bare Exception if the disk is full
        (part / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        sizes, sha256 = _write_tokens(source, tokenizer, tokenizer_config.eot, budgets, part, progress)
        libraries = {"tokenizers": tokenizers.__version__}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        meta = {**settings, "fingerprint": fingerprint, **sizes, "libraries": libraries, "created": created}
        write_meta(part, meta | _measured_split(source, PreparedText(part, meta, tokenizer)), sha256)

    prepared = _prepare_once(folder, fingerprint, fill, progress)
    _warn_of_overlap(prepared)
    return prepared


def _prepare_once(folder: Path, fingerprint: str, fill: Callable[[Path], None], progress: bool) -> PreparedText:
    """The text of `folder`, which `fill` writes if it does not exist or is damaged; of several processes, one does."""
    remove_leftovers(folder.parent)
    prepared, _ = _opened(folder, fingerprint)
    if prepared is not None:
        return prepared
    with preparing(folder, "prepares"):
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


def _measured_split(source: Source, text: PreparedText) -> dict[str, Any]:
    """The entries "split" and "overlap" (the fields of `data.overlap.Overlap`) of meta.json.

    Raises:
        ValueError: the overlap is larger than the source allows.
    """
    meta, val = text.meta, text.predicted("val")
    length = passage_length(meta["counts"]["val"]["bytes"] / len(val))
    overlap = measure_overlap(text.predicted("train"), val, meta["vocab_size"], length)
    if source.max_overlap is not None and overlap.share > source.max_overlap:
        limit = f"at most {source.max_overlap:.0%} is accepted; choose a smaller data.val_fraction"
        raise ValueError(f"data={source.name}: {overlap}; {limit}")
    sizes = {split: counts["bytes"] for split, counts in meta["counts"].items()}
    val_share = sizes["val"] / (sizes["train"] + sizes["val"])
    return {"split": {"rule": source.split_rule, "val_share": val_share}, "overlap": asdict(overlap)}


def _warn_of_overlap(prepared: PreparedText) -> None:
    overlap = Overlap(**prepared.meta["overlap"])
    if overlap.share > MAX_SHARE and overlap.example is not None:
        ids = prepared.predicted("val")[overlap.example : overlap.example + overlap.passage_tokens]
        remedy = "the loss on them is too low. Remove repeated text, or give separate text with data.val_path"
        example = " ".join(prepared.tokenizer.decode(ids.tolist()).split())[:EXAMPLE_CHARACTERS]
        logging.getLogger(__name__).warning("%s, so %s; for example %r", overlap, remedy, example)


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str], progress: bool) -> Tokenizer:
    """`data.tokenizer.build`; while BPE computes its merges, a line shows the time that this has taken."""
    was_read, done = threading.Event(), threading.Event()

    def show() -> None:
        was_read.wait()
        if not done.is_set():
            with _progress_bar("training the tokenizer", "s", None, progress, layout="{desc}: {elapsed}") as bar:
                while not done.wait(min(1, LOG_INTERVAL)):
                    bar.update()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        return build(config, texts, was_read.set)
    finally:
        done.set()
        was_read.set()
        thread.join()


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
    source: Source, tokenizer: Tokenizer, eot: str, budgets: dict[Split, int | None], folder: Path, progress: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes both parts and returns their entries of meta.json, and the sha256 of each file that it wrote."""
    vocab_size, eot_id = n_ids(tokenizer), tokenizer.token_to_id(eot)
    dtype = np.dtype(np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32)
    counts, targets, names = {}, {}, (TOKENS, FLAGS) if getattr(source, "is_chat", False) else (TOKENS,)
    with contextlib.ExitStack() as stack:
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
            counts[split] = asdict(part)
    entries = {"dtype": dtype.name, "vocab_size": vocab_size, "eot_id": eot_id, "counts": counts}
    entries |= {"targets": targets} if FLAGS in files else {}
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


def _progress_bar(title: str, unit: str, total: int | None, shown: bool, layout: str | None = None) -> tqdm:
    interval = 0.1 if sys.stderr.isatty() else LOG_INTERVAL
    options: dict[str, Any] = {"mininterval": interval, "delay": interval, "disable": not shown}
    return tqdm(desc=title, unit=unit, unit_scale=True, total=total, bar_format=layout, **options)
