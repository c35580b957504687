"""Kinds of damage to a prepared folder, for `test_integrity.py`."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS, TOKENIZER, META = "tokens.bin", "tokenizer.json", "meta.json"
Damage = Callable[[Path], Any]  # of a folder


def content(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(name: str, where: float) -> Damage:
    """One bit; `where` is a share of the file."""

    def change(data: bytes) -> bytes:
        at = int(where * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return content(name, change)


def values(name: str, change: Callable[[Any], Any]) -> Damage:
    """Applies `change` to the parsed JSON; its result replaces the JSON unless it is None."""

    def damage(folder: Path) -> None:
        parsed = json.loads((folder / name).read_text(encoding="utf-8"))
        changed = change(parsed)
        (folder / name).write_text(json.dumps(parsed if changed is None else changed), encoding="utf-8")

    return damage


def kept_times(damage: Damage) -> Damage:
    """Sets the time of tokens.bin back afterwards."""

    def change(folder: Path) -> None:
        status = (folder / TOKENS).stat()
        damage(folder)
        os.utime(folder / TOKENS, ns=(status.st_atime_ns, status.st_mtime_ns))

    return change


def replaced(name: str, create: Callable[[Path], Any]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        create(folder / name)

    return damage


def swapped_words(state: dict) -> None:
    """Two tokens exchange their ids."""
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]


def moved_split(meta: dict) -> None:
    """One token moves from validation to training: the sum stays."""
    meta["counts"]["train"]["tokens"] += 1
    meta["counts"]["val"]["tokens"] -= 1


def halved(meta: dict) -> None:
    """Half as many tokens of twice the size."""
    meta["dtype"] = "uint32"
    for part in meta["counts"].values():
        part["tokens"] //= 2


NESTED = "[" * 100_000 + "]" * 100_000
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

DAMAGES: dict[str, Damage] = {
    "tokens: deleted": lambda folder: (folder / TOKENS).unlink(),
    "tokens: empty": content(TOKENS, lambda data: b""),
    "tokens: half": content(TOKENS, lambda data: data[: len(data) // 2]),
    "tokens: a byte less": content(TOKENS, lambda data: data[:-1]),
    "tokens: a token more": content(TOKENS, lambda data: data + b"\0\0"),
    "tokens: first bit flipped": flip(TOKENS, 0),
    "tokens: middle bit flipped": flip(TOKENS, 0.5),
    "tokens: last bit flipped": flip(TOKENS, 1),
    "tokens: bit flipped, time kept": kept_times(flip(TOKENS, 0.3)),
    "tokens: zeros": content(TOKENS, lambda data: bytes(len(data))),
    "tokens: block of zeros": content(TOKENS, lambda data: data[:64] + bytes(64) + data[128:]),
    "tokens: other byte order": content(TOKENS, lambda data: bytes(data[i ^ 1] for i in range(len(data)))),
    "tokens: halves exchanged": content(TOKENS, lambda data: data[len(data) // 2 :] + data[: len(data) // 2]),
    "tokens: ids beyond the vocabulary": content(TOKENS, lambda data: b"\xff" * len(data)),
    "tokens: a folder": replaced(TOKENS, Path.mkdir),
    "tokens: a pipe": replaced(TOKENS, os.mkfifo),
    "tokens: a link to itself": replaced(TOKENS, lambda path: path.symlink_to(path)),
    "meta: deleted": lambda folder: (folder / META).unlink(),
    "meta: empty": content(META, lambda data: b""),
    "meta: half": content(META, lambda data: data[: len(data) // 2]),
    "meta: zeros": content(META, lambda data: bytes(len(data))),
    "meta: not UTF-8": content(META, lambda data: b"\xff" + data[1:]),
    "meta: a list": values(META, lambda meta: [meta]),
    "meta: null": content(META, lambda data: b"null"),
    "meta: nested": content(META, lambda data: NESTED.encode()),
    "meta: a folder": replaced(META, Path.mkdir),
    "meta: a pipe": replaced(META, os.mkfifo),
    "meta: other fingerprint": values(META, lambda meta: meta.update(fingerprint="0" * 64)),
    "meta: dtype int16": values(META, lambda meta: meta.update(dtype="int16")),
    "meta: dtype float16": values(META, lambda meta: meta.update(dtype="float16")),
    "meta: dtype >u2": values(META, lambda meta: meta.update(dtype=">u2")),
    "meta: dtype object": values(META, lambda meta: meta.update(dtype="O")),
    "meta: dtype of nothing": values(META, lambda meta: meta.update(dtype="../../etc")),
    "meta: dtype uint32, half the tokens": values(META, halved),
    "meta: a token moved to training": values(META, moved_split),
    "meta: counts as text": values(META, lambda meta: meta["counts"]["val"].update(tokens="7")),
    "meta: fractional count": values(META, lambda meta: meta["counts"]["val"].update(tokens=0.5)),
    "meta: count as a float": values(
        META, lambda meta: meta["counts"]["train"].update(tokens=float(meta["counts"]["train"]["tokens"]))
    ),
    "meta: negative count": values(
        META, lambda meta: meta.update(counts={"train": {"tokens": -5}, "val": {"tokens": 5}})
    ),
    "meta: no counts": values(META, lambda meta: meta.pop("counts") and None),
    "meta: no bytes of validation": values(META, lambda meta: meta["counts"]["val"].pop("bytes") and None),
    "meta: more bytes of validation": values(META, lambda meta: meta["counts"]["val"].update(bytes=99_999)),
    "meta: other vocab_size": values(META, lambda meta: meta.update(vocab_size=meta["vocab_size"] + 64)),
    "meta: no vocab_size": values(META, lambda meta: meta.pop("vocab_size") and None),
    "meta: huge vocab_size": values(META, lambda meta: meta.update(vocab_size=10**11)),
    "meta: other eot_id": values(META, lambda meta: meta.update(eot_id=meta["eot_id"] + 1)),
    "meta: no eot_id": values(META, lambda meta: meta.pop("eot_id", None) and None),
    "meta: overlap without values": values(META, lambda meta: meta.update(overlap={})),
    "meta: overlap with other names": values(META, lambda meta: meta["overlap"].update(extra=1)),
    "meta: example of the overlap beyond the text": values(
        META, lambda meta: meta["overlap"].update(share=0.5, example=10**20)
    ),
    "meta: split is a number": values(META, lambda meta: meta.update(split=3)),
    "tokenizer: deleted": lambda folder: (folder / TOKENIZER).unlink(),
    "tokenizer: empty": content(TOKENIZER, lambda data: b""),
    "tokenizer: half": content(TOKENIZER, lambda data: data[: len(data) // 2]),
    "tokenizer: zeros": content(TOKENIZER, lambda data: bytes(len(data))),
    "tokenizer: not UTF-8": content(TOKENIZER, lambda data: b"\xff" + data[1:]),
    "tokenizer: {}": content(TOKENIZER, lambda data: b"{}"),
    "tokenizer: nested": content(TOKENIZER, lambda data: NESTED.encode()),
    "tokenizer: a folder": replaced(TOKENIZER, Path.mkdir),
    "tokenizer: a pipe": replaced(TOKENIZER, os.mkfifo),
    "tokenizer: ids exchanged": values(TOKENIZER, swapped_words),
    "tokenizer: no merges": values(TOKENIZER, lambda state: state["model"].update(merges=[])),
    "tokenizer: a merge less": values(TOKENIZER, lambda state: state["model"]["merges"].pop() and None),
    "tokenizer: unknown merge": values(TOKENIZER, lambda state: state["model"]["merges"].append(["qq", "qq"])),
    "tokenizer: dropout": values(TOKENIZER, lambda state: state["model"].update(dropout=0.5)),
    "tokenizer: huge id": values(TOKENIZER, lambda state: state["model"]["vocab"].update(zz=4_000_000_000)),
    "tokenizer: negative id": values(TOKENIZER, lambda state: state["model"]["vocab"].update(zz=-1)),
    "tokenizer: lower case": values(TOKENIZER, lambda state: state.update(normalizer={"type": "Lowercase"})),
    "tokenizer: no pre-tokenizer": values(TOKENIZER, lambda state: state.update(pre_tokenizer=None)),
    "tokenizer: no decoder": values(TOKENIZER, lambda state: state.update(decoder=None)),
    "tokenizer: other end of text": values(
        TOKENIZER, lambda state: state.update(added_tokens=[{"id": 0, "content": "<|end|>", **ADDED}])
    ),
    "folder: empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "folder: a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
    "folder: a broken link": lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder.parent / "none")),
}
