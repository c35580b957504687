"""The hub source on a local folder of parquet, and how it resolves revisions."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tril.data.sources.hub import Hub

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
    assert [piece[:2] for piece in hub.pieces("train")] == [(text, True) for text in TEXTS["train"][:300]]
    assert [piece[:2] for piece in hub.pieces("val")] == [("val one", True), ("val two", True)]
    assert hub.name == "some-stories"


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_split_by_hash_without_a_validation_split(folder, streaming):
    hub = Hub(repo=folder, val_split=None, val_fraction=0.2, streaming=streaming, row_ends_document=False)
    train, val = ([piece.text for piece in hub.pieces(split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(TEXTS["train"][:300])
    assert 30 < len(val) < 90
    assert not any(piece.ends_document for piece in hub.pieces("train"))


def test_revision_of_a_folder_is_a_hash_of_its_files(folder, tmp_path):
    before = Hub(repo=folder).fingerprint()
    assert before == Hub(repo=folder, streaming=True).fingerprint()  # streaming does not change the text
    assert before != Hub(repo=folder, val_split=None).fingerprint()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new"]}), f"{folder}/train-00000-of-00001.parquet")
    assert before != Hub(repo=folder).fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_mistakes_are_refused_in_one_line(folder, streaming):
    with pytest.raises(OSError, match="cannot read the data set.*check name, splits") as error:
        list(Hub(repo=folder, train_split="nope", streaming=streaming).pieces("train"))
    assert "\n" not in str(error.value) and "nope" in str(error.value) and "validation" in str(error.value)
    with pytest.raises(ValueError, match="has no field 'body'; choose one with data.text_field=NAME: text, id"):
        list(Hub(repo=folder, text_field="body", streaming=streaming).pieces("train"))
    with pytest.raises(OSError, match="cannot read the data set /nowhere/to be found .*check name"):
        Hub(repo="/nowhere/to be found").fingerprint()
    with pytest.raises(ValueError, match="data.val_split=train must differ from data.train_split"):
        Hub(repo=folder, val_split="train")


def test_a_branch_is_resolved_by_the_hub(server, hub):
    content = json.dumps({"id": "owner/name", "sha": "cd" * 20}).encode()
    server.files["/api/datasets/owner/name/revision/v1"] = content, {"Content-Type": "application/json"}
    assert Hub(repo="owner/name", revision="v1").fingerprint()["revision"] == "cd" * 20
    with pytest.raises(OSError, match="cannot read the data set owner/name .*revision v2"):
        Hub(repo="owner/name", revision="v2").fingerprint()
