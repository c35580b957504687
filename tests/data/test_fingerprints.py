"""Literal fingerprints: if one changes, prepared folders are no longer found and runs cannot be resumed."""

import sysconfig
from types import SimpleNamespace

import pytest

from tril.data import prepare
from tril.data.sources import stdlib
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig

BYTE = TokenizerConfig(kind="byte")
TOKENIZER_JSON = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{"id": 0, "content":
"<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
"normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "WordLevel",
"vocab": {"<|endoftext|>": 0, "a": 1}, "unk_token": "a"}}
"""
EXPECTED = {
    "files": "f4cf202942927c32",
    "val_path": "61aed45de68459f7",
    "shakespeare": "e8c9d9dbf29f87b2",
    "stdlib": "01bbfd81e7b3290b",
    "hub folder": "092eb04a763f3d90",
    "budgets": "7ed82148a350bb9c",
    "bpe": "a36c3e33823cbf1c",
    "char": "4e40355ee1009bb7",
    "file": "8098ff2cc661ba86",
}


@pytest.fixture
def text(tmp_path):
    """A folder `text` with the same rows as plain text and as JSON lines."""
    folder = tmp_path / "text"
    folder.mkdir()
    rows = [f"row {i}" for i in range(20)]
    (folder / "a.txt").write_bytes("\n".join([*rows, ""]).encode())
    (folder / "train.jsonl").write_bytes("".join(f'{{"text": "{row}"}}\n' for row in rows).encode())
    return folder


@pytest.mark.parametrize("case", EXPECTED)
def test_fingerprints_are_the_literal_ones(case, text, tmp_path, monkeypatch):
    source, config, budgets = Files(path=str(text / "a.txt"), val_fraction=0.1), BYTE, {}
    match case:
        case "val_path":
            source = Files(path=str(text), val_path=str(text / "a.txt"))
        case "shakespeare":
            source = SingleText(path=str(text / "a.txt"))
        case "hub folder":
            monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
            (text / "a.txt").unlink()
            source = Hub(repo=str(text), val_split=None, val_fraction=0.2, streaming=True)
        case "stdlib":
            for name in ("a.py", "b/c.py", "d.py"):
                (text / name).parent.mkdir(exist_ok=True)
                (text / name).write_bytes(f"pass  # {name}\n".encode())
            monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(text)})
            monkeypatch.setattr(stdlib, "sys", SimpleNamespace(version_info=(3, 11, 0, "final", 0)))
            source = StandardLibrary(val_fraction=0.5)
        case "budgets":
            budgets = {"token_budget": 9, "val_token_budget": 5}
        case "bpe":
            config = TokenizerConfig(vocab_size=260)
        case "char":
            config = TokenizerConfig(kind="char")
        case "file":
            (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON.encode())
            config = TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"))
    prepared = prepare.prepare(source, config, tmp_path / "cache", progress=False, **budgets)
    assert prepared.meta["fingerprint"][:16] == EXPECTED[case]
    assert prepared.folder.name == f"{source.name}-{EXPECTED[case]}"
