"""The hub source on a local folder of parquet, and how it resolves revisions."""

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tril.data.sources.hub import Hub

ROOT = Path(__file__).parents[3]
TEXTS = {"train": [f"story {i}" for i in range(300)] + ["", None], "validation": ["val one", "val two"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    for split, texts in TEXTS.items():
        path = tmp_path / "Some Stories" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), path)
    return str(tmp_path / "Some Stories")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_both_splits(folder, streaming):
    hub = Hub(repo=folder, streaming=streaming)
    assert [tuple(piece) for piece in hub.pieces("train")] == [(text, True) for text in TEXTS["train"][:300]]
    assert [tuple(piece) for piece in hub.pieces("val")] == [("val one", True), ("val two", True)]
    assert hub.name == "some-stories"


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_split_by_hash_without_a_validation_split(folder, streaming):
    hub = Hub(repo=folder, val_split=None, val_fraction=0.2, streaming=streaming, row_ends_document=False)
    train, val = ([piece.text for piece in hub.pieces(split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(TEXTS["train"][:300])
    assert 30 < len(val) < 90
    assert not any(piece.ends_document for piece in hub.pieces("train"))


def test_revision_of_a_folder_is_its_content(folder, tmp_path):
    before = Hub(repo=folder).fingerprint()
    assert before == Hub(repo=folder, streaming=True).fingerprint()  # how it is read does not matter
    assert before != Hub(repo=folder, val_split=None).fingerprint()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new"]}), f"{folder}/train-00000-of-00001.parquet")
    assert before != Hub(repo=folder).fingerprint()


def test_json_lines_are_streamed_as_well(folder, tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS["train"]))
    for streaming in (False, True):
        hub = Hub(repo=str(tmp_path / "json"), val_split=None, val_fraction=1e-9, streaming=streaming)
        assert [piece.text for piece in hub.pieces("train")] == TEXTS["train"][:300]


@pytest.mark.parametrize("streaming", [False, True])
def test_mistakes_are_one_line(folder, streaming):
    with pytest.raises(OSError, match="cannot read the data set.*check name, splits") as error:
        list(Hub(repo=folder, train_split="nope", streaming=streaming).pieces("train"))
    assert "\n" not in str(error.value) and "nope" in str(error.value) and "validation" in str(error.value)
    with pytest.raises(ValueError, match="no field 'body'; there are text, id"):
        list(Hub(repo=folder, text_field="body", streaming=streaming).pieces("train"))
    with pytest.raises(ValueError, match="data.train_split=train\\[:1%\\]: must be the name of a whole split"):
        Hub(repo=folder, train_split="train[:1%]")
    with pytest.raises(ValueError, match="neither a folder nor a name"):
        Hub(repo="/nowhere/to be found")
    with pytest.raises(ValueError, match="the same as data.train_split"):
        Hub(repo=folder, val_split="train")


def test_a_pinned_commit_needs_no_network(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("asked the network"))
    assert Hub(repo="owner/name", revision="ab" * 20).fingerprint()["revision"] == "ab" * 20


RESOLVE = "from tril.data.sources.hub import Hub; print(Hub(repo='owner/name', revision='v1').resolved_revision)"


def resolve(endpoint):
    """The resolved revision in a fresh process, because the hub's address is read when its library is imported."""
    environment = {"HF_ENDPOINT": endpoint, "PATH": "", "HOME": "/nonexistent"}
    return subprocess.run([sys.executable, "-c", RESOLVE], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_a_branch_is_resolved_by_the_hub():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path.startswith("/api/datasets/owner/name/revision/v1")
            body = json.dumps({"id": "owner/name", "sha": "cd" * 20} if known else {"error": "unknown"}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        answer = resolve(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert answer.stdout.strip() == "cd" * 20, answer.stderr


def test_an_unreachable_hub_is_one_clear_line():
    answer = resolve("http://127.0.0.1:1")
    assert "OSError: cannot read the data set owner/name" in answer.stderr.splitlines()[-1]
    assert "data.repo=FOLDER" in answer.stderr.splitlines()[-1]
