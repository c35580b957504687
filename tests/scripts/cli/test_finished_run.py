"""A run folder is read back, its text is compared with that of the run, and windows are evenly spaced."""

from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import tiny_gpt
from tril.data.config import parse
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.cli.finished_run import TrainedRun, read_run, sample_windows, validation_tokens


def test_the_validation_tokens_of_a_run_are_those_of_its_text_unless_that_has_changed(tmp_path, text, monkeypatch):
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    data = {"source": "files", "path": str(text), "tokenizer": {"kind": "byte"}, "batch_size": 2}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"data": data, "folder": "${oc.env:HOME}"}))
    prepared, path = parse(data).prepare(), tmp_path / "run" / "checkpoints" / "last.ckpt"
    save(path, LanguageModel(tiny_gpt(vocab_size=257), prepared.tokenizer, "<|endoftext|>"), **prepared.meta)
    run = read_run(path)
    assert (run.data, run.checkpoint.path, run.checkpoint.step) == (data, path, None)
    [tokens], content = validation_tokens(run), text.read_text()
    assert 0.04 * len(content) < len(tokens) < 0.06 * len(content)
    assert content.endswith(prepared.tokenizer.decode(tokens[:-1].tolist()))  # without end-of-text
    text.write_text(content + "one more line\n")
    with pytest.raises(ValueError, match="the text has changed since the run .*; restore it, or train again"):
        validation_tokens(run)
    with pytest.raises(FileNotFoundError, match="config.yaml does not exist.*; name a run's folder"):
        read_run(tmp_path / "a.ckpt")


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4), st.integers(2, 5))
def test_windows_are_whole_and_evenly_spaced_and_no_document_is_in_two_texts(texts, n):
    """Against a loop; the token 0 opens a document."""
    length, whole, document = 3, [], 0
    for text in texts:
        document += 1
        documents = [document := document + (token == 0) for token in text]
        for start in range(0, len(text) - length, length):
            end = start + length
            whole.append((text[start:end], text[start + 1 : end + 1], documents[start:end]))
    checkpoint = SimpleNamespace(config=SimpleNamespace(context_length=length), data={"eot_id": 0})
    run = TrainedRun(checkpoint, {"document_mask": True})
    arrays = [np.array(text, np.uint16) for text in texts]
    if n > len(whole):
        with pytest.raises(ValueError, match=f"windows={n} exceeds the {len(whole)} whole windows of 3 tokens"):
            sample_windows(run, arrays, n)
        return
    numbers, windows, clusters = sample_windows(run, arrays, n)
    assert numbers.tolist() == [i * (len(whole) - 1) // (n - 1) for i in range(n)]
    chosen = [whole[number] for number in numbers]
    assert (windows.ids.tolist(), windows.targets.tolist()) == ([x[0] for x in chosen], [x[1] for x in chosen])
    assert windows.document_eot == 0
    assert clusters.n_documents == len({document for x in chosen for document in x[2]})
