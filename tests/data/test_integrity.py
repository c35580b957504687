"""Damage to a prepared folder: never other tokens in silence, never a traceback."""

import json
import logging
import os
import shutil
import sys
import time

import numpy as np
import pytest

from tests.data.damages import DAMAGES, META, TOKENIZER, TOKENS, flip
from tests.data.sources import random_damage
from tril.data import integrity
from tril.data.prepare import prepare
from tril.data.sources.base import Piece
from tril.data.tokenizer import TokenizerConfig

TEXT = "The quick brown fox jumps over the lazy dog.\n"
PROBE = TEXT + " ".join("abcdefghijklmnopqrstuvwxyz")
WORDS = [f"{TEXT}{i} times the {i * i} of the sea, and he came.\n" for i in range(40)]
CONFIG = TokenizerConfig(vocab_size=300)
needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and links")


class Words:
    """A source that counts how often it is read."""

    name, split_rule, max_overlap, reads = "words", "two lists", None, 0

    def fingerprint(self):
        return {"words": 40}

    def pieces(self, split):
        self.reads += 1
        yield from (Piece(text, True) for text in (WORDS[:30] if split == "train" else WORDS[30:]))


def described(prepared):
    """What a run reads of a prepared text."""
    meta = {key: prepared.meta[key] for key in ("dtype", "vocab_size", "eot_id", "counts", "overlap", "split")}
    tokens = [prepared.tokens(split) for split in ("train", "val")]
    ids = prepared.tokenizer.encode(PROBE).ids
    return meta, [(part.dtype.str, part.tolist()) for part in tokens], ids, prepared.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return prepare(Words(), CONFIG, tmp_path_factory.mktemp("intact"), progress=False)


@pytest.fixture
def folder(intact, tmp_path):
    """A copy of the prepared folder in the cache tmp_path, opened once, so that its content is verified."""
    shutil.copytree(intact.folder, tmp_path / intact.folder.name)
    prepare(Words(), CONFIG, tmp_path, progress=False)
    return tmp_path / intact.folder.name


def outcome(cache, expected):
    """ "same" tokens, "other" tokens, one "line" that refuses, or the name of another exception."""
    try:
        same = described(prepare(Words(), CONFIG, cache, progress=False)) == expected
    except (ValueError, OSError) as error:
        return "line" if str(error) and "\n" not in str(error) else "lines"
    except Exception as error:
        return type(error).__name__
    return "same" if same else "other"


@needs_pipes
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_repaired_with_one_line(intact, folder, kind, caplog):
    DAMAGES[kind](folder)
    with caplog.at_level(logging.WARNING):
        assert outcome(folder.parent, described(intact)) == "same"
    [line] = caplog.messages
    assert line.startswith(f"{folder} is damaged (") and line.endswith("); preparing it again") and "\n" not in line
    part = kind.partition(":")[0]
    names = {"tokens": TOKENS, "meta": META, "tokenizer": TOKENIZER, "folder": ""}
    assert names[part] in line
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


def test_an_undamaged_folder_is_not_prepared_again_and_read_once(folder, monkeypatch, caplog):
    """A record of the size and the times of tokens.bin saves reading it."""
    digests, file_digest = [], integrity.hashlib.file_digest
    monkeypatch.setattr(
        integrity.hashlib, "file_digest", lambda file, name: digests.append(1) or file_digest(file, name)
    )
    source = Words()

    def n_reads():
        digests.clear()
        prepare(source, CONFIG, folder.parent, progress=False)
        return len(digests)

    assert n_reads() == 0
    os.utime(folder / TOKENS)
    assert [n_reads(), n_reads()] == [1, 0]
    record = json.loads((folder / integrity.VERIFIED).read_text())
    for damaged in ("", "null", "{}", "[" * 10**5, json.dumps({**record, "sha256": "0" * 64}), json.dumps([record])):
        (folder / integrity.VERIFIED).write_text(damaged)
        assert [n_reads(), n_reads()] == [1, 0]
    later = time.time() + 31 * 24 * 3600
    monkeypatch.setattr(integrity.time, "time", lambda: later)
    assert [n_reads(), n_reads()] == [1, 0]
    assert source.reads == 0 and caplog.messages == []


def test_a_cache_that_cannot_be_written_is_verified_at_every_start(folder, monkeypatch):
    (folder / integrity.VERIFIED).unlink()
    (folder / integrity.VERIFIED).mkdir()
    source = Words()
    prepare(source, CONFIG, folder.parent, progress=False)
    flip(TOKENS, 0.5)(folder)
    prepare(source, CONFIG, folder.parent, progress=False)
    assert source.reads > 0


def test_other_white_space_is_no_damage(folder, intact, caplog):
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps(dict(reversed(meta.items())), indent=7))
    source = Words()
    assert described(prepare(source, CONFIG, folder.parent, progress=False)) == described(intact)
    assert source.reads == 0 and caplog.messages == []


def test_the_checksums_are_those_of_the_files(folder):
    """Independent of `data.integrity`: the sha256 of the files, and of the values in sorted order."""
    import hashlib

    meta = json.loads((folder / META).read_text())
    sha256 = meta.pop("sha256")
    expected = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (TOKENS, TOKENIZER)}
    values = json.dumps(meta, sort_keys=True).encode()
    assert sha256 == expected | {META: hashlib.sha256(values).hexdigest()}


def test_a_folder_without_checksums_is_prepared_again(folder, caplog):
    """Folders of version 0.1 cannot be verified."""
    meta = json.loads((folder / META).read_text())
    del meta["sha256"]
    (folder / META).write_text(json.dumps(meta))
    source = Words()
    prepare(source, CONFIG, folder.parent, progress=False)
    assert source.reads > 0 and "meta.json has no checksums, as in version 0.1" in caplog.messages[0]


def test_a_disk_that_changes_what_is_written_is_an_error(tmp_path, monkeypatch):
    from tril.data import prepare as module

    write_folder = module.write_folder

    def write(folder, fill, is_valid):
        write_folder(folder, fill, is_valid)
        flip(TOKENS, 0.5)(folder)

    monkeypatch.setattr(module, "write_folder", write)
    with pytest.raises(OSError, match=r"was written and is damaged \(tokens.bin does not match.*check the disk"):
        prepare(Words(), CONFIG, tmp_path, progress=False)


def test_seeded_random_damage(intact, folder):
    """Bytes of each file are changed, removed, inserted and doubled."""
    random, expected = np.random.default_rng(17), described(intact)
    outcomes = []
    for i in range(60):
        path = folder / (TOKENS, META, TOKENIZER, integrity.VERIFIED)[i % 4]
        path.write_bytes(random_damage.damaged(path.read_bytes(), random))
        outcomes.append(outcome(folder.parent, expected))
    assert set(outcomes) == {"same"}
