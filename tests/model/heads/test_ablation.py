"""Ablation of heads by document, against full passes with a gate, and simulated texts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import TRAINABLE, tiny_gpt
from tril.model.comparison import BETTER, UNCLEAR, WORSE
from tril.model.gpt import IGNORE
from tril.model.heads import ablation as subject
from tril.model.heads.ablation import Ablation, losses_without
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.gate import all_heads, head_gate, head_name
from tril.model.intervals import clustered_mean
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

EOT = 30
CASES = [
    *(({"backend": name}, None) for name in TRAINABLE),
    ({"n_kv_heads": 2, "window": 4, "bias": True}, None),
    ({"pos": "learned", "norm": "layernorm", "logit_softcap": 5.0}, EOT),
]


def some_text(n=6, document_eot=None):
    ids = torch.randint(30, (n, 12))
    ids[:, 4] = EOT
    return TokenWindows(ids, torch.randint(31, (n, 12)), document_eot)


def clusters_of(text):
    """Documents of 5 tokens, across windows."""
    return TextClusters.of(torch.arange(text.ids.numel()).view(text.ids.shape) // 5, text.targets)


def ablate(model, text):
    return subject.ablate(model, text, clusters_of(text))


def columns(model, head):
    """The columns of the output projection that read a head."""
    layer, number = head
    size = model.config.head_size
    return model.blocks[layer].attn.o_proj.weight.data[:, number * size : (number + 1) * size]


def gate_of(heads):
    gate = torch.ones(2, 4)
    for head in heads:
        gate[head] = 0
    return gate


def by_document(model, text, heads=()):
    """Sums of losses without heads, in one full pass."""
    with torch.no_grad():
        options = document_options(text.ids, text.document_eot)
        log_p = model(text.ids, head_gate=gate_of(heads), **options).log_softmax(-1)
    nll = F.nll_loss(log_p.double().flatten(0, 1), text.targets.flatten(), reduction="none", ignore_index=IGNORE)
    return np.bincount(np.arange(len(nll)) // 5, nll.numpy())


@pytest.mark.parametrize(("shape", "document_eot"), CASES, ids=str)
def test_the_losses_without_heads_are_those_of_full_passes_by_document(shape, document_eot, monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 48)  # batches of 4 and 2 windows
    model, text = tiny_gpt(**shape), some_text(document_eot=document_eot)
    text.targets[:2, 5:9] = IGNORE
    ablation = ablate(model, text)
    sizes = ablation.clusters.targets.numpy()
    whole = by_document(model, text)
    assert ablation.whole.tolist() == pytest.approx(whole, abs=1e-4) and ablation.loss == pytest.approx(
        whole.sum() / sizes.sum()
    )
    changes, order, rows = ablation.changes(), ablation.order, ablation.removal_rows()
    for head in all_heads(model.config):
        without = by_document(model, text, [head])
        assert ablation.single[head].tolist() == pytest.approx(without, abs=1e-4)
        expected = clustered_mean(without - whole, sizes)
        assert changes[head].difference.mean == pytest.approx(expected.mean, abs=1e-6)
        assert changes[head].difference.half_width == pytest.approx(
            expected.interval(1 - 0.05 / 8).half_width, abs=1e-6
        )
    rises = [ablation.single[head].sum().item() for head in order]
    assert sorted(order) == all_heads(model.config) and rises == sorted(rises)
    for n in range(9):
        without = by_document(model, text, order[:n])
        assert ablation.removal[n].tolist() == pytest.approx(without, abs=1e-4)
        assert rows[n]["change"] == pytest.approx((without - whole).sum() / sizes.sum(), abs=1e-6)


@pytest.mark.parametrize("document_eot", [None, EOT])
def test_a_partial_forward_pass_is_bitwise_equal_to_the_full_one(document_eot):
    model, text = tiny_gpt(), some_text(document_eot=document_eot)
    chains = [[(1, 0), (1, 1)], [(1, 0), (0, 3), (1, 2), (0, 0)], all_heads(model.config)[::-1]]
    sets = [[], *(chain[:n] for chain in chains for n in range(1, len(chain) + 1))]
    with torch.inference_mode():
        clusters = clusters_of(text)
        computed = losses_without(model, text, clusters, chains)
        for row, heads in zip(computed, sets, strict=True):
            logits = model(text.ids, head_gate=gate_of(heads), **document_options(text.ids, document_eot))
            nll = F.cross_entropy(logits.flatten(0, 1), text.targets.flatten(), reduction="none").view(6, 12)
            assert torch.equal(row, clusters.sums(nll))


def test_the_model_is_unchanged_and_a_head_without_output_changes_nothing():
    model, text = tiny_gpt(attn_dropout=0.3), some_text()
    columns(model, (0, 1)).zero_()
    ablation = ablate(model, text)
    assert torch.equal(ablate(model.train(), text).removal, ablation.removal)
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    change = ablation.changes()[0, 1]
    assert torch.equal(ablation.single[0, 1], ablation.whole)
    assert (change.difference.mean, change.difference.half_width, change.verdict) == (0, 0, UNCLEAR)
    assert ["L0H1", "+0.0000 ± 0.0000", UNCLEAR] in ablation.table()


def simulated(rng, true_rises):
    """An ablation of 8 heads on 40 documents of unequal length: (2, 4) true rises of the loss."""
    sizes = np.round(40 * rng.lognormal(0, 1, 40)) + 1
    shared = rng.normal(0, 0.05, (1, 1, 40)) + rng.normal(0, 0.05, (2, 4, 40))  # of a document, in all and in one head
    rises = true_rises[..., None] + shared + rng.normal(0, 0.3, (2, 4, 40)) / np.sqrt(sizes)
    whole = sizes * rng.normal(4, 0.8, 40)  # the differences between documents are larger than any rise
    sizes, whole, single = (torch.from_numpy(array) for array in (sizes, whole, whole + sizes * rises))
    clusters = TextClusters(torch.empty(0), sizes, len(sizes), True)
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    return Ablation(clusters, whole, single, heads, torch.stack([whole + n * sizes / 2 for n in range(9)]))


def test_useless_heads_are_called_useful_in_at_most_5_of_100_texts_and_useful_ones_are_found():
    rng, truth, n = np.random.default_rng(0), np.zeros((2, 4)), 500
    changes = [simulated(rng, truth).changes().values() for _ in range(n)]
    wrong = sum(any(change.verdict != UNCLEAR for change in each) for each in changes)
    assert wrong / n <= 0.05 + 2 * (0.05 * 0.95 / n) ** 0.5
    truth[0, 3], truth[1, 1] = 0.2, -0.2  # several standard errors
    for _ in range(50):
        verdicts = {head: change.verdict for head, change in simulated(rng, truth).changes().items()}
        assert (verdicts[0, 3], verdicts[1, 1]) == (WORSE, BETTER)


def test_the_rows_of_the_files():
    ablation = simulated(np.random.default_rng(2), np.full((2, 4), 0.1))
    rows, change = ablation.head_rows(), ablation.changes()[1, 2]
    assert [row["head"] for row in rows] == [head_name(head) for head in all_heads(tiny_gpt().config)]
    interval = change.difference
    values = {"change": interval.mean, "low": interval.low, "high": interval.high, "verdict": change.verdict}
    assert rows[6] == {"head": "L1H2", **values}
    first, second = ablation.removal_rows()[:2]
    assert (first["n_removed"], first["removed_last"], first["loss"], first["change"]) == (0, None, ablation.loss, 0.0)
    assert (second["n_removed"], second["removed_last"], second["low"]) == (1, "L0H0", pytest.approx(0.5))


def test_gates_by_name():
    config = tiny_gpt(n_layers=3).config
    gate = head_gate(config, ["L0H1", "L2H3", "L0H1"])
    assert gate.dtype == torch.float32 and gate.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    with pytest.raises(ValueError, match="has no head 'L3H0', 'x'; with 3 layers of 4 heads, use L0H0 to L2H3"):
        head_gate(config, ["L0H1", "L3H0", "x"])
    with pytest.raises(ValueError, match="model.n_heads=0"):
        head_gate(tiny_gpt(n_heads=0).config, ["L0H0"])
