"""The scores of a text against a loop over prefixes, and its figures with their intervals over documents."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import t

from tests.conftest import tiny_gpt
from tests.oracles import cr2
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.evaluation.evaluate import ScoredText
from tril.model.generation.language_model import LanguageModel
from tril.model.masks import document_options

T, V = 12, 320
BYTES = build(TokenizerConfig(kind="byte"), ())
EOT = BYTES.token_to_id("<|endoftext|>")
DOCUMENTS = ["caf\u00e9 " * (1 + i % 3) + "\u6f22" * (i % 2) + str(i) for i in range(12)]
IDS = [[*BYTES.encode(text, add_special_tokens=False).ids, EOT] for text in DOCUMENTS]
TOKENS = np.array([token for ids in IDS for token in ids], np.uint16)
SIZES = np.array([len(text.encode()) for text in DOCUMENTS]) - np.eye(12)[0]  # the first byte is no target
N_TARGETS, N_BYTES = len(TOKENS) - 1, SIZES.sum()


@pytest.fixture(scope="module")
def lm():
    """A random model that often guesses right, since its head has a few rows only."""
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=V)
    with torch.no_grad():
        model.head.weight[np.setdiff1d(np.arange(V), TOKENS[:20])] *= 0.01
    return LanguageModel(model, BYTES)


def scored(lm, tokens=TOKENS, **options):
    return ScoredText.of(lm, tokens, N_BYTES, **options)


def ends(interval):
    return [interval.mean, interval.low, interval.high]


@torch.no_grad()
def test_every_target_is_scored_once_with_its_context(lm):
    model = tiny_gpt(vocab_size=V, embd_dropout=0.5).train()
    model.load_state_dict(lm.model.state_dict())
    text = scored(LanguageModel(model, BYTES), document_eot=EOT)
    assert len(text.nll) == N_TARGETS and model.training
    for i in range(N_TARGETS):
        prefix = torch.from_numpy(TOKENS[i // T * T : i + 1].astype(np.int64))[None]
        log_p = lm.model(prefix, **document_options(prefix, EOT))[0, -1].double().log_softmax(-1)
        assert text.nll[i] == pytest.approx(-log_p[TOKENS[i + 1]].item(), abs=2e-5)
        assert text.correct[i] == (log_p.argmax() == TOKENS[i + 1])
    assert text.correct.any() and not text.correct.all()


def test_figures_and_differences_have_the_intervals_of_their_documents(lm):
    text, other = scored(lm), scored(LanguageModel(tiny_gpt(vocab_size=V), BYTES))
    assert text.clusters.by_document and text.bytes == pytest.approx(SIZES)
    found, document = text.figures(), np.equal(TOKENS, EOT).cumsum()[:-1]  # of each target
    sizes, difference = np.bincount(document), text.compare(other)["nats per token"].difference
    for interval, values in ((found["loss"], text.nll), (difference, other.nll - text.nll)):
        variance, df = cr2(np.bincount(document, values) / sizes, sizes)
        half = t.isf(0.025, df) * variance**0.5
        assert ends(interval) == pytest.approx([values.mean(), values.mean() - half, values.mean() + half], rel=1e-5)
    assert found["bits_per_byte"].mean == pytest.approx(text.nll.sum() / math.log(2) / N_BYTES)
    assert found["accuracy"].mean == pytest.approx(text.correct.mean())
    assert replace(text, correct=np.arange(N_TARGETS) > 0).figures()["accuracy"].high == 1
    assert ends(found["perplexity"]) == pytest.approx(np.exp(ends(found["loss"])))


def test_losses_without_an_interval_or_without_text(lm):
    text = scored(lm)
    nll = np.ones(N_TARGETS, np.float32)
    nll[5] = np.inf
    found = replace(text, nll=nll).figures()
    assert ends(found["loss"]) == ends(found["perplexity"]) == [math.inf, None, None]
    assert replace(text, nll=np.full(N_TARGETS, 800, np.float32)).figures()["perplexity"].mean == math.inf
    empty = scored(lm, np.array([EOT, *[EOT] * 30, 65, 66], np.uint16))  # documents without text keep their bits
    assert math.isfinite(empty.figures()["bits_per_byte"].mean)
