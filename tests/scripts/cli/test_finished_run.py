"""The windows of a finished run on which its heads are measured."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tril.scripts.cli.finished_run import TrainedRun, sample_windows


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
