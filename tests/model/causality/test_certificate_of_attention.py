"""The certificate of every kind of attention: positions, norms and sizes of a GPT, and models of other parts."""

import functools

import pytest
import torch

from tests.conftest import TRAINABLE, tiny_gpt
from tests.model.causality.cross import N_CONTEXT, CrossSubject
from tests.model.causality.mutants import TINY
from tests.model.causality.parts import PARTS
from tril.model.causality import subject
from tril.model.causality.certificate import CHECKS, certify
from tril.model.causality.grids.gpt_grid import gpt_cases, sharpen
from tril.model.causality.subject import GPTSubject, attention_layers
from tril.model.generation.step import decode_step
from tril.model.gpt import GPTConfig

pytestmark = pytest.mark.usefixtures("short_canary")
OTHERS = {name: part for name, part in PARTS.items() if name}
# Checks that a kind of model does not have: text generation gives it no second argument, mask or bias.
CROSS = {"documents", "padding", "generation"}
MISSING = {
    "two arguments": {"decoding", "generation"},
    "three arguments": {"decoding", "generation"},
    "additive mask": {"decoding"},
    "learned bias": {"generation"},
    "cross-attention": CROSS,
    "cross-attention after alibi": CROSS,
    "shards": {"generation"},
    "shards with alibi": {"generation"},
}

COMPILE = torch.compile


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """Compilation would take longer than all the rest; one slow test compiles."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def certificate(part, *, context_length, **options):
    config = GPTConfig(**TINY | {"context_length": context_length} | part.choices)
    return certify("part", part.cases(config, compile=True, **options))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("backend", ["fused", pytest.param("flex", marks=pytest.mark.slow)])
def test_other_parts_are_certified(name, backend):
    """The certificate of the fused backend compares it with the explicit one; the whole grid has the others."""
    measured = certificate(PARTS[name], context_length=9, precisions=("32-true",), backends=(backend,))
    assert measured.passed, measured.failures_by_check()
    assert set(measured.checks()) == set(CHECKS) - MISSING.get(name, set())


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_parts_are_certified_on_the_whole_grid(name):
    measured = certificate(PARTS[name], context_length=24, backends=TRAINABLE)
    assert measured.passed, measured.failures_by_check()


CHOICES = {
    "alibi": {"pos": "alibi"},
    "alibi, six heads": {"pos": "alibi", "n_heads": 6, "n_kv_heads": 3, "head_dim": 5, "qk_norm": "none", "bias": True},
    "alibi in a window": {"pos": "alibi", "window": 4, "n_kv_heads": 1, "norm_eps": 1e-3},
    "layernorm of queries and keys": {"qk_norm": "layernorm", "qkv_bias": True, "norm": "layernorm"},
    "base and hidden width": {"rope_base": 500.0, "mlp_hidden": 50, "mlp": "swiglu"},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(
    ("backends", "precisions"),
    [
        (("fused",), ("32-true",)),
        pytest.param(TRAINABLE, ("32-true", "bf16-mixed"), marks=pytest.mark.slow),
        pytest.param(("flex",), ("32-true",), marks=pytest.mark.slow),
    ],
    ids=["fused", "trainable", "flex"],
)
def test_every_setting_of_attention_is_certified(choices, backends, precisions):
    config = GPTConfig(**TINY | {"context_length": 24} | choices)
    measured = certify("setting", gpt_cases(config, backends=backends, precisions=precisions, compile=True))
    assert measured.passed, measured.failures_by_check()
    assert set(measured.checks()) == set(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compiler"), [("", "inductor"), ("larger values", "aot_eager"), ("learned bias", "aot_eager")]
)
def test_the_compiled_model_and_compiled_decoding_are_certified(name, compiler, monkeypatch):
    """One with the kernels of the compiler, whose time is most of the test's, the others with those of torch."""
    compile = functools.partial(COMPILE, backend=compiler)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(subject, "decode_step", compile(decode_step, fullgraph=True, dynamic=False))
    part, choices = PARTS[name], {"backend": "fused", "pos": "alibi", "qk_norm": "layernorm", "context_length": 9}
    options = {"precisions": ("32-true",), "backends": ("fused",), "compile": True}
    cases = [case for case in part.cases(GPTConfig(**TINY | choices), **options) if case.labels["weights"] == "random"]
    assert sum(case.subject.compiled for case in cases) == 1
    measured = certify("compiled", cases)
    assert measured.passed, measured.failures_by_check()


def test_sharp_scores_exceed_alibi_and_a_finite_mask():
    for choices in ({"qk_norm": "layernorm"}, {"qk_norm": "none"}):
        model, sizes = tiny_gpt(pos="alibi", **choices), []
        sharpen(model)
        for part in ("q", "k"):
            layer = getattr(model.blocks[0].attn, f"{part}_proj" if choices["qk_norm"] == "none" else f"{part}_norm")
            layer.register_forward_hook(lambda _, __, out, sizes=sizes: sizes.append(out.abs().mean()))
        model(torch.randint(31, (1, 12)))
        assert sizes[0] * sizes[1] * 8**0.5 > 1e4  # q k / sqrt(D), D = 8; the bias is at most 11 / 4


def test_expected_dependencies_of_a_learned_bias_follow_its_infinities():
    part = PARTS["learned bias"]
    measured = part.subject(part.build(GPTConfig(**TINY)))
    even = [[int(j <= i and (i - j) % 2 == 0) for j in range(7)] for i in range(7)]
    assert measured.visible(7).int().tolist() == even
    first_head = [[int(j <= i - 4 and (i - j) % 2 == 0) for j in range(7)] for i in range(7)]
    assert measured.visible(7, 0).int().tolist() == [first_head, even, even, even]


def test_a_decoder_depends_on_all_of_its_context_and_its_own_past():
    part = PARTS["cross-attention"]
    model = part.build(GPTConfig(**TINY | {"window": 2}))
    decoder = CrossSubject(model)
    expected = torch.zeros(9, 9).int()
    expected[:5, :5] = torch.eye(5)
    expected[5:, :5] = 1
    expected[5:, 5:] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]])  # two layers of window 2
    assert N_CONTEXT == 5 and torch.equal(decoder.visible(9).int(), expected)
    names = [(layer.name, tuple(layer.visible.shape)) for layer in decoder.probed_layers(9)]
    assert names[:2] == [("layer 0", (4, 4)), ("layer 0, cross-attention", (4, 5))] and len(names) == 4
    blocks = [outer.block for outer in model.blocks]
    assert attention_layers(model) == [attn for block in blocks for attn in (block.attn, block.cross_attn)]


def test_a_sharded_model_is_compared_with_the_full_one():
    part = PARTS["shards"]
    full = part.build(GPTConfig(**TINY | part.choices)).eval()
    sharded, ids = part.subject(full), torch.randint(1, 31, (2, 9))
    assert torch.equal(sharded.plain()(ids), GPTSubject(full)(ids)) and sharded.model is not full
    ranks = [attn for block in sharded.model.blocks for attn in block.attn.ranks]
    assert [layer.module for layer in sharded.probed_layers(9)] == ranks and len(ranks) == 4
    assert [attn.n_heads for attn in ranks] == [2] * 4
