"""The figures of an evaluation on hand-made scores: literal values, and loops over documents and bins."""

import math

import numpy as np
import pytest

from tril.data.tokenizer import TokenizerConfig, build
from tril.model.evaluation.evaluation_figures import (
    N_BINS,
    calibration,
    calibration_error,
    figures,
    loss_by_position,
    scored_text,
    verdict,
)
from tril.model.evaluation.evaluation_plot import plot
from tril.model.evaluation.target_scores import TargetScores
from tril.model.intervals import Interval, clustered_mean

T = 8
BYTES = build(TokenizerConfig(kind="byte"), ())
EOT = BYTES.token_to_id("<|endoftext|>")
DOCUMENTS = ["caf\u00e9 " * (1 + i % 3) + "\u6f22" * (i % 2) + str(i) for i in range(12)]


def encoded(documents):
    """The documents in bytes, each with end-of-text."""
    ids = [[*BYTES.encode(text, add_special_tokens=False).ids, EOT] for text in documents]
    return np.concatenate([np.array(part) for part in ids])


TOKENS = encoded(DOCUMENTS)
N_BYTES = sum(len(text.encode()) for text in DOCUMENTS)


def scored(confidence=None, correct=None, nll=None, columns=None, tokens=TOKENS, inputs=None):
    """Scores of all targets of the text, random where they are not given."""
    random = np.random.default_rng(1)
    inputs = np.arange(len(tokens) - 1) if inputs is None else inputs
    n = len(inputs)
    scores = TargetScores(
        inputs=inputs,
        columns=inputs % T if columns is None else columns,
        nll=random.exponential(2, n).astype(np.float32) if nll is None else nll,
        confidence=random.uniform(0, 1, n).astype(np.float32) if confidence is None else np.float32(confidence),
        correct=random.uniform(0, 1, n) < 0.5 if correct is None else np.array(correct),
    )
    return scored_text(scores, tokens, T, BYTES, EOT, N_BYTES)


def by_document(values, tokens=TOKENS):
    """Sums of values over each document, by a loop: a target belongs to the document of its input."""
    sums, document = [0.0], 0
    for i, value in enumerate(values):
        if tokens[i] == EOT:
            document += 1
            sums.append(0.0)
        sums[document] += value
    return np.array(sums)


def ends(interval):
    return [interval.mean, interval.low, interval.high]


def test_each_figure_is_a_mean_over_targets_with_the_interval_over_documents():
    text = scored()
    nll, found = text.scores.nll.astype(float), figures(text)
    counts = by_document(np.ones(len(nll)))
    assert text.clusters.by_document and len(counts) == 12
    expected = clustered_mean(by_document(nll), counts).interval()
    assert ends(found["loss"]) == pytest.approx(ends(expected)) and expected.mean == pytest.approx(nll.mean())
    assert ends(found["perplexity"]) == pytest.approx([math.exp(x) for x in ends(expected)])
    right = text.scores.correct
    assert ends(found["accuracy"]) == pytest.approx(ends(clustered_mean(by_document(right), counts).interval()))
    assert found["bits_per_byte"].mean == pytest.approx(nll.sum() / math.log(2) / N_BYTES, rel=1e-12)


def test_the_bytes_of_a_document_are_those_of_its_text():
    text = scored()
    # One byte, the first token, has no target: it is spread over all documents.
    sizes = np.array([len(document.encode()) for document in DOCUMENTS])
    unpredicted = np.eye(12)[0]
    assert text.bytes == pytest.approx((sizes - unpredicted) * N_BYTES / (N_BYTES - 1))
    nats = by_document(text.scores.nll)
    expected = clustered_mean(nats / math.log(2), text.bytes).interval()
    assert ends(figures(text)["bits_per_byte"]) == pytest.approx(ends(expected))
    assert text.bytes.sum() == pytest.approx(N_BYTES)


def test_of_some_windows_the_bytes_of_their_targets_count():
    inputs = np.arange(16, 32)
    text = scored(inputs=inputs)
    assert len(text.bytes) < 12 and not text.clusters.by_document
    ids = TOKENS[inputs + 1]
    assert text.bytes.sum() == pytest.approx((ids != EOT).sum(), abs=4)  # a cut character may count as 3 bytes


