"""init_from=hf:ORG/NAME: files come from a local server in place of the hub, and from the cache without it."""

import json
import re

import pytest
import torch

from tests.conftest import assert_refused
from tests.model.interop.folders import folder_of
from tests.test_init_from import train
from tril.model.checkpoint import read_state
from tril.model.interop.hf import download, is_hub_name, read_hf

NAME, COMMIT, OLD = "some-org/tiny.llama", "ab" * 20, "cd" * 20
TYPE = {"Content-Type": "application/json"}


def publish(server, folder, commit, *revisions):
    """Serves a folder as the files of a commit, which branches, tags and its own name stand for."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    entry = {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
    tree = [
        {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{i:040x}"}
        for i, (name, path) in enumerate(zip(names, files, strict=True))
    ]
    for revision in (commit, *revisions):
        server.files[f"/api/models/{NAME}/revision/{revision}"] = json.dumps(entry).encode(), TYPE
    server.files[f"/api/models/{NAME}/tree/{commit}"] = json.dumps(tree).encode(), TYPE
    for name, path in zip(names, files, strict=True):
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit[:4]}-{name}"'}
        server.files[f"/{NAME}/resolve/{commit}/{name}"] = path.read_bytes(), headers


def downloaded(server) -> set[str]:
    return {path.rpartition("/")[2] for method, path in server.requests if method == "GET" and "/resolve/" in path}


@pytest.fixture
def source(server, hub, tmp_path):
    """A model in two commits, of which main is the second, and files that are not needed."""
    old = folder_of("GPT-2", tmp_path / "old")
    new = folder_of("SmolLM", tmp_path / "new", max_shard_size="20KB")
    (new / "onnx").mkdir()
    for name in ("pytorch_model.bin", "README.md", "consolidated.safetensors", "onnx/model.safetensors"):
        (new / name).write_bytes(b"not needed")
    publish(server, old, OLD, "v1")
    publish(server, new, COMMIT, "main")
    return new


def test_what_the_model_needs_is_downloaded_once(server, source):
    folder, name = download(NAME)
    assert name == f"{NAME}@{COMMIT}"
    shards = {path.name for path in source.glob("model-*.safetensors")}
    assert downloaded(server) == shards | {"config.json", "tokenizer.json"}
    assert len(shards) > 1
    expected, found = (read_hf(path).language_model() for path in (source, folder))
    ids = torch.randint(257, (2, 20))
    assert found.config == expected.config and torch.equal(found.model(ids), expected.model(ids))
    server.requests.clear()
    assert download(NAME) == (folder, name) and downloaded(server) == set()


def test_a_revision(server, source):
    for revision in ("v1", OLD):
        folder, name = download(f"{NAME}@{revision}")
        assert name == f"{NAME}@{OLD}" and read_hf(folder).config.pos == "learned"
    assert read_hf(download(NAME)[0]).config.pos == "rope"


def test_a_run_records_the_commit(tmp_path, text, source):
    done = train(tmp_path, text, f"init_from=hf:{NAME}", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    lineage = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt")["tril"]["lineage"]
    assert lineage["source"] == f"hf:{NAME}@{COMMIT}"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["init_from"] == f"hf:{NAME}@{COMMIT}"


@pytest.mark.slow  # the library waits before it tries again
def test_a_download_that_ends_early_can_be_repeated(server, source):
    path = f"/{NAME}/resolve/{COMMIT}/tokenizer.json"
    content, headers = server.files[path]
    server.files[path] = content[:100], headers | {"Content-Length": str(len(content))}
    with pytest.raises(OSError, match=rf"{re.escape(NAME)} is no folder, and cannot be read from the hub") as error:
        download(NAME)
    assert "\n" not in str(error.value)
    server.files[path] = content, headers
    folder, _ = download(NAME)
    assert (folder / "tokenizer.json").read_bytes() == content and read_hf(folder).config.pos == "rope"


def test_without_network_the_cache_is_used(tmp_path, hub, source, monkeypatch):
    from huggingface_hub import constants

    folder, name = download(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub("http://127.0.0.1:1")
    assert download(NAME) == (folder, name)
    with pytest.raises(OSError, match="cannot be read from the hub") as error:
        download("some-org/another")
    assert "\n" not in str(error.value)


def test_refused_in_one_line(tmp_path, text, server, source):
    server.files["/api/models/some-org/none/revision/main"] = None, {"X-Error-Code": "RepoNotFound"}
    before = sorted(path.name for path in tmp_path.iterdir())
    done = train(tmp_path, text, "init_from=hf:some-org/none")
    assert_refused(done, "some-org/none is no folder, and cannot be read from the hub (", "check name, revision and")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "hub") == before


def test_names_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("org/name", "org/name@main", "my-org/Llama-3.2_1B@v1.0", "org/name@refs/pr/1")
    assert all(map(is_hub_name, names))
    others = ("name", "/org/name", "./org/name", "../org/name", "a/b/c", "org/", "~/org", "org/name@", "org\\name", "")
    assert not any(map(is_hub_name, others))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_name("org/name") and is_hub_name("org/name@main")
