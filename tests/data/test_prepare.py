"""Packing against literal arrays; caching, atomicity, memory."""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tril.data import prepare as packing
from tril.data.prepare import prepare
from tril.data.sources.base import Piece
from tril.data.tokenizer import TokenizerConfig, build

ROOT = Path(__file__).parents[2]
CHAR = TokenizerConfig(kind="char")
END, UNK, A, B, C = range(5)  # ids of end-of-text, unknown and the three characters of TRAIN
TRAIN = [Piece("ab", True), Piece("c", False), Piece("ca", True), Piece("b", True)]
VAL = [Piece("b", True), Piece("xa", True)]


@dataclass
class Pieces:
    """A source of literal pieces that counts how often it is read."""

    train: list = field(default_factory=lambda: list(TRAIN))
    val: list = field(default_factory=lambda: list(VAL))
    reads: int = 0
    name: str = "pieces"

    def fingerprint(self):
        return {"train": self.train, "val": self.val}

    def pieces(self, split):
        self.reads += 1
        yield from self.train if split == "train" else self.val


def test_tokens_and_meta_are_the_literal_ones(tmp_path):
    packed = prepare(Pieces(), CHAR, tmp_path, progress=False)
    np.testing.assert_array_equal(packed.tokens("train"), [A, B, END, C, C, A, END, B, END])
    np.testing.assert_array_equal(packed.tokens("val"), [B, END, UNK, A, END])
    meta = json.loads((packed.folder / "meta.json").read_text())
    assert meta == packed.meta
    assert meta["counts"] == {
        "train": {"documents": 3, "bytes": 6, "characters": 6, "tokens": 9, "unknown": 0},
        "val": {"documents": 2, "bytes": 3, "characters": 3, "tokens": 5, "unknown": 1},
    }
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == ("uint16", 5, END)
    assert meta["source"] == json.loads(json.dumps(Pieces().fingerprint()))
    assert packed.folder.name == f"pieces-{meta['fingerprint'][:16]}"
    assert packed.tokens("train").dtype == np.uint16 and isinstance(packed.tokens("val"), np.memmap)
    assert not packed.tokens("train").flags.writeable
    assert packed.tokenizer.encode("<|endoftext|>").ids.count(END) == 0


def test_unended_text_and_bytes_of_other_scripts_are_counted(tmp_path):
    source = Pieces(train=[Piece("é\n", False), Piece("漢", False)], val=[Piece("é", False)])
    packed = prepare(source, TokenizerConfig(kind="byte"), tmp_path, progress=False)
    assert packed.meta["counts"]["train"] == {"documents": 1, "bytes": 6, "characters": 3, "tokens": 6, "unknown": 0}
    assert packed.tokenizer.decode(packed.tokens("train").tolist()) == "é\n漢"


def test_batches_do_not_change_the_tokens(tmp_path, monkeypatch):
    text = "the cat sat on the mat\n" * 30
    source = Pieces(train=[Piece(text[i : i + 50], i % 100 == 0) for i in range(0, len(text), 50)])
    config = TokenizerConfig(vocab_size=270)
    whole = prepare(source, config, tmp_path / "a", progress=False).tokens("train")
    monkeypatch.setattr(packing, "BATCH_SIZE", 70)
    np.testing.assert_array_equal(prepare(source, config, tmp_path / "b", progress=False).tokens("train"), whole)
    tokenizer, expected = build(config, [piece.text for piece in source.train]), []
    for piece in source.train:
        expected += tokenizer.encode(piece.text).ids + [0] * piece.ends_document
    np.testing.assert_array_equal(whole, expected)


def test_budgets_stop_at_the_piece_that_reaches_them(tmp_path):
    packed = prepare(Pieces(), CHAR, tmp_path, token_budget=4, val_token_budget=1, progress=False)
    np.testing.assert_array_equal(packed.tokens("train"), [A, B, END, C])
    np.testing.assert_array_equal(packed.tokens("val"), [B, END])


