"""Whether a prepared folder still is what `data.prepare` wrote: checksums of its files.

meta.json holds the sha256 of tokens.bin, of flags.bin where there is one, of tokenizer.json and of its own values. All
but tokens.bin are verified at every start. tokens.bin may be large: its content is read at the first start, after a
change of its size or of one of its times, and REREAD_DAYS after it was last read, since a failing disk changes bits
without changing the times.
verified.json records that; it can be deleted. Checksums detect damage, not forgery.
"""

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tril.data.tokenizer import load
from tril.data.tokenizer_json import MAX_BYTES as MAX_TOKENIZER_BYTES

TOKENS, TOKENIZER, META, VERIFIED = "tokens.bin", "tokenizer.json", "meta.json", "verified.json"
FLAGS = "flags.bin"  # of a chat: a byte of `encoding.TARGET` and `encoding.OPENS` for each token
DTYPES = ("uint16", "uint32")
MAX_META_BYTES = 1 << 24
REREAD_DAYS = 30


def write_meta(folder: Path, meta: dict[str, Any], sha256: dict[str, str]) -> None:
    """Writes meta.json with the checksums of the folder, in which tokenizer.json exists.

    Args:
        sha256: of tokens.bin and flags.bin, computed in memory, so that it does not cover up what the disk did to them.
    """
    tokenizer_sha256 = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
    checksums = {**sha256, TOKENIZER: tokenizer_sha256, META: values_sha256(meta)}
    (folder / META).write_text(json.dumps({**meta, "sha256": checksums}, indent=2) + "\n", encoding="utf-8")


def values_sha256(meta: dict[str, Any]) -> str:
    """The sha256 of the values of meta.json other than the checksums."""
    values = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def open_verified(folder: Path, fingerprint: str) -> tuple[dict[str, Any], Tokenizer]:
    """The content of meta.json and the tokenizer of a prepared folder.

    Raises:
        ValueError: the folder is damaged or incomplete; the message names the file and what is wrong with it.
    """
    try:
        meta = _read_meta(folder / META, fingerprint)
        sha256 = meta["sha256"]
        n_tokens = sum(meta["counts"][split]["tokens"] for split in ("train", "val"))
        _verify_tokens(folder, sha256[TOKENS], n_tokens * np.dtype(meta["dtype"]).itemsize)
        if "targets" in meta:
            _verify_flags(folder / FLAGS, sha256[FLAGS], n_tokens)
        content = _read(folder / TOKENIZER, MAX_TOKENIZER_BYTES)
        if hashlib.sha256(content).hexdigest() != sha256[TOKENIZER]:
            raise ValueError(f"{TOKENIZER} does not match its checksum")
        return meta, load(content.decode())
    except OSError as error:
        raise ValueError(f"{Path(error.filename or folder).name}: {error.strerror or error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{META} lacks values") from error


def _read_meta(path: Path, fingerprint: str) -> dict[str, Any]:
    try:
        meta = json.loads(_read(path, MAX_META_BYTES))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{META} is not JSON") from error
    if "sha256" not in meta:
        raise ValueError(f"{META} has no checksums, as in version 0.1")
    if meta["sha256"][META] != values_sha256(meta):
        raise ValueError(f"{META} does not match its checksum")
    if meta["fingerprint"] != fingerprint or meta["dtype"] not in DTYPES:
        raise ValueError(f"{META} belongs to other data")
    return meta


def _read(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    _check_file(path)
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{path.name} has {size} bytes, more than {limit}")
    return path.read_bytes()


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path.name} is {'not a file' if path.exists() else 'missing'}")


def _verify_tokens(folder: Path, sha256: str, size: int) -> None:
    """
    Args:
        size: the expected bytes.
    """
    path = folder / TOKENS
    _check_file(path)
    stat = path.stat()
    if stat.st_size != size:
        raise ValueError(f"{TOKENS} has {stat.st_size} bytes instead of {size}")
    # st_ctime_ns, unlike st_mtime_ns, cannot be set back
    state = {"sha256": sha256, "bytes": size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    if _was_read(folder / VERIFIED, state):
        return
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(f"{TOKENS} does not match its checksum")
    with contextlib.suppress(OSError):  # a cache that cannot be written is verified at every start
        (folder / VERIFIED).unlink(missing_ok=True)
        (folder / VERIFIED).write_text(json.dumps({**state, "time": time.time()}), encoding="utf-8")


def _verify_flags(path: Path, sha256: str, size: int) -> None:
    """At every start: chats are small."""
    if hashlib.sha256(content := _read(path, size)).hexdigest() != sha256 or len(content) != size:
        raise ValueError(f"{path.name} does not match its checksum")


def _was_read(path: Path, state: dict[str, Any]) -> bool:
    """Whether the content of tokens.bin was verified in the same state, less than REREAD_DAYS ago."""
    try:
        record = json.loads(_read(path, MAX_META_BYTES))
        age = time.time() - record.pop("time")
        return record == state and 0 <= age < REREAD_DAYS * 24 * 3600
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
