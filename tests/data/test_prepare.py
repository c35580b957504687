"""Prepared tokens against literal arrays; reuse, atomicity, memory."""

import errno
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import run_python
from tril.data import encoding
from tril.data import prepare as module
from tril.data.prepare import prepare
from tril.data.sources.base import Piece
from tril.data.tokenizer import TokenizerConfig, build

CHAR = TokenizerConfig(kind="char")
EOT, UNK, A, B, C = range(5)  # ids of end-of-text, unknown and the three characters of TRAIN
TRAIN = [Piece("ab", True), Piece("c", False), Piece("ca", True), Piece("b", True)]
VAL = [Piece("b", True), Piece("xa", True)]


@dataclass
class Pieces:
    """A source of literal pieces that counts how often it is read."""

    train: list = field(default_factory=lambda: list(TRAIN))
    val: list = field(default_factory=lambda: list(VAL))
    reads: int = 0
    name: str = "pieces"
    split_rule: str = "two lists"
    max_overlap: float | None = None

    def fingerprint(self):
        return {"train": self.train, "val": self.val}

    def pieces(self, split):
        self.reads += 1
        yield from self.train if split == "train" else self.val


def test_tokens_and_meta_are_the_literal_ones(tmp_path):
    prepared = prepare(Pieces(), CHAR, tmp_path, progress=False)
    np.testing.assert_array_equal(prepared.tokens("train"), [A, B, EOT, C, C, A, EOT, B, EOT])
    np.testing.assert_array_equal(prepared.tokens("val"), [B, EOT, UNK, A, EOT])
    meta = json.loads((prepared.folder / "meta.json").read_text())
    assert meta == prepared.meta
    assert meta["counts"] == {
        "train": {"documents": 3, "bytes": 6, "characters": 6, "tokens": 9, "unknown": 0},
        "val": {"documents": 2, "bytes": 3, "characters": 3, "tokens": 5, "unknown": 1},
    }
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == ("uint16", 5, EOT)
    assert meta["source"] == json.loads(json.dumps(Pieces().fingerprint()))
    assert prepared.folder.name == f"pieces-{meta['fingerprint'][:16]}"
    assert prepared.tokens("train").dtype == np.uint16 and isinstance(prepared.tokens("val"), np.memmap)
    assert not prepared.tokens("train").flags.writeable
    assert prepared.tokenizer.encode("<|endoftext|>").ids.count(EOT) == 0


def test_text_without_end_and_non_ascii_bytes_are_counted(tmp_path):
    source = Pieces(train=[Piece("é\n", False), Piece("漢", False)], val=[Piece("é", False)])
    prepared = prepare(source, TokenizerConfig(kind="byte"), tmp_path, progress=False)
    assert prepared.meta["counts"]["train"] == {"documents": 1, "bytes": 6, "characters": 3, "tokens": 6, "unknown": 0}
    assert prepared.tokenizer.decode(prepared.tokens("train").tolist()) == "é\n漢"


def test_batches_do_not_change_the_tokens(tmp_path, monkeypatch):
    text = "the cat sat on the mat\n" * 30
    source = Pieces(train=[Piece(text[i : i + 50], i % 100 == 0) for i in range(0, len(text), 50)])
    config = TokenizerConfig(vocab_size=270)
    whole = prepare(source, config, tmp_path / "a", progress=False).tokens("train")
    monkeypatch.setattr(encoding, "BATCH_SIZE", 70)
    np.testing.assert_array_equal(prepare(source, config, tmp_path / "b", progress=False).tokens("train"), whole)
    tokenizer, expected = build(config, [piece.text for piece in source.train]), []
    for piece in source.train:
        expected += tokenizer.encode(piece.text).ids + [0] * piece.ends_document
    np.testing.assert_array_equal(whole, expected)


def test_budgets_stop_at_the_piece_that_reaches_them(tmp_path):
    prepared = prepare(Pieces(), CHAR, tmp_path, token_budget=4, val_token_budget=1, progress=False)
    np.testing.assert_array_equal(prepared.tokens("train"), [A, B, EOT, C])
    np.testing.assert_array_equal(prepared.tokens("val"), [B, EOT])