def test_a_budget_reads_no_further_than_it_must(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_SIZE", 1)

    class Endless(Pieces):
        def pieces(self, split):
            while True:
                yield Piece("abc", True)

    packed = prepare(Endless(), CHAR, tmp_path, token_budget=10, val_token_budget=3, progress=False)
    np.testing.assert_array_equal(packed.tokens("train"), [A, B, C, END] * 3)


def test_unknown_characters_are_reported_with_examples(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prepare(Pieces(), CHAR, tmp_path, progress=False)
    assert caplog.messages == ["1 of 5 tokens are unknown to the tokenizer, such as 'x'"]


def test_large_vocabulary_takes_wider_ids(tmp_path):
    def packed(n):
        source = Pieces(
            train=[Piece("".join(map(chr, range(0x10000, 0x10000 + n))), False)], val=[Piece("\U00010000", True)]
        )
        return prepare(source, CHAR, tmp_path, progress=False)

    assert packed((1 << 16) - 2).tokens("train").dtype == np.uint16
    wide = packed((1 << 16) - 1)
    assert wide.tokens("train").dtype == np.uint32
    assert wide.tokens("train")[-1] == 1 << 16


def test_same_settings_are_reused_without_reading_and_writing(tmp_path, monkeypatch):
    source = Pieces()
    first = prepare(source, CHAR, tmp_path, progress=False)
    reads, written = source.reads, (first.folder / "tokens.bin").stat().st_mtime_ns
    monkeypatch.setattr("tril.data.cache.make_folder", lambda folder: pytest.fail(f"{folder} need not be writable"))
    again = prepare(source, CHAR, tmp_path, progress=False)
    assert source.reads == reads > 0
    assert again.folder == first.folder and (again.folder / "tokens.bin").stat().st_mtime_ns == written


def test_every_changed_setting_gets_a_folder_of_its_own(tmp_path):
    prepared = [
        prepare(Pieces(), CHAR, tmp_path, progress=False),
        prepare(Pieces(), TokenizerConfig(kind="byte"), tmp_path, progress=False),
        prepare(Pieces(), TokenizerConfig(kind="char", eot="</s>"), tmp_path, progress=False),
        prepare(Pieces(train=TRAIN[:-1]), CHAR, tmp_path, progress=False),
        prepare(Pieces(), CHAR, tmp_path, token_budget=4, progress=False),
        prepare(Pieces(), CHAR, tmp_path, val_token_budget=4, progress=False),
    ]
    assert len({packed.folder for packed in prepared}) == len(prepared) == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("damage", ["shorter", "no meta", "half a meta", "another fingerprint", "no tokenizer"])
def test_a_damaged_folder_is_made_again(tmp_path, damage):
    folder = prepare(Pieces(), CHAR, tmp_path, progress=False).folder
    meta = (folder / "meta.json").read_text()
    if damage == "shorter":
        (folder / "tokens.bin").write_bytes(b"1234")
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "no meta":
        (folder / "meta.json").unlink()
    else:
        fingerprint = json.loads(meta)["fingerprint"]
        (folder / "meta.json").write_text(meta[:40] if damage == "half a meta" else meta.replace(fingerprint, "0" * 64))
    source = Pieces()
    packed = prepare(source, CHAR, tmp_path, progress=False)
    assert source.reads > 0
    np.testing.assert_array_equal(packed.tokens("val"), [B, END, UNK, A, END])
    assert json.loads((folder / "meta.json").read_text())["fingerprint"] == json.loads(meta)["fingerprint"]


def test_an_exception_in_the_middle_leaves_nothing_behind(tmp_path):
    class Broken(Pieces):
        def pieces(self, split):
            yield from super().pieces(split)
            if split == "val":
                assert len(list(tmp_path.iterdir())) == 1  # it is being written
                raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        prepare(Broken(), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_whoever_finishes_first_is_kept(tmp_path):
    class Overtaken(Pieces):
        def pieces(self, split):
            if split == "val":
                self.winner = prepare(Pieces(), CHAR, tmp_path, progress=False)
                (self.winner.folder / "winner").touch()
            yield from super().pieces(split)

    source = Overtaken()
    assert prepare(source, CHAR, tmp_path, progress=False).folder == source.winner.folder
    assert (source.winner.folder / "winner").exists()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("empty", ["train", "val"])
def test_an_empty_part_is_refused(tmp_path, empty):
    with pytest.raises(ValueError, match=f"the {empty} part of pieces is empty.*data.val_fraction"):
        prepare(Pieces(**{empty: []}), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to the cache folder.*data.cache_dir=FOLDER"):
        prepare(Pieces(), CHAR, tmp_path / place, progress=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk to be full")
def test_a_full_disk_is_an_os_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def build_on_a_full_disk(*arguments):
        [part] = tmp_path.glob(".tmp-*/*")
        (part / "tokenizer.json").symlink_to("/dev/full")
        return build(*arguments)

    monkeypatch.setattr(packing, "build", build_on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(Pieces(), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


PREPARE = """
import sys
from tril.data.sources.files import Files
from tril.data.prepare import prepare
from tril.data.tokenizer import TokenizerConfig
packed = prepare(Files(path=sys.argv[1]), TokenizerConfig(kind="byte"), sys.argv[2], progress=False)
# not ru_maxrss, which begins with what the parent had when it forked
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sum(part["bytes"] for part in packed.meta["counts"].values()), peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_memory_stays_flat(tmp_path):
    """30 MB of text in one file, whose tokens at once would take the tokenizer about 3 GB."""
    line = b"All work and no play makes this file quite dull to read.\n"
    with open(tmp_path / "large.txt", "wb") as file:
        file.writelines(line * 1000 for _ in range(30_000_000 // (1000 * len(line)) + 1))
    command = [sys.executable, "-c", PREPARE, str(tmp_path / "large.txt"), str(tmp_path / "cache")]
    answer = subprocess.run(command, capture_output=True, text=True)
    size, peak_kib = map(int, answer.stdout.split())
    print(f"peak {peak_kib / 1024:.0f} MiB")
    assert size == (tmp_path / "large.txt").stat().st_size
    assert peak_kib < 1000 * 1024  # half of it is one batch
