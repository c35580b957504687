"""what=cost: what is changed, what is left out, and what it is compared with."""

import pytest
from matplotlib.figure import Figure

from tests.scripts.benchmarks.test_bench import composed
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import cost
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import plain

TINY = ["model.n_layers=2", "model.dim=32", "model.n_heads=2", "model.context_length=16", "data.batch_size=2"]
CPU = ["data.tokenizer.vocab_size=300", "trainer.accelerator=cpu", "trainer.precision=32-true"]


@pytest.fixture
def bench(tmp_path):
    def bench(*overrides, repeats=2, steps=1):
        cfg = composed(*TINY, *CPU, *overrides, f"output_dir={tmp_path}")
        return Bench(plan_of(cfg), plain(cfg), repeats, 1, steps, [], tmp_path)

    return bench


def test_a_wider_model_has_more_heads_of_the_same_size(bench):
    plans = cost.plans(bench().plan, "width")
    assert {factor: (p.model.dim, p.model.n_heads) for factor, p in plans.items()} == {
        0.5: (16, 1),
        1: (32, 2),
        2: (64, 4),
        4: (128, 8),
    }
    assert {p.model.head_size for p in plans.values()} == {16}


def test_key_value_heads_grow_with_the_heads(bench):
    plans = cost.plans(bench("model.n_heads=4", "model.n_kv_heads=2").plan, "width")
    assert {factor: p.model.n_kv_heads for factor, p in plans.items()} == {0.5: 1, 1: 2, 2: 4, 4: 8}


def test_factors_without_a_whole_number_are_left_out(bench):
    assert list(cost.plans(bench("model.n_heads=1").plan, "width")) == [1, 2, 4]
    assert list(cost.plans(bench("model.n_layers=3").plan, "depth")) == [1, 2, 4]
    assert list(cost.plans(bench("model.n_heads=0", "model.n_kv_heads=null", "model.qk_norm=false").plan, "width")) == [
        0.5,
        1,
        2,
        4,
    ]


@pytest.mark.parametrize("size, key", [("depth", "n_layers"), ("context", "context_length"), ("batch", "batch_size")])
def test_each_size_is_changed_alone(bench, size, key):
    configured = bench().plan
    for factor, plan in cost.plans(configured, size).items():
        before, after = (vars(p.model) | {"batch_size": p.data.batch_size} for p in (configured, plan))
        assert after == before | {key: int(factor * before[key])}


@pytest.fixture
def literal(monkeypatch):
    """No training: a step takes 10 ms x dim, and what else the test says."""
    extra = []
    monkeypatch.setattr(cost, "new_module", lambda bench: bench)
    monkeypatch.setattr(cost, "new_windows", lambda bench: None)
    monkeypatch.setattr(
        cost, "BareLoop", lambda module, windows, bench: type("Loop", (), {"step": bench.plan.model.dim})
    )
    monkeypatch.setattr(
        cost, "step_seconds", lambda step, *, warmup, steps, device: [step * 0.01 * (extra[0] if extra else 1)] * steps
    )
    return extra


def test_the_ratios_from_literal_times(bench, literal):
    (section,) = cost.run(bench(repeats=3))
    rows = {(row["size"], row["factor"]): row for row in section.rows}
    assert list(rows) == [
        (size, factor) for size in ("width", "depth", "context", "batch") for factor in (0.5, 1, 2, 4)
    ]
    assert [rows["width", factor]["times the configured step (median)"] for factor in (0.5, 1, 2, 4)] == pytest.approx(
        [0.5, 1, 2, 4]
    )
    assert [rows["depth", factor]["(largest)"] for factor in (0.5, 1, 2, 4)] == pytest.approx([1, 1, 1, 1])
    assert rows["width", 2]["value"] == 64 and rows["width", 2]["ms per step"] == pytest.approx(640)
    assert rows["batch", 4]["value"] == 8 and rows["context", 0.5]["value"] == 8
    assert {len(values) for values in section.samples.values()} == {3} and len(section.samples) == 16


def test_four_times_is_left_out_where_a_step_would_take_too_long(bench, literal):
    literal.append(2)  # 0.64 s as configured, 1.28 s twice as wide, so 2.56 s
    found = cost.measured(bench(), "width")
    assert list(found) == [0.5, 1, 2]
    assert list(cost.measured(bench(), "depth")) == [0.5, 1, 2, 4]


def test_expected():
    assert cost.expected({0.5: 9.0, 1.0: 2.0, 2.0: 6.0}) == 18.0


@pytest.mark.parametrize("first, steps, taken", [(0.1, 50, 3), (0.1, 2, 2), (1.0, 50, 1)])
def test_short_steps_are_repeated(bench, monkeypatch, literal, first, steps, taken):
    asked = []
    monkeypatch.setattr(
        cost, "step_seconds", lambda step, *, warmup, steps, device: asked.append(steps) or [first] * steps
    )
    cost.measured(bench(steps=steps, repeats=1), "depth")
    assert asked[:4] == [1] * 4 and set(asked[4:]) == {taken}


def test_real_steps(bench):
    (section,) = cost.run(bench(repeats=1))
    assert len(section.rows) == 16 and all(row["ms per step"] > 0 for row in section.rows)
    assert [row["times the configured step (median)"] for row in section.rows if row["factor"] == 1] == [1] * 4


def test_the_picture_has_a_line_for_each_size_and_one_for_a_proportional_cost():
    axes = Figure().subplots()
    cost.draw({"width": {0.5: [1.0, 3.0], 1.0: [2.0, 2.0], 2.0: [6.0, 8.0]}}, axes)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["width"] == [[0.5, 1.0], [1, 1], [2, 3.5]]
    assert lines["proportional"] == [[0.5, 0.5], [1, 1], [2, 2], [4, 4]]
