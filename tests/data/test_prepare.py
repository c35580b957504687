"""Prepared texts: tokens, bytes and documents, damage, and overlap:  python -m pytest tests/data/test_prepare.py"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.data.test_text import write
from tril.data import overlap
from tril.data.overlap import measure_overlap
from tril.data.prepare import Piece, prepare, training_texts
from tril.data.sources import parse
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig

TEXT = "".join(random.Random(0).choices("abcde fgh\u00e9\u6f22\U0001f469\n", k=6000))
BYTE = {"tokenizer": {"kind": "byte"}}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Of text.txt in the working directory, next to another text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    write(Path(), {"text.txt": TEXT, "a.txt": "".join(f"alpha {i} and alpha {i * i}\n" for i in range(300))})
    return {"source": "files", "path": "text.txt"}


def prepared(settings, **changed):
    return prepare(parse(settings | changed))


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
@pytest.mark.parametrize("first", ["a", "\u6f22"])
def test_the_bytes_of_all_targets_are_those_of_their_tokens(settings, kind, first):
    """The first token of the validation part is no target; of kind "byte" it ends within a character."""
    write(Path(), {"val.txt": first + TEXT})
    text = prepared(settings, val_path="val.txt", tokenizer={"kind": kind})
    ids = text.tokens("val").tolist()
    names = [text.tokenizer.id_to_token(i) for i in ids[1:-1]]  # without end-of-text
    sizes = [len(name.encode()) if kind == "char" else len(name) for name in names]
    assert text.val_bytes(len(ids) - 1) == sum(sizes)
    assert kind != "char" or text.val_bytes(40) == sum(sizes[:40])


def test_a_changed_byte_anywhere_in_the_cache_is_noticed(settings, caplog):
    text = prepared(settings, **BYTE)
    before = {path.name: path.read_bytes() for path in text.folder.iterdir()}
    assert before.keys() == {"tokens.bin", "tokenizer.json", "meta.json"}
    for name, content in before.items():
        for position in (0, len(content) // 3, len(content) - 2):
            changed = bytearray(content)
            changed[position] ^= 1
            for damaged in (changed, content[:position]):
                (text.folder / name).write_bytes(damaged)
                caplog.clear()
                again = prepared(settings, **BYTE)
                assert str(text.folder) in caplog.text, (name, position)
                assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == before
    (text.folder / "meta.json").write_text("[1]")
    assert prepared(settings, **BYTE).meta == text.meta


def test_a_process_waits_for_another_one_that_prepares_and_reads_what_it_wrote(settings, capsys, monkeypatch):
    folder = prepared(settings, **BYTE).folder
    other, printed = folder.rename(folder.with_name("other")), ""
    monkeypatch.setattr(Files, "documents", lambda *_: pytest.fail("read again"))
    with ThreadPoolExecutor() as pool:
        with FileLock(folder.with_name(f".{folder.name}.lock")):  # as the other process holds it
            waiting = pool.submit(prepared, settings, **BYTE)
            while str(folder) not in printed:
                assert not waiting.done(), waiting.exception()
                time.sleep(0.01)
                printed += capsys.readouterr().err
            other.rename(folder)
        assert waiting.result().folder == folder


def test_a_budget_ends_a_part_with_the_piece_that_reaches_it(settings):
    lines = "".join(f"{i:015}\n" for i in range(100_000))  # 16 bytes each; a piece has 2^18 characters
    write(Path(), {"text.txt": lines})
    text = prepared(settings, token_budget=300_000, val_token_budget=5, **BYTE)
    n_train = 2 * ((1 << 18) + 16)  # to the end of a line
    assert [len(text.tokens(split)) for split in ("train", "val")] == [n_train, len(lines) // 20 + 1]
    assert text.tokenizer.decode(text.tokens("train").tolist()) == lines[:n_train]


def test_what_changes_the_tokens_changes_the_fingerprint(settings, monkeypatch, capsys):
    changes = [{}, {"val_fraction": 0.1}, {"tokenizer": {"kind": "char"}}, {"tokenizer": {"vocab_size": 300}}]
    changes += [{"token_budget": 1000}, {"path": "a.txt"}]
    found = {prepared(settings, **change).meta["fingerprint"] for change in changes}
    assert len(found) == len(changes)
    monkeypatch.setattr(Files, "documents", lambda *_: pytest.fail("read again"))
    for same in ({"batch_size": 3}, {"document_mask": True}, {"tokenizer": {"vocab_size": None}}):
        assert prepared(settings, **same).meta["fingerprint"] in found
    assert len(capsys.readouterr().err.splitlines()) == len(changes)  # one for each text


def covered(train, val, length):
    """The number of validation tokens in passages of the training part, by a search."""
    passages = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    starts = [i for i in range(len(val) - length + 1) if tuple(val[i : i + length]) in passages]
    return len({i + j for i in starts for j in range(length)})


@pytest.mark.parametrize("length", [2, 50])
def test_overlap_is_what_a_search_finds(length, monkeypatch):
    monkeypatch.setattr(overlap, "CHUNK", 128)
    monkeypatch.setattr(overlap, "PASSAGE_TOKENS", length)
    monkeypatch.setattr(overlap, "PASSAGE_BYTES", 0)
    rng = np.random.default_rng(length)
    train, val = (rng.integers(0, 40, n).astype(np.uint16) for n in (2000, 600))
    val[130:190] = train[1000:1060]  # across the ends of chunks
    val[200:249] = train[126:175]
    val[300:420] = 7
    train[50:102] = 7
    val[-50:] = train[:50]
    found, tokens = measure_overlap(train, val, 40, 3.0), covered(train.tolist(), val.tolist(), length)
    assert tokens >= 60 and found == {"tokens": tokens, "share": tokens / 600, "passage_tokens": length}
    assert measure_overlap(train[: length - 1], val, 40, 3.0)["tokens"] == 0  # shorter than a passage


def test_documents_are_separated_by_their_first_tokens(settings):
    write(Path(), {f"{name}.md": name * 50 for name in "abc"})
    text = prepared(settings, path="[ab].md", val_path="c.md", **BYTE)
    ids, documents = text.tokens("train").tolist(), text.documents("train").tolist()
    assert documents == [0] * 50 + [1] * 51 + [2]
    assert ids == [*text.tokenizer.encode("a" * 50).ids, 0, *text.tokenizer.encode("b" * 50).ids, 0]


def test_the_tokenizer_knows_the_training_part_only_and_copies_are_in_one_part(settings):
    words = ["".join(random.Random(i).choices("bdfghklmnprstvz", k=8)) for i in range(20)]
    write(Path("own"), {f"{i}.md": f" {words[i % 20]}" * 40 for i in range(30)})  # ten of them twice
    text = prepared(settings, path="own/*.md", val_fraction=0.2, tokenizer={"kind": "bpe", "vocab_size": 700})
    parts = [text.tokenizer.decode(text.tokens(split).tolist()).split() for split in ("train", "val")]
    train, val = ({word for word in part if word in words} for part in parts)
    assert train | val == {*words} and not train & val and val
    assert train == {word for word in words if len(text.tokenizer.encode(f" {word}").ids) == 1}


def test_long_words_are_cut_before_a_tokenizer_is_trained():
    text = "word " + "x" * 5000 + " 漢" * 9 + " " * 3000 + "end"
    parts = list(training_texts([Piece(text, True)], None, TokenizerConfig()))
    assert "".join(parts) == text and max(len(word) for part in parts for word in part.split(" ")) == 1024
    assert list(training_texts([Piece(TEXT, True)], None, TokenizerConfig())) == [TEXT]


@pytest.mark.parametrize(("n_characters", "warned"), [(600, True), (60_000, False)])
def test_few_validation_tokens_are_said_to_measure_little(settings, capsys, n_characters, warned):
    Path("text.txt").write_text(TEXT[:n_characters] * 10, "utf-8")
    prepared(settings, **BYTE)
    assert ("says little" in capsys.readouterr().err) == warned
