"""Ablation of heads by document, against full passes with a gate, and simulated texts; what the figures draw."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import tiny_gpt
from tril.data.batches import IGNORE
from tril.model.comparison import UNCLEAR
from tril.model.heads import ablation as subject
from tril.model.heads.ablation import head_gate
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.head_plots import plot_heads
from tril.model.heads.records import COPY_LOSSES, all_heads, head_name
from tril.model.heads.scores import SCORES
from tril.model.intervals import clustered_mean
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

EOT = 30
CASES = [({"n_kv_heads": 2, "window": 4, "bias": True}, None), ({"pos": "learned", "logit_softcap": 5.0}, EOT)]


def some_text(n=6, document_eot=None):
    ids = torch.randint(30, (n, 12))
    ids[:, 4] = EOT
    return TokenWindows(ids, torch.randint(31, (n, 12)), document_eot)


def clusters_of(text):
    """Documents of 5 tokens, across windows."""
    return TextClusters.of(torch.arange(text.ids.numel()).view(text.ids.shape) // 5, text.targets)


def ablate(model, text):
    return subject.ablate(model, text, clusters_of(text))


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
    ablation, whole = ablate(model, text), by_document(model, text)
    sizes = ablation.clusters.targets.numpy()
    assert ablation.whole.tolist() == pytest.approx(whole, abs=1e-4)
    assert ablation.loss == pytest.approx(whole.sum() / sizes.sum())

    def check(row, without, name):
        expected = clustered_mean(without - whole, sizes).interval(1 - 0.05 / 8)
        values = [getattr(expected, end) for end in ("mean", "low", "high")]
        assert [row[end] for end in ("change", "low", "high")] == pytest.approx(values, abs=1e-6)
        assert name in row.values() and (row["verdict"] == UNCLEAR) == (expected.low < 0 < expected.high)

    for head, row in zip(all_heads(model.config), ablation.rows(), strict=True):
        without = by_document(model, text, [head])
        assert ablation.single[head].tolist() == pytest.approx(without, abs=1e-4)
        check(row, without, head_name(head))
    order = sorted(all_heads(model.config), key=lambda head: ablation.single[head].sum().item())
    rows = subject.remove_in_turn(model, text, ablation)
    assert list(rows[0].values()) == [0, None, ablation.loss, 0, 0, 0] and len(rows) == 9
    for n, row in enumerate(rows[1:], 1):
        check(row, by_document(model, text, order[:n]), head_name(order[n - 1]))
        assert row["n_removed"] == n and row["loss"] == pytest.approx(ablation.loss + row["change"])


def test_the_model_is_unchanged_and_a_head_without_output_changes_nothing():
    model, text = tiny_gpt(attn_dropout=0.3), some_text()
    model.blocks[0].attn.o_proj.weight.data[:, 8:16] = 0  # of head 1
    ablation = ablate(model, text)
    assert torch.equal(ablate(model.train(), text).single, ablation.single)
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert ablation.rows()[1] == {"head": "L0H1", "change": 0, "low": 0, "high": 0, "verdict": UNCLEAR}


def test_gates_by_name():
    config = tiny_gpt(n_layers=3).config
    gate = head_gate(config, ["L0H1", "L2H3", "L0H1"])
    assert gate.dtype == torch.float32 and gate.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    for model, names, limit in ((config, ["L0H1", "L3H0", "x"], "L2H3"), (tiny_gpt(n_heads=0).config, ["L0H0"], "n_h")):
        with pytest.raises(ValueError, match=limit):
            head_gate(model, names)


def test_the_figures_draw_each_head_where_it_belongs(monkeypatch, tmp_path):
    drawn, model, text = [], tiny_gpt(), some_text()
    keep = lambda path, figure, dpi: drawn.append(figure)  # noqa: E731
    monkeypatch.setattr("tril.model.heads.head_plots.write_picture", keep)
    ablation = ablate(model, text)
    heads = [f"L{n // 4}H{n % 4}" for n in range(8)]
    columns = pd.MultiIndex.from_product([(*SCORES, *COPY_LOSSES), (*heads, "uniform")])
    records = pd.DataFrame(np.random.default_rng(0).random((3, len(columns))), [0, 1, 9], columns)
    removal = subject.remove_in_turn(model, text, ablation)
    plot_heads(tmp_path / "a.png", ablation, removal, records)
    [picture], rises = drawn, [row["change"] for row in ablation.rows()]
    panels = {axes.get_label(): axes for axes in picture.axes}
    assert np.array_equal(panels["alone"].images[0].get_array().flatten(), rises)
    assert list(panels["in turn"].lines[0].get_ydata()) == [row["loss"] for row in removal]
    for line, head in zip(panels["induction"].lines, ["uniform", *heads], strict=True):
        assert list(line.get_ydata()) == list(records["induction", head])
    legend = [text.get_text() for text in panels["legend"].get_legend().get_texts()]
    assert legend == ["uniform weights", "layer 0", "layer 1", "first copy", "second copy"]
