"""init_from=: what a run takes over from another model, what it records, and which sources are refused."""

import json
import re

import pytest
import torch
import yaml

from tests.conftest import tiny_gpt
from tests.contract.harness import BARE, merged, run, summary
from tests.foreign import folder_of, nanogpt_model, write_nanogpt
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.model.checkpoint import read_state, save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.hf import download, is_hub_name, read_hf
from tril.model.runs import load

# Without keys of the model and the tokenizer, which are the source's
RUN = [setting for setting in BARE if not setting.startswith(("model.", "data.tokenizer."))]
RUN = merged(RUN, "trainer.max_steps=2", "trainer.val_check_interval=2", "optim.schedule.warmup_steps=1")
NAME, COMMIT, OLD = "some-org/tiny.llama", "ab" * 20, "cd" * 20  # of a model on the hub, whose main is COMMIT
NANOGPT = "init_from=nanogpt:words/ckpt.pt"
REFUSED = [  # settings, and what the error names
    ("model.n_layers=2 model.pos=alibi", "model.n_layers=2, model.pos=alibi"),
    ("model=gpt2", "model=gpt2"),
    ("model.vocab_size=263", "model.vocab_size=263 must be at least 264"),
    ("data.tokenizer.vocab_size=300", "data.tokenizer.vocab_size=300"),
    (NANOGPT, "meta.pkl"),
    (f"{NANOGPT} data.tokenizer.kind=byte", "data.tokenizer.kind=byte"),
]


@pytest.fixture
def train(tmp_path, text):
    """A function that starts a run in tmp_path / "run"."""

    def train(*settings):
        done = run("train", *merged(RUN, f"data.path={text}", "hydra.run.dir=run", *settings), cwd=tmp_path)
        assert done.returncode in (0, 2), done.stderr
        return done

    return train


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a tokenizer of its own, biases, and rows that no token has."""
    path = tmp_path / "source.ckpt"
    model = tiny_gpt(vocab_size=264, context_length=32, n_kv_heads=2, bias=True, attn_dropout=0.1)
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    return path


def entry_of(run):
    return read_state(run / "checkpoints" / "last.ckpt")["tril"]


def test_a_run_takes_over_model_and_tokenizer_records_it_and_then_needs_no_source(tmp_path, train, source):
    before, folder = load(source), tmp_path / "run"
    changes = ("model.attn_dropout=0.25", "callbacks.causality={}")
    printed = train(f"init_from={source}", *changes).stdout
    lm, entry, result = load(folder), entry_of(folder), summary(folder)
    assert lm.config.to_dict() == before.config.to_dict() | {"attn_dropout": 0.25}
    assert (lm.tokenizer.to_str(), lm.eot) == (before.tokenizer.to_str(), EOT)
    assert entry["lineage"] == {"source": str(source), "step": None}
    assert entry["certificate"]["passed"] is True
    assert [result[f"init_from{suffix}"] for suffix in ("", "_step")] == [*entry["lineage"].values()]
    assert re.search(rf"\n  init from +{re.escape(str(source))}\n", printed)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    [file] = (tmp_path / "cache" / "taken_over").glob("*.json")
    assert "init_from" not in settings and settings["data"]["tokenizer"]["path"] == str(file)

    source.unlink(), file.unlink()
    folder.rename(moved := tmp_path / "moved")
    run("train", "resume=moved", "trainer.max_steps=4", cwd=tmp_path).succeeded()
    assert entry_of(moved)["lineage"] == entry["lineage"] and summary(moved)["init_from"] == str(source)
    content = torch.load(last := moved / "checkpoints/last.ckpt", weights_only=True)
    content["tril"]["lineage"]["source"] = "\x1b[2J"  # of somebody else
    torch.save(content, last)
    again = run("train", "resume=moved", "trainer.max_steps=5", cwd=tmp_path).succeeded()
    assert "\\x1b[2J" in again.stdout and "\x1b" not in again.stdout
    train(f"init_from={last}")
    lineage = entry_of(folder)["lineage"]
    assert (lineage["source"], lineage["step"]) == (str(last), 5)


@pytest.mark.parametrize(("settings", "named"), REFUSED)
def test_what_contradicts_the_source_is_refused_and_nothing_is_left(settings, named, tmp_path, train, source):
    write_nanogpt(tmp_path / "words" / "ckpt.pt", nanogpt_model(264))
    before = {*tmp_path.iterdir(), tmp_path / "cache"}
    train(f"init_from={source}", *settings.split()).refused(named)
    assert {*tmp_path.iterdir(), tmp_path / "cache"} == before


def publish(server, folder, commit, *revisions):
    """Serves a folder as the files of a commit, which branches, tags and its own name stand for."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    entry = {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "size": len(x), "oid": commit} for name, x in files.items()]
    answers = {f"revision/{revision}": entry for revision in (commit, *revisions)} | {f"tree/{commit}": tree}
    for path, answer in answers.items():
        server.files[f"/api/models/{NAME}/{path}"] = json.dumps(answer).encode(), {"Content-Type": "application/json"}
    for name, content in files.items():
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit[:4]}-{name}"'}
        server.files[f"/{NAME}/resolve/{commit}/{name}"] = content, headers


def test_a_model_of_the_hub_is_downloaded_once_at_its_revision_which_a_run_records(
    tmp_path, train, server, hub, monkeypatch
):
    from huggingface_hub import constants

    def downloaded():
        return {path.rpartition("/")[2] for method, path in server.requests if method == "GET" and "/resolve/" in path}

    new = folder_of("SmolLM", tmp_path / "new", max_shard_size="20KB")
    (new / "onnx").mkdir()
    for name in ("pytorch_model.bin", "README.md", "onnx/model.safetensors"):
        (new / name).write_bytes(b"not needed")
    publish(server, folder_of("GPT-2", tmp_path / "old"), OLD, "v1")
    publish(server, new, COMMIT, "main")
    train(f"init_from=hf:{NAME}")
    assert entry_of(tmp_path / "run")["lineage"]["source"] == f"hf:{NAME}@{COMMIT}"
    shards = {path.name for path in new.glob("model-*.safetensors")}
    assert downloaded() == shards | {"config.json", "tokenizer.json"}
    server.requests.clear()
    folder, name = download(NAME)
    assert name == f"{NAME}@{COMMIT}" and downloaded() == set()
    expected, found = (read_hf(path).language_model() for path in (new, folder))
    ids = torch.randint(257, (2, 20))
    assert found.config == expected.config and torch.equal(found.model(ids), expected.model(ids))
    for revision in ("v1", OLD):
        old, old_name = download(f"{NAME}@{revision}")
        assert old_name == f"{NAME}@{OLD}" and read_hf(old).config.pos == "learned"
    server.files["/api/models/some-org/none/revision/main"] = None, {"X-Error-Code": "RepoNotFound"}
    train("init_from=hf:some-org/none", "hydra.run.dir=none").refused("some-org/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub("http://127.0.0.1:1")
    assert download(NAME) == (folder, name) and not (tmp_path / "none").exists()


def test_names_of_the_hub_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_hub_name, ("my-org/Llama-3.2_1B@v1.0", "org/name@refs/pr/1")))
    others = ("name", "/org/name", "../org/name", "a/b/c", "org/", "~/org", "org/name@", "org\\name", "")
    assert not any(map(is_hub_name, others))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_name("org/name") and is_hub_name("org/name@main")
