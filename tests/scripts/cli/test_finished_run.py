"""A run folder is read back, its text is compared with that of the run, and windows are evenly spaced."""

import pytest
import torch
import yaml

from tests.conftest import tiny_gpt
from tril.data.config import parse
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.cli.finished_run import documents_of_windows, evenly_spaced_windows, read_run, validation_tokens


@pytest.fixture
def checkpoint(tmp_path, text, monkeypatch):
    """A checkpoint in a run folder, with the metadata of `text`."""
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    data = {"source": "files", "path": str(text), "tokenizer": {"kind": "byte"}, "batch_size": 2}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"data": data, "folder": "${oc.env:HOME}"}))
    prepared = parse(data).prepare()
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    save(path, LanguageModel(tiny_gpt(vocab_size=257), prepared.tokenizer, "<|endoftext|>"), **prepared.meta)
    return path


def test_a_run_has_settings_metadata_and_the_validation_tokens_of_its_text(checkpoint, text, tmp_path):
    run = read_run(checkpoint)
    assert run.settings["folder"] == "${oc.env:HOME}"  # a saved text is never an interpolation
    assert (run.checkpoint, run.steps, run.metadata["config"]["dim"]) == (checkpoint, None, 32)
    [tokens], tokenizer = validation_tokens(run), parse(run.settings["data"]).prepare().tokenizer
    content = text.read_text()
    assert 0.04 * len(content) < len(tokens) < 0.06 * len(content)
    assert content.endswith(tokenizer.decode(tokens[:-1].tolist()))  # without end-of-text


def test_a_changed_text_is_refused(checkpoint, text):
    text.write_text(text.read_text() + "one more line\n")
    with pytest.raises(ValueError, match="the text has changed since the run .*; restore it, or train again"):
        validation_tokens(read_run(checkpoint))


def test_a_checkpoint_outside_a_run_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.yaml does not exist.*; name a run's folder"):
        read_run(tmp_path / "a.ckpt")


def test_windows_are_whole_and_evenly_spaced():
    tokens = torch.arange(95).numpy()  # 9 whole windows of 10 tokens
    numbers, inputs, targets = evenly_spaced_windows([tokens], 3, 10)
    assert numbers.tolist() == [0, 4, 8]
    assert inputs[:, 0].tolist() == [0, 40, 80] and torch.equal(targets, inputs + 1)
    assert evenly_spaced_windows([tokens], 9, 10)[0].tolist() == list(range(9))
    with pytest.raises(ValueError, match="windows=10 exceeds the 9 whole windows of 10 tokens"):
        evenly_spaced_windows([tokens], 10, 10)


def test_windows_of_several_texts_cross_none_of_them():
    """2, 0 and 3 whole windows of 10 tokens."""
    texts = [torch.arange(start, start + size).numpy() for start, size in ((0, 25), (100, 10), (200, 31))]
    numbers, inputs, targets = evenly_spaced_windows(texts, 5, 10)
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert inputs[:, 0].tolist() == [0, 10, 200, 210, 220] and torch.equal(targets, inputs + 1)
    assert evenly_spaced_windows(texts, 2, 10)[1][:, 0].tolist() == [0, 220]
    assert evenly_spaced_windows(texts, 3, 10)[1][:, 0].tolist() == [0, 200, 220]
    with pytest.raises(ValueError, match="windows=6 exceeds the 5 whole windows of 10 tokens"):
        evenly_spaced_windows(texts, 6, 10)


def test_no_document_is_in_two_texts():
    """The end-of-text token opens a document."""
    texts = [torch.tensor(text).numpy() for text in ([1, 2, 0, 3, 4, 0], [5, 0, 6, 0, 7, 8, 0], [9, 1, 2])]
    documents = documents_of_windows(texts, torch.arange(6).numpy(), 2, eot_id=0)
    assert documents.tolist() == [[0, 0], [1, 1], [3, 4], [4, 5], [5, 5], [7, 7]]
