"""Texts -> a memory-mapped file of token ids, see `data.prepared`.

The name of a prepared folder contains a fingerprint of sources, splits, tokenizer and budgets, so a changed setting
never reads stale tokens; a damaged folder is prepared again.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from tril.data.cache import read_or_write, resolve_cache_dir
from tril.data.encoding import OPENS, TARGET, Encoder, first_token_bytes
from tril.data.mixture import Member, Mixture
from tril.data.overlap import measure_overlap
from tril.data.prepared import (
    FLAGS,
    TOKENIZER,
    TOKENS,
    PreparedText,
    PreparedTexts,
    sha256_of,
    sha256_of_file,
    write_meta,
)
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig, build, n_ids

FORMAT = 3  # incremented when the same settings produce other files, such as by another split
MAX_UINT16_VOCAB = 1 << 16
MAX_OVERLAP = 0.01  # of the validation tokens; above that, the loss is too low
SHOWN_OVERLAP = 0.00005  # less is 0.00 %


@dataclass
class Counts:
    """The size of one part.

    Attributes:
        targets: tokens that are predicted: all but the first; of a chat, those of the answers.
        bytes: of a chat, those of the answers.
        first_bytes: of them, those of the first token, which is not predicted.
        unknown: tokens for characters that the tokenizer does not have.
    """

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    bytes: int = 0
    first_bytes: int = 0
    unknown: int = 0


def prepare(
    members: Mapping[str, Member],
    config: TokenizerConfig,
    cache_dir: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedTexts:
    """Trains or loads the common tokenizer of some texts, and tokenizes them into a folder of the cache, or reuses the
    folder of an earlier call.

    A training part ends with the first piece that reaches the budget, so only a document longer than a piece is
    truncated; likewise a validation part. The result does not depend on the shares of the texts, apart from `counts`.

    Args:
        cache_dir: see `resolve_cache_dir`.

    Raises:
        ValueError: a part of a text is empty, or a text is invalid.
        OSError: text, tokenizer or cache folder cannot be read or written.
    """
    sources = {name: {"source": each.source.fingerprint(), "budgets": each.budgets} for name, each in members.items()}
    kind = next(iter(members.values())).source.name if len(members) == 1 else Mixture.name
    meta = {"format": FORMAT, "tokenizer": config.fingerprint(), "sources": sources}
    fingerprint, counts = sha256_of(meta), [member.count for member in members.values()]

    def write(folder: Path) -> None:
        folder.mkdir()
        tokenizer = build(config, [training_texts(member, config, progress) for member in members.values()])
        vocab_size, is_chat = n_ids(tokenizer), any(member.source.is_chat for member in members.values())
        dtype = "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"
        encoder, names = Encoder(tokenizer, config.eot), (TOKENIZER, TOKENS, *[FLAGS] * is_chat)
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
            files[TOKENIZER].write(tokenizer.to_str(pretty=True).encode())  # `tokenizer.save` raises bare Exceptions
            written = {name: write_text(each, encoder, files, dtype, progress) for name, each in members.items()}
        values = {**meta, "fingerprint": fingerprint, "kind": kind, "chat": is_chat, "dtype": dtype}
        values |= {"vocab_size": vocab_size, "eot_id": tokenizer.token_to_id(config.eot)}
        values |= {"files": {name: [(folder / name).stat().st_size, sha256_of_file(folder / name)] for name in names}}
        values |= {"sources": {name: sources[name] | written[name] for name in members}}
        for name, text in PreparedTexts(folder, values, tokenizer, counts).texts.items():
            values["sources"][name] |= measured_split(members[name].source, text)
        write_meta(folder, values)

    folder = resolve_cache_dir(cache_dir) / f"{kind}-{fingerprint[:16]}"
    read = partial(PreparedTexts.read, fingerprint=fingerprint, counts=counts)
    prepared, is_new = read_or_write(folder, "prepares", write, read)
    for name, text in prepared.texts.items() if is_new and progress else ():
        print(f"{name}: " * bool(name) + describe_split(text), file=sys.stderr)
    return prepared


def training_texts(member: Member, config: TokenizerConfig, progress: bool) -> Iterator[str]:
    """The text to train a tokenizer on."""
    source, budget, n_characters = member.source, member.budgets["train"], 0
    with progress_bar("reading text for the tokenizer", "B", None, progress) as bar:
        for piece in source.pieces("train"):
            bar.update(len(piece.text.encode()))
            yield piece.text
            n_characters += len(piece.text)
            if config.kind == "char" and budget is not None and n_characters >= budget:
                return  # a character is a token: later ones are not encoded


def write_text(
    member: Member, encoder: Encoder, files: Mapping[str, BinaryIO], dtype: str, progress: bool
) -> dict[str, Any]:
    """Writes both parts of a text; returns its sizes, and at which token it starts in the files of tokens and flags."""
    start = {TOKENS: files[TOKENS].tell() // np.dtype(dtype).itemsize}
    start[FLAGS] = files[FLAGS].tell() if member.source.is_chat else None
    parts: tuple[Split, Split] = ("train", "val")
    return {
        "start": start,
        "counts": {split: asdict(write_part(member, split, encoder, files, dtype, progress)) for split in parts},
    }


def write_part(
    member: Member, split: Split, encoder: Encoder, files: Mapping[str, BinaryIO], dtype: str, progress: bool
) -> Counts:
    """Writes ids and flags of the pieces until these end or the budget is reached."""
    source, budget, counts, starts_document = member.source, member.budgets[split], Counts(), True
    unknown_token = getattr(encoder.tokenizer.model, "unk_token", None)
    unknown_id = encoder.tokenizer.token_to_id(unknown_token) if unknown_token else None
    with progress_bar(f"encoding the {split} part", "token" if budget else "B", budget, progress) as bar:
        for piece, ids, n_bytes, flags in encoder.encode(source.pieces(split)):
            files[TOKENS].write(ids.astype(dtype).tobytes())
            if flags is not None:
                flags[: counts.tokens == 0] &= OPENS  # the first token of a part is not predicted
                files[FLAGS].write(flags.tobytes())
                counts.targets += int((flags & TARGET > 0).sum())
            elif counts.tokens == 0:
                counts.first_bytes = first_token_bytes(encoder.tokenizer, piece.text)
            counts.unknown += int((ids == unknown_id).sum()) if unknown_id is not None else 0
            counts.documents += starts_document
            counts.bytes += n_bytes
            counts.tokens += len(ids)
            starts_document = piece.ends_document
            bar.update(len(ids) if budget else n_bytes)
            if budget is not None and counts.tokens >= budget:
                break
    if counts.tokens == 0:
        remedy = "give more text, or change data.val_fraction, data.val_path or data.val_split"
        raise ValueError(f"data: the {split} part of {source.name} is empty; {remedy}")
    if not source.is_chat:
        counts.targets = counts.tokens - 1
    elif counts.bytes == 0:
        remedy = "choose another data.chat_template"
        raise ValueError(f"data: the {split} part of {source.name} has no answer to train on; {remedy}")
    if counts.unknown:
        message = "%d of %d tokens of the %s part are unknown to the tokenizer"
        logging.getLogger(__name__).warning(message, counts.unknown, counts.tokens, split)
    return counts


def measured_split(source: Source, text: PreparedText) -> dict[str, Any]:
    """The entries "split" and "overlap" (see `measure_overlap`) of a text in meta.json."""
    sizes = {split: counts["bytes"] for split, counts in text.meta["counts"].items()}
    train, val = (text.predicted(split) for split in ("train", "val"))
    overlap = measure_overlap(train, val, text.meta["vocab_size"], sizes["val"] / len(val))
    val_share = sizes["val"] / (sizes["train"] + sizes["val"])
    return {"split": {"rule": source.split_rule, "val_share": val_share}, "overlap": overlap}


def describe_split(text: PreparedText) -> str:
    """One line about the validation part, and how much of it occurs in the training part."""
    split, overlap = text.meta["split"], text.meta["overlap"]["share"]
    line = f"validation is {split['val_share']:.1%} of the text ({split['rule']})"
    if overlap >= SHOWN_OVERLAP:
        line += f"; {100 * overlap:.2f} % of its tokens lie in passages that also occur in the training part"
    if overlap > MAX_OVERLAP:
        line += ", so the loss on them is too low; remove repeated text, or give separate text with data.val_path"
    return line


def progress_bar(title: str, unit: str, total: int | None, shown: bool) -> tqdm:
    """In a terminal only."""
    return tqdm(desc=title, unit=unit, unit_scale=True, total=total, delay=0.1, disable=None if shown else True)