def test_a_target_without_text_keeps_its_bits():
    """A window that sees a document's end-of-text token only: bits without bytes."""
    last = np.flatnonzero(TOKENS == EOT)
    inputs = np.sort(np.concatenate([last[:11] - 1, last[:3] + 1]))  # the last target of 11 documents is end-of-text
    text = scored(inputs=inputs, nll=np.full(len(inputs), math.log(2), np.float32))
    assert figures(text)["bits_per_byte"].mean == pytest.approx(len(inputs) / 3, rel=1e-6)


def test_a_calibrated_model_has_no_calibration_error():
    n = (len(TOKENS) - 1) // 20 * 20
    confidence = np.tile([0.7] * 10 + [0.3] * 10, n // 20)
    correct = np.tile([True] * 7 + [False] * 3 + [True] * 3 + [False] * 7, n // 20)
    text = scored(confidence, correct, inputs=np.arange(n))
    assert calibration_error(text).mean == pytest.approx(0, abs=1e-7)
    rows = calibration(text)
    assert [(row["from"], row["to"], row["targets"]) for row in rows] == [
        (pytest.approx(4 / 15), pytest.approx(5 / 15), n // 2),
        (pytest.approx(10 / 15), pytest.approx(11 / 15), n // 2),
    ]
    assert [row["accuracy"].mean for row in rows] == pytest.approx([0.3, 0.7])
    assert [row["confidence"] for row in rows] == pytest.approx([0.3, 0.7])


def test_errors_of_both_signs_add_up():
    n = (len(TOKENS) - 1) // 20 * 20
    confidence = np.tile([0.9] * 10 + [0.2] * 10, n // 20)
    correct = np.tile([True] * 5 + [False] * 5 + [True] * 6 + [False] * 4, n // 20)
    assert calibration_error(scored(confidence, correct, inputs=np.arange(n))).mean == pytest.approx(0.4)


def test_the_calibration_error_against_a_loop_over_bins():
    text = scored()
    confidence, correct = text.scores.confidence.tolist(), text.scores.correct.tolist()
    total = 0.0
    for number in range(N_BINS):
        chosen = [i for i, c in enumerate(confidence) if number / N_BINS <= c < (number + 1) / N_BINS]
        total += abs(sum(correct[i] - confidence[i] for i in chosen))
    found = calibration_error(text)
    assert found.mean == pytest.approx(total / len(confidence))
    assert 0 <= found.low < found.mean < found.high
    assert sum(row["targets"] for row in calibration(text)) == len(confidence)


def test_a_certain_model_is_in_the_last_bin():
    [row] = calibration(scored(np.ones(len(TOKENS) - 1), np.ones(len(TOKENS) - 1, bool)))
    assert (row["from"], row["to"], ends(row["accuracy"])) == (14 / 15, 1, [1, 1, 1])


def test_the_loss_by_position():
    columns = np.arange(len(TOKENS) - 1) % T
    rows = loss_by_position(scored(nll=columns.astype(np.float32), columns=columns))
    assert [(row["first"], row["last"]) for row in rows] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    losses = [row["loss"].mean for row in rows]
    assert losses[:2] == [0, 1] and losses[2:] == pytest.approx([2.5, 5.5], abs=0.05)
    assert sum(row["targets"] for row in rows) == len(columns)


def test_a_loss_that_is_not_finite_has_no_interval():
    nll = np.ones(len(TOKENS) - 1, np.float32)
    nll[5] = np.inf
    found = figures(scored(nll=nll))
    assert ends(found["loss"]) == ends(found["perplexity"]) == [math.inf, None, None]
    huge = figures(scored(nll=np.full(len(TOKENS) - 1, 800, np.float32)))
    assert huge["perplexity"].mean == math.inf


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.1, 0.3, "not distinguishable"),
        (0.0, 0.2, "not distinguishable"),
        (0.01, 0.2, "higher"),
        (-0.2, -0.01, "lower"),
        (None, None, "no interval"),
    ],
)
def test_the_verdict(low, high, expected):
    assert verdict(Interval(0.1 if low is None else (low + high) / 2, low, high, 12)) == expected


def test_the_picture(tmp_path):
    text = scored()
    found = {"name": "windows", "calibration": calibration(text), "positions": loss_by_position(text)}
    plot(tmp_path / "x.png", {"a": found, "b": found | {"name": "others"}})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
