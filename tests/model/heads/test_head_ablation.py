"""Ablation of heads against zeroed weights, constants added by hand, full forward passes and scipy's paired test."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel

from tests.conftest import TRAINABLE, tiny_gpt
from tril.model.gpt import IGNORE
from tril.model.heads import ablation as subject
from tril.model.heads.ablation import METHODS, all_heads, head_gate, head_name, losses_without, mean_outputs
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

SHAPES = [
    *({"backend": name} for name in TRAINABLE),
    {"n_kv_heads": 2, "window": 4},
    {"pos": "learned", "norm": "layernorm"},
    {"logit_softcap": 5.0},
]
EOT = 30


def some_text(n=6, document_eot=None):
    ids = torch.randint(30, (n, 12))
    ids[:, 4] = EOT
    return TokenWindows(ids, torch.randint(31, (n, 12)), document_eot)


def one_document(text):
    """The clusters of a text without documents: its windows, if they are 20 or fewer."""
    return TextClusters.of(torch.zeros_like(text.ids), text.targets)


def ablate(model, text):
    return subject.ablate(model, text, one_document(text))


def of_windows(ablation, sums):
    """Mean losses (..., N)."""
    return sums / ablation.clusters.targets


def losses(model, text, **options):
    """The mean loss of each window, from one pass over everything."""
    with torch.no_grad():
        log_p = model(text.ids, **document_options(text.ids, text.document_eot), **options).log_softmax(-1)
    return -log_p.gather(-1, text.targets[..., None])[..., 0].double().mean(1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_removal_by_zero_is_an_output_projection_of_zeros(shape):
    model, text = tiny_gpt(**shape), some_text()
    ablation = ablate(model, text)
    close(of_windows(ablation, ablation.whole), losses(model, text))
    for head in all_heads(model.config):
        kept = columns(model, head).clone()
        columns(model, head).zero_()
        expected = losses(model, text)
        columns(model, head).copy_(kept)
        close(of_windows(ablation, ablation.single["zero"][head]), expected)
    change = of_windows(ablation, ablation.single["zero"] - ablation.whole)
    assert change.abs().amax(-1).min() > 1e-3  # every head of this model does something


@pytest.mark.parametrize(("shape", "document_eot"), [*((shape, None) for shape in SHAPES), ({}, EOT)], ids=str)
def test_removal_by_the_mean_is_that_mean_through_the_output_projection(shape, document_eot, monkeypatch):
    monkeypatch.setattr(
        "tril.model.heads.attention_maps.TOKENS_PER_BATCH", 48
    )  # batches of 4 and of 2 windows, which have equal weight
    model, text = tiny_gpt(**shape, bias=True), some_text(document_eot=document_eot)
    ablation, options = ablate(model, text), document_options(text.ids, document_eot)
    values = []
    hooks = [
        block.attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out)) for block in model.blocks
    ]
    with torch.no_grad():
        model.hidden(text.ids, **options)
    for hook in hooks:
        hook.remove()
    maps = attention_maps(model, text.ids, **options)  # (L, B, H, T, T)
    group = 4 // model.config.kv_heads
    for layer, number in all_heads(model.config):
        v = values[layer].unflatten(-1, (-1, 8))[:, :, number // group]  # (B, T, D)
        mean = (maps[layer, :, number] @ v).mean((0, 1))
        kept, bias = columns(model, (layer, number)).clone(), model.blocks[layer].attn.o_proj.bias.data
        columns(model, (layer, number)).zero_()
        bias += kept @ mean
        expected = losses(model, text)
        bias -= kept @ mean
        columns(model, (layer, number)).copy_(kept)
        close(of_windows(ablation, ablation.single["mean"][layer, number]), expected)
        close(mean_outputs(model, text)[layer, number].detach(), mean)


@pytest.mark.parametrize("document_eot", [None, EOT])
def test_a_partial_forward_pass_is_bitwise_equal_to_the_full_one(document_eot):
    model, text = tiny_gpt(), some_text(document_eot=document_eot)
    chains = [[(0, 2)], [(1, 3)], [(1, 0), (1, 1)], [(1, 0), (0, 3), (1, 2), (0, 0)], all_heads(model.config)[::-1]]
    sets = [[], *(chain[:n] for chain in chains for n in range(1, len(chain) + 1))]
    with torch.inference_mode():
        clusters, removals = one_document(text), [("zero", chain) for chain in chains]
        computed = losses_without(model, text, clusters, removals, torch.ones(2, 4, 8))
        for row, heads in zip(computed, sets, strict=True):
            logits = model(text.ids, head_gate=gate_of(heads), **document_options(text.ids, document_eot))
            nll = F.cross_entropy(logits.flatten(0, 1), text.targets.flatten(), reduction="none").view(6, 12)
            assert torch.equal(row, clusters.sums(nll))


def test_a_head_without_output_changes_nothing():
    model, text = tiny_gpt(), some_text(8)
    columns(model, (0, 1)).zero_()
    ablation = ablate(model, text)
    for method in METHODS:
        assert torch.equal(ablation.single[method][0, 1], ablation.whole)
        change = ablation.changes(method)[0, 1]
        assert (change.interval.mean, change.interval.low, change.interval.high, change.verdict) == (
            0,
            0,
            0,
            "not distinguishable",
        )


def test_the_intervals_are_those_of_a_paired_t_test():
    ablation = ablate(tiny_gpt(), some_text(9))
    for method, head in itertools.product(METHODS, all_heads(tiny_gpt().config)):
        change, sums = ablation.changes(method)[head], (ablation.single[method][head], ablation.whole)
        test = ttest_rel(*(of_windows(ablation, values) for values in sums))
        for interval, confidence in ((change.interval, 0.95), (change.corrected, 1 - 0.05 / 8)):  # 8 heads
            expected = test.confidence_interval(confidence)
            assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-12)
        rises = "rises" if test.statistic > 0 else "falls"
        assert change.verdict == (rises if test.pvalue * 8 < 0.05 else "not distinguishable")
    assert {change.verdict for change in ablation.changes("zero").values()} >= {"not distinguishable"}


@pytest.mark.parametrize(("gate", "verdict", "sign"), [(None, "rises", 1), (gate_of([(0, 2)]), "falls", -1)])
def test_the_loss_rises_without_a_useful_head_and_falls_without_a_harmful_one(gate, verdict, sign):
    model, text = tiny_gpt(), some_text(40)
    columns(model, (0, 2)).mul_(4)
    with torch.no_grad():
        targets = model(text.ids, head_gate=gate).argmax(-1)
    changes = ablate(model, TokenWindows(text.ids, targets))
    for method in METHODS:
        change = changes.changes(method)[0, 2]
        assert change.verdict == verdict and change.interval.mean * sign > 0


def test_heads_are_removed_from_the_least_important_on(monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 48)
    model, text = tiny_gpt(), some_text(7)
    ablation, means = ablate(model, text), mean_outputs(model, text)
    for method in METHODS:
        order = ablation.orders[method]
        assert sorted(order) == all_heads(model.config)
        rises = [ablation.single[method][head].sum().item() for head in order]
        assert rises == sorted(rises)
        assert torch.equal(ablation.removal[method][0], ablation.whole) and len(ablation.removal[method]) == 9
        close(
            *(of_windows(ablation, sums) for sums in (ablation.removal[method][1], ablation.single[method][order[0]]))
        )
        curve = ablation.curve(method)
        assert (curve[0].low, curve[0].high) == (0, 0)
        change = of_windows(ablation, ablation.removal[method][5] - ablation.whole)
        assert curve[5].mean == pytest.approx(change.mean().item())
        for n in range(9):
            fills = (1 - gate_of(order[:n]))[..., None] * means * (method == "mean")  # (L, H, D)
            extra = [
                (block.attn.o_proj.weight @ fill.flatten()).detach()
                for block, fill in zip(model.blocks, fills, strict=True)
            ]
            hooks = [
                block.attn.register_forward_hook(lambda m, args, out, e=e: out + e)
                for block, e in zip(model.blocks, extra, strict=True)
            ]
            expected = losses(model, text, head_gate=gate_of(order[:n]))
            for hook in hooks:
                hook.remove()
            close(of_windows(ablation, ablation.removal[method][n]), expected)


def test_targets_to_ignore_do_not_count():
    model, text = tiny_gpt(), some_text()
    whole = losses(model, TokenWindows(text.ids[:, :5], text.targets[:, :5]))
    text.targets[:, 5:] = IGNORE
    ablation = ablate(model, text)
    close(of_windows(ablation, ablation.whole), whole)


def test_the_model_is_unchanged():
    model, text = tiny_gpt(attn_dropout=0.3), some_text()
    expected = ablate(model, text)
    model.train()
    assert torch.equal(ablate(model, text).removal["mean"], expected.removal["mean"])
    assert all(
        module.training and not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )


def test_a_model_of_one_head():
    ablation = ablate(tiny_gpt(n_layers=1, n_heads=1), some_text())
    assert ablation.orders == {method: [(0, 0)] for method in METHODS} and all(
        len(ablation.removal[method]) == 2 for method in METHODS
    )


def test_gates_by_name():
    config = tiny_gpt(n_layers=3).config
    gate = head_gate(config, ["L0H1", "L2H3", "L0H1"])
    assert gate.dtype == torch.float32 and gate.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert [head_name(head) for head in all_heads(config)][:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    assert torch.equal(head_gate(config, []), torch.ones(3, 4))
    for names, wrong in (
        (["L0H1", "L3H0", "x"], "'L3H0', 'x'"),
        (["L0H4"], "'L0H4'"),
        ([""], "''"),
        (["L00H1", "l"], "'L00H1', 'l'"),
    ):
        with pytest.raises(ValueError, match=f"has no head {wrong}; with 3 layers of 4 heads, use L0H0 to L2H3"):
            head_gate(config, names)
    with pytest.raises(ValueError, match="model.n_heads=0"):
        head_gate(tiny_gpt(n_heads=0).config, ["L0H0"])


def test_the_table():
    model = tiny_gpt(n_layers=1, n_heads=2)
    columns(model, (0, 1)).zero_()
    ablation = ablate(model, some_text(9))
    head, first, second = ablation.table()
    assert head == ["head", "removed by zero", "corrected", "the loss", "removed by mean", "corrected", "the loss"]
    assert second == ["L0H1", *["+0.0000 ± 0.0000", "± 0.0000", "not distinguishable"] * 2]
    interval = ablation.changes("mean")[0, 0].interval
    assert first[4] == f"{interval.mean:+.4f} ± {(interval.high - interval.low) / 2:.4f}"
