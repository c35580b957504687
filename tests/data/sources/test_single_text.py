"""One text: its split by position and its download."""

import hashlib

import pytest

from tests.data.sources.reading import text_of
from tril.data.sources import single_text
from tril.data.sources.single_text import SingleText


def test_text_is_split_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    source = SingleText(path=str(tmp_path / "t.txt"))
    assert text_of(source, "train") == text[: int(1001 * 0.9)]
    assert text_of(source, "val") == text[int(1001 * 0.9) :]
    assert not any(piece.ends_document for split in ("train", "val") for piece in source.pieces(split))


def test_text_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    content = b"To be, or not\n"
    server.files["/input.txt"] = content, {}
    monkeypatch.setattr(single_text, "URL", f"{server.url}/input.txt")
    source = SingleText(cache_dir=str(tmp_path))
    with pytest.raises(OSError, match="has another text than tiny shakespeare; .* data.path=FILE"):
        source.fingerprint()
    assert list(tmp_path.iterdir()) == []  # the wrong content is not kept
    monkeypatch.setattr(single_text, "SHA256", hashlib.sha256(content).hexdigest())
    assert text_of(source, "train") + text_of(source, "val") == content.decode()
    assert source.fingerprint()["sha256"] == single_text.SHA256 and len(server.requests) == 2


@pytest.mark.parametrize("trouble", ["404", "no server"])
def test_failed_download_is_one_line(server, tmp_path, trouble, monkeypatch):
    url = {"404": f"{server.url}/input.txt", "no server": "http://127.0.0.1:1/x"}[trouble]
    monkeypatch.setattr(single_text, "URL", url)
    with pytest.raises(OSError, match="cannot download.*data.path=FILE") as error:
        SingleText(cache_dir=str(tmp_path)).fingerprint()
    assert "\n" not in str(error.value) and url in str(error.value)


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(OSError, match="data.path=.*none.txt does not exist"):
        SingleText(path=str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match="latin.txt is not UTF-8 text"):
        text_of(SingleText(path=str(tmp_path / "latin.txt")), "train")
