"""kind=hub: a tokenizer.json of the hub, pinned to a commit."""

import time

import pytest

from tril.data.tokenizer import TokenizerConfig, build

COMMITS = {"main": "ab" * 20, "v1": "cd" * 20}
BYTE = build(TokenizerConfig(kind="byte"), [])
BPE = build(TokenizerConfig(vocab_size=260), [["the cat"] * 9])


@pytest.fixture
def publish(server, hub):
    """Publishes a tokenizer under a revision and its commit."""

    def publish(tokenizer, revision, commit):
        content = tokenizer.to_str().encode()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hash(content)}"'}
        for name in (revision, commit):
            server.files[f"/owner/name/resolve/{name}/tokenizer.json"] = content, headers

    publish(BYTE, "main", COMMITS["main"])
    publish(BPE, "v1", COMMITS["v1"])
    return publish


def config(revision="main"):
    return TokenizerConfig(kind="hub", path="owner/name", revision=revision)


def test_a_revision_is_resolved_to_its_commit_and_that_tokenizer_is_built(publish):
    for revision, tokenizer in (("main", BYTE), ("v1", BPE)):
        expected = {"kind": "hub", "eot": "<|endoftext|>", "path": "owner/name", "revision": COMMITS[revision]}
        assert config(revision).fingerprint() == expected
        assert build(config(revision), []).to_str() == tokenizer.to_str()


def test_one_start_downloads_once_and_a_later_one_needs_no_network(publish, server, hub):
    one = config()
    expected = one.fingerprint()
    build(one, [])
    assert [method for method, _ in server.requests].count("GET") == 1
    hub("http://127.0.0.1:1")
    assert config().fingerprint() == expected
    assert build(config(), []).to_str() == BYTE.to_str()


@pytest.mark.parametrize("trouble", ["no network", "no such repository", "no such revision", "no tokenizer"])
def test_failures_are_one_line(publish, server, hub, trouble, monkeypatch):
    if trouble == "no network":
        hub("http://127.0.0.1:1")
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    elif trouble == "no tokenizer":
        server.files["/owner/name/resolve/main/tokenizer.json"] = b"{}", {"X-Repo-Commit": "ab" * 20, "ETag": '"x"'}
    path = "owner/other" if trouble == "no such repository" else "owner/name"
    revision = "v9" if trouble == "no such revision" else "main"
    with pytest.raises(OSError, match=f"data.tokenizer.path={path}.*; check path, revision and network") as error:
        build(TokenizerConfig(kind="hub", path=path, revision=revision), [])
    assert "\n" not in str(error.value)
