"""Sources: which text, in which part, in what pieces, and when they are the same."""

import hashlib
import http.server
import sysconfig
import threading
import tracemalloc

import pytest

from tril.data.sources import base
from tril.data.sources.base import Piece, cut, digest_files, in_split
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary


def text_of(source, split):
    return "".join(piece.text for piece in source.pieces(split))


def documents(source, split):
    found = [""]
    for piece in source.pieces(split):
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    assert found.pop() == ""
    return found


def test_cut_keeps_every_character_and_ends_at_lines(monkeypatch):
    monkeypatch.setattr(base, "PIECE_SIZE", 5)
    assert list(cut("ab\ncd\nefghijkl\n")) == [
        Piece("ab\n", False), Piece("cd\n", False), Piece("efghi", False), Piece("jkl\n", True)
    ]  # fmt: skip
    assert list(cut("", True)) == []
    assert list(cut("abcde", False)) == [Piece("abcde", False)]


def test_hash_split_is_fixed_and_has_the_right_share():
    # the definition, spelled out once more
    share = int.from_bytes(hashlib.sha256(b"abc.py").digest()[:8], "big") / 2**64
    assert in_split("abc.py", "val", share + 1e-9) and not in_split("abc.py", "val", share - 1e-9)
    val = [str(i) for i in range(20_000) if in_split(str(i), "val", 0.05)]
    assert abs(len(val) - 1000) < 5 * 31  # five standard deviations of a binomial
    assert not any(in_split(key, "train", 0.05) for key in val)


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    for name, text in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if "latin" not in name else b"caf\xe9")
    for name in (
        "test/t.py",
        "pkg/tests/t.py",
        "idle_test/t.py",
        "site-packages/s.py",
        "config-3.11/c.py",
        "lib-dynload/l.py",
        "n.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("never")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = StandardLibrary(val_fraction=0.5)
    assert [name for name, _ in source.files()] == sorted(kept)
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(kept.values())
    before = source.fingerprint()
    assert before == StandardLibrary(val_fraction=0.5).fingerprint() != StandardLibrary(val_fraction=0.4).fingerprint()
    (tmp_path / "a.py").write_text("A")
    assert source.fingerprint() != before


def test_this_standard_library_is_about_what_the_readme_says():
    source = StandardLibrary()
    train, val = (sum(len(piece.text) for piece in source.pieces(split)) for split in ("train", "val"))
    assert 8e6 < train + val < 30e6
    assert 0.02 < val / (train + val) < 0.10


def test_shakespeare_splits_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    source = SingleText(path=str(tmp_path / "t.txt"))
    assert text_of(source, "train") == text[: int(1001 * 0.9)]
    assert text_of(source, "val") == text[int(1001 * 0.9) :]
    assert not any(piece.ends_document for split in ("train", "val") for piece in source.pieces(split))


@pytest.fixture
def server():
    """A web server on this machine that answers every request with its `content`, or 404 when that is None."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200 if self.server.content is not None else 404)
            self.end_headers()
            self.wfile.write(self.server.content or b"")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.requests = b"To be, or not\n", 0
        server.url = f"http://127.0.0.1:{server.server_port}/input.txt"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_shakespeare_is_downloaded_once_and_checked(server, tmp_path):
    right = hashlib.sha256(server.content).hexdigest()
    source = SingleText(url=server.url, sha256=right, cache_dir=str(tmp_path))
    assert text_of(source, "train") + text_of(source, "val") == "To be, or not\n"
    assert source.fingerprint()["sha256"] == right
    assert server.requests == 1
    with pytest.raises(OSError, match="has changed.*data.path=FILE"):
        SingleText(url=server.url + "?other", sha256="0" * 64, cache_dir=str(tmp_path)).fingerprint()
    assert len(list(tmp_path.iterdir())) == 1  # nothing is left of the wrong one


@pytest.mark.parametrize("trouble", ["404", "nobody there", "no address"])
def test_failed_download_is_one_clear_line(server, tmp_path, trouble):
    server.content = None
    url = {"404": server.url, "nobody there": "http://127.0.0.1:1/x", "no address": "input.txt"}[trouble]
    with pytest.raises(OSError, match="cannot download.*data.path=FILE") as error:
        SingleText(url=url, cache_dir=str(tmp_path)).fingerprint()
    assert "\n" not in str(error.value) and url in str(error.value)


def test_wrong_values(tmp_path):
    with pytest.raises(OSError, match="no such file"):
        SingleText(path=str(tmp_path / "none.txt"))
    for fraction in (0, 1, -0.1, "x", True):
        with pytest.raises(ValueError, match="data.val_fraction"):
            StandardLibrary(val_fraction=fraction)


def test_a_file_is_hashed_piece_by_piece(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(20_000_000))
    tracemalloc.start()
    try:
        digest = digest_files([("text.txt", file)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert (
        digest
        == hashlib.sha256(b"text.txt\0" + hashlib.sha256(bytes(20_000_000)).hexdigest().encode() + b"\0").hexdigest()
    )
