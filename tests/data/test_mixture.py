"""The sources of a mixture, their weights, their common tokenizer, and what is refused."""

import json

import pytest

from tril.data.config import parse
from tril.data.datamodule import TextDataModule
from tril.data.mixture import block_counts
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.stdlib import StandardLibrary
from tril.scripts.cli.errors import message_of

SHIPPED = {"source": "mixture"}
WIKI = {"source": "hub", "repo": "Salesforce/wikitext", "config": "wikitext-103-raw-v1", "row_ends_document": False}
PRESETS = {"wikitext103": WIKI | {"token_budget": 5000, "batch_size": 3}}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The folder with a.txt, b.txt and c.md, as the working directory."""
    (tmp_path / "a.txt").write_text("".join(f"alpha {i} and alpha {i * i}\n" for i in range(300)))
    (tmp_path / "b.txt").write_text("".join(f"beta: {i + 7}; beta: {3 * i}\n" for i in range(200)))
    (tmp_path / "c.md").write_text("".join(f"gamma {i}!\n" for i in range(100)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(sources, **settings):
    tokenizer = {"vocab_size": 300} | settings.pop("tokenizer", {})
    return parse(SHIPPED | {"sources": sources, "tokenizer": tokenizer, "cache_dir": "cache"} | settings).prepare()


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.7, 0.3], [700, 300]),
        ([7, 3], [700, 300]),
        ([1, 1, 1], [334, 333, 333]),
        ([1, 2, 4], [143, 286, 571]),  # 142.9, 285.7 and 571.4
        ([0.9995, 0.0005], [1000, 0]),  # a tie: the first one
        ([0.999, 0.001], [999, 1]),
        ([1e308, 1e308], [500, 500]),
    ],
)
def test_windows_in_a_block_by_largest_remainder(weights, counts):
    assert block_counts(weights) == counts


def test_a_source_is_a_group_with_its_settings_or_a_path(texts):
    members = parse(SHIPPED | {"sources": {"wikitext103": 3, "a.txt": 2, "stdlib": 5}}, PRESETS).members
    assert list(members) == ["a.txt", "stdlib", "wikitext103"]
    assert [member.count for member in members.values()] == [200, 500, 300]
    assert members["a.txt"].source == Files(path="a.txt") and members["stdlib"].source == StandardLibrary()
    wikitext = Hub(repo="Salesforce/wikitext", config="wikitext-103-raw-v1", row_ends_document=False)
    assert members["wikitext103"].source == wikitext
    assert members["wikitext103"].budgets == {"train": 5000, "val": None}
    assert members["stdlib"].budgets == members["a.txt"].budgets == {"train": None, "val": None}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (None, "data.sources={} must have at least two sources, such as data.sources={stdlib: 0.7, notes/*.md: 0.3}"),
        ({"a.txt": 1}, "data.sources={a.txt: 1} must have at least two sources"),
        ({"a.txt": 1, "b.txt": 0}, "the weight 0 of b.txt must be a number above 0, such as 0.3; change it"),
        ({"a.txt": 1, "b.txt": -0.5}, "the weight -0.5 of b.txt must be a number above 0"),
        ({"a.txt": 1, "b.txt": float("nan")}, "the weight nan of b.txt must be"),
        ({"a.txt": 1, "b.txt": float("inf")}, "the weight inf of b.txt must be"),
        ({"a.txt": 1, "b.txt": True}, "the weight True of b.txt must be"),
        ({"a.txt": 1, "b.txt": None}, "the weight None of b.txt must be"),
        ({"a.txt": 1, "b.txt": "half"}, "the weight half of b.txt must be"),
        ({"a.txt": 1, "b.txt": 0.0001}, "the weight 0.0001 of b.txt must be at least 0.05% of the sum of all weights"),
        ({"a.txt": 1, 7: 1}, "data.sources: the name 7 must be a text"),
        ({"a.txt": 1, "stdlb": 1}, "data.sources: stdlb is no source and no path that exists; did you mean stdlib?"),
        ({"a.txt": 1, "zzz": 1}, "zzz is no source and no path that exists; give a path, or one of hub,"),
        ({"a.txt": 1, "mixture": 1}, "data.sources: mixture is no text; give the name of a source, or a path"),
        ({"a.txt": 1, "files": 1}, "data.sources: files is no text; give"),
        ({"a.txt": 1, "none/*.md": 1}, "data.sources: none/*.md matches no file"),
        ({"a.txt": 1, "*": 1}, "data.sources: * and a.txt both contain "),
        ({"*.txt": 1, "a.txt": 1}, "data.sources: *.txt and a.txt both contain "),
        ({"./a.txt": 1, "a.txt": 1}, "data.sources: ./a.txt and a.txt both contain "),
        (["a.txt", "b.txt"], "data.sources=['a.txt', 'b.txt'] must be a valid dictionary"),
    ],
)
def test_mistakes_are_refused_in_one_line(texts, sources, message):
    (texts / "picture.png").touch()
    with pytest.raises((ValueError, OSError)) as error:
        parse(SHIPPED | {"sources": sources})
    line = message_of(error.value)
    assert message in line and "\n" not in line


def test_two_copies_of_a_text_are_refused(texts):
    for name in ("one", "two"):
        (texts / name).mkdir()
        (texts / name / "a.txt").write_text("the same text\n" * 30)
    with pytest.raises(ValueError, match="data.sources: one and two are the same text; leave out one of them"):
        prepared({"one": 1, "two": 1})


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_all_sources_have_one_tokenizer_that_knows_their_text(texts, kind):
    found = prepared({"a.txt": 1, "b.txt": 1}, tokenizer={"kind": kind})
    tokenizers = [text.tokenizer.to_str() for text in found.texts.values()]
    assert tokenizers[0] == tokenizers[1] == found.tokenizer.to_str()
    for name, text in found.texts.items():
        ids = [*text.tokens("train").tolist(), *text.tokens("val").tolist()]
        decoded = text.tokenizer.decode([i for i in ids if i != text.meta["eot_id"]])
        assert decoded == (texts / name).read_text()
    if kind == "bpe":  # merges of both
        assert {" alpha", " beta"} <= {token.replace("Ġ", " ") for token in found.tokenizer.get_vocab()}


def test_the_meta_of_all_sources(texts):
    found = prepared({"a.txt": 3, "b.txt": 1})
    parts = [text.meta for text in found.texts.values()]
    for split in ("train", "val"):
        for key in ("tokens", "bytes", "documents"):
            assert found.meta["counts"][split][key] == sum(part["counts"][split][key] for part in parts) > 0
    assert {name: source["share"] for name, source in found.meta["sources"].items()} == {"a.txt": 0.75, "b.txt": 0.25}
    assert [source["fingerprint"] for source in found.meta["sources"].values()] == [p["fingerprint"] for p in parts]
    json.dumps(found.meta)


def test_the_data_module_gives_the_windows_of_all_sources(texts):
    """Training in their shares, validation in a loader for each; its first windows are of both."""
    for name, char in (("a.txt", "a"), ("b.txt", "b")):
        (texts / name).write_text(char * 3000)
    settings = {"sources": {"b.txt": 1, "a.txt": 3}, "tokenizer": {"kind": "char"}, "batch_size": 1000}
    data = TextDataModule(parse(SHIPPED | settings | {"cache_dir": "cache"}), context_length=16)
    ids = [data.tokenizer.token_to_id(char) for char in "ab"]
    inputs, _ = next(iter(data.train_dataloader()))
    assert [(inputs == i).all(1).sum().item() for i in ids] == [750, 250]
    loaders = data.val_dataloader()
    assert [{*next(iter(loader))[0][:8].flatten().tolist()} for loader in loaders] == [{ids[0]}, {ids[1]}]
    assert data.first_val_windows(4)[0][:, 0].tolist() == [ids[0], ids[0], ids[1], ids[1]]
    assert data.first_val_windows(3)[0][:, 0].tolist() == [ids[0], ids[0], ids[1]]


def test_an_unchanged_source_is_prepared_once(texts, monkeypatch):
    """Other weights, another order and another partner read no text again; another text changes the fingerprint."""
    bytes_ = {"tokenizer": {"kind": "byte"}}
    first = prepared({"a.txt": 1, "b.txt": 1}, **bytes_)
    trained = prepared({"a.txt": 1, "b.txt": 1})
    pieces = Files.pieces

    def read_only_c(self, split):
        assert self.path == "c.md", f"{self.path} is read again"
        return pieces(self, split)

    monkeypatch.setattr(Files, "pieces", read_only_c)
    other = prepared({"b.txt": 1, "a.txt": 4})
    assert other.meta["fingerprint"] == trained.meta["fingerprint"]
    assert [text.folder for text in other.texts.values()] == [text.folder for text in trained.texts.values()]
    with_c = prepared({"a.txt": 1, "c.md": 1}, **bytes_)
    assert with_c.texts["a.txt"].folder == first.texts["a.txt"].folder
    assert len({each.meta["fingerprint"] for each in (first, trained, with_c)}) == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "meta.json"])
def test_a_damaged_tokenizer_is_trained_again(texts, name):
    before = prepared({"a.txt": 1, "b.txt": 1})
    [folder] = (texts / "cache").glob("tokenizer-*")
    content = (folder / "tokenizer.json").read_bytes()
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    after = prepared({"a.txt": 1, "b.txt": 1})
    assert after.meta == before.meta and (folder / "tokenizer.json").read_bytes() == content


def test_budgets_are_of_each_source(texts):
    sources = {"a.txt": {"weight": 1, "source": "files", "path": "a.txt", "token_budget": 70}, "b.txt": 1}
    found = prepared(sources, tokenizer={"kind": "byte"}, val_token_budget=20)
    assert found.texts["a.txt"].meta["budgets"] == {"train": 70, "val": 20}
    assert found.texts["b.txt"].meta["budgets"] == {"train": None, "val": 20}