def test_a_budget_stops_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_SIZE", 1)

    class Endless(Pieces):
        def pieces(self, split):
            while True:
                yield Piece("abc", True)

    prepared = prepare(Endless(), CHAR, tmp_path, token_budget=10, val_token_budget=3, progress=False)
    np.testing.assert_array_equal(prepared.tokens("train"), [A, B, C, EOT] * 3)


def test_unknown_characters_are_reported_with_examples(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prepare(Pieces(), CHAR, tmp_path, progress=False)
    assert caplog.messages == ["1 of 5 tokens are unknown to the tokenizer, such as 'x'"]


def test_large_vocabulary_needs_uint32(tmp_path):
    def prepared(n):
        source = Pieces(
            train=[Piece("".join(map(chr, range(0x10000, 0x10000 + n))), False)], val=[Piece("\U00010000", True)]
        )
        return prepare(source, CHAR, tmp_path, progress=False)

    assert prepared((1 << 16) - 2).tokens("train").dtype == np.uint16
    wide = prepared((1 << 16) - 1)
    assert wide.tokens("train").dtype == np.uint32
    assert wide.tokens("train")[-1] == 1 << 16


def test_same_settings_reuse_the_folder_without_reading_or_writing(tmp_path, monkeypatch):
    source = Pieces()
    first = prepare(source, CHAR, tmp_path, progress=False)
    reads, written = source.reads, (first.folder / "tokens.bin").stat().st_mtime_ns
    monkeypatch.setattr("tril.data.cache.make_folder", lambda folder: pytest.fail(f"{folder} was created"))
    again = prepare(source, CHAR, tmp_path, progress=False)
    assert source.reads == reads > 0
    assert again.folder == first.folder and (again.folder / "tokens.bin").stat().st_mtime_ns == written


def test_every_changed_setting_gets_a_separate_folder(tmp_path):
    prepared = [
        prepare(Pieces(), CHAR, tmp_path, progress=False),
        prepare(Pieces(), TokenizerConfig(kind="byte"), tmp_path, progress=False),
        prepare(Pieces(), TokenizerConfig(kind="char", eot="</s>"), tmp_path, progress=False),
        prepare(Pieces(train=TRAIN[:-1]), CHAR, tmp_path, progress=False),
        prepare(Pieces(), CHAR, tmp_path, token_budget=4, progress=False),
        prepare(Pieces(), CHAR, tmp_path, val_token_budget=4, progress=False),
    ]
    assert len({each.folder for each in prepared}) == len(prepared) == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("damage", ["shorter", "no meta", "half a meta", "another fingerprint", "no tokenizer"])
def test_a_damaged_folder_is_prepared_again(tmp_path, damage):
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
    prepared = prepare(source, CHAR, tmp_path, progress=False)
    assert source.reads > 0
    np.testing.assert_array_equal(prepared.tokens("val"), [B, EOT, UNK, A, EOT])
    assert json.loads((folder / "meta.json").read_text())["fingerprint"] == json.loads(meta)["fingerprint"]


def test_an_exception_while_writing_leaves_no_files(tmp_path):
    class Broken(Pieces):
        def pieces(self, split):
            yield from super().pieces(split)
            if split == "val":
                names = sorted(path.name for path in tmp_path.iterdir())  # the lock and the temporary folder
                assert len(names) == 2 and names[0].startswith(".pieces-") and names[1].startswith(".tmp-pieces-")
                raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        prepare(Broken(), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_faster_process_is_kept(tmp_path, monkeypatch):
    """On a file system without locks."""
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))

    class Slower(Pieces):
        def pieces(self, split):
            if split == "val":
                self.faster = prepare(Pieces(), CHAR, tmp_path, progress=False)
                (self.faster.folder / "marker").touch()
            yield from super().pieces(split)

    source = Slower()
    assert prepare(source, CHAR, tmp_path, progress=False).folder == source.faster.folder
    assert (source.faster.folder / "marker").exists()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("empty", ["train", "val"])
def test_an_empty_part_is_refused(tmp_path, empty):
    with pytest.raises(ValueError, match=f"the {empty} part of pieces is empty.*data.val_fraction"):
        prepare(Pieces(**{empty: []}), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


REPEATED = Piece("to be or not to be, that is the question: " * 5, True)


def test_overlap_and_split_are_measured_stored_and_told(tmp_path, capsys, caplog):
    train = [Piece("abcdefghij klmnopq" * 20, True), Piece("x " + REPEATED.text, True)]
    source = Pieces(train=train, val=[Piece("only here. " * 30, True), REPEATED])
    prepared = prepare(source, TokenizerConfig(kind="byte"), tmp_path)
    overlap, n_val = prepared.meta["overlap"], 330 + len(REPEATED.text)
    covered = len(REPEATED.text) + 1  # and the end of the text
    assert overlap == {"tokens": covered, "share": covered / (n_val + 2), "passage_tokens": 150, "example": 331}
    share = n_val / (n_val + sum(len(piece.text) for piece in train))
    assert prepared.meta["split"] == {"rule": "two lists", "val_share": share}
    told = f"{100 * covered / (n_val + 2):.2f} % of the validation tokens lie in passages of 150 tokens"
    assert f"validation is {share:.1%} of the text (two lists); {told}" in capsys.readouterr().err
    [warning] = caplog.messages
    assert told in warning and "data.val_path; for example 'to be or not to be" in warning
    assert "\n" not in warning
    prepare(source, TokenizerConfig(kind="byte"), tmp_path)  # from the cache
    assert caplog.messages == [warning] * 2


def test_text_without_repetitions_gives_no_warning(tmp_path, caplog):
    source = Pieces(train=[Piece("abcdefghij" * 40, True)], val=[Piece("klmnopqrst" * 40, True)])
    assert prepare(source, TokenizerConfig(kind="byte"), tmp_path, progress=False).meta["overlap"]["tokens"] == 0
    little = Pieces(train=[REPEATED], val=[Piece("".join(map(str, range(6000))), True), REPEATED])
    share = prepare(little, TokenizerConfig(kind="byte"), tmp_path, progress=False).meta["overlap"]["share"]
    assert 0.008 < share < 0.01
    assert caplog.messages == []


def test_an_embedded_corpus_with_overlap_is_refused(tmp_path):
    source = Pieces(train=[REPEATED], val=[REPEATED], max_overlap=0.01)
    with pytest.raises(ValueError, match="data=pieces: 100.00 % of the validation tokens.*at most 1% is accepted"):
        prepare(source, TokenizerConfig(kind="byte"), tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
    source = Pieces(train=[REPEATED], val=[REPEATED], max_overlap=1.0)
    assert prepare(source, TokenizerConfig(kind="byte"), tmp_path, progress=False).meta["overlap"]["share"] == 1


def test_a_folder_of_version_0_1_is_measured(tmp_path):
    folder = prepare(Pieces(), CHAR, tmp_path, progress=False).folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({key: meta[key] for key in meta if key not in ("split", "overlap")}))
    again = prepare(Pieces(), CHAR, tmp_path, progress=False)
    assert again.folder == folder and again.meta["overlap"] == meta["overlap"] and again.meta["split"] == meta["split"]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_an_unwritable_cache_folder_is_refused(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to the cache folder.*data.cache_dir=FOLDER"):
        prepare(Pieces(), CHAR, tmp_path / folder, progress=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_os_error_and_leaves_no_files(tmp_path, monkeypatch):
    def build_on_a_full_disk(*arguments):
        [part] = tmp_path.glob(".tmp-*/*")
        (part / "tokenizer.json").symlink_to("/dev/full")
        return build(*arguments)

    monkeypatch.setattr(module, "build", build_on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(Pieces(), CHAR, tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


PREPARE = """
import sys
from tril.data import encoding, prepare
from tril.data.sources import file_formats, files
from tril.data.tokenizer import TokenizerConfig

def peak():  # KiB; not ru_maxrss, which starts with the peak of the parent process
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

encoding.BATCH_SIZE = file_formats.PIECE_SIZE = 1 << 14
before = peak()
prepare.prepare(files.Files(path=sys.argv[1]), TokenizerConfig(kind="byte"), sys.argv[2], progress=False)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_stays_flat(tmp_path):
    """3 MB of text in small batches: as Encoding objects, all tokens at once take about 300 MB."""
    (tmp_path / "text.txt").write_bytes(b"All work and no play makes this file quite dull to read.\n" * 53_000)
    done = run_python("-c", PREPARE, str(tmp_path / "text.txt"), str(tmp_path / "cache"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    print(f"grew by {int(done.stdout) / 1024:.0f} MiB")
    assert int(done.stdout) < 100 * 1024
