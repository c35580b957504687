"""what=cost: what is scaled, what is left out, and what the ratios compare."""

import pytest

from tril.scripts.benchmarks import cost

TWO_LAYERS = "model.n_layers=2"


def configs_of(bench, size):
    return cost.scaled(bench.run_config, size)


def measured(bench, size):
    return cost.measure(bench, size, configs_of(bench, size))


def test_a_wider_model_has_more_heads_of_the_same_size(make_bench):
    configs = configs_of(make_bench(), "width")
    widths = {factor: (config.model.dim, config.model.n_heads) for factor, config in configs.items()}
    assert widths == {0.5: (16, 1), 1: (32, 2), 2: (64, 4), 4: (128, 8)}
    assert {config.model.head_size for config in configs.values()} == {16}


def test_key_value_heads_grow_with_the_heads(make_bench):
    configs = configs_of(make_bench("model.n_heads=4", "model.n_kv_heads=2"), "width")
    assert {factor: config.model.n_kv_heads for factor, config in configs.items()} == {0.5: 1, 1: 2, 2: 4, 4: 8}


def test_factors_without_a_whole_number_are_left_out(make_bench):
    assert list(configs_of(make_bench("model.n_heads=1"), "width")) == [1, 2, 4]
    assert list(configs_of(make_bench("model.n_layers=3"), "depth")) == [1, 2, 4]
    headless = make_bench("model.n_heads=0", "model.n_kv_heads=null", "model.qk_norm=false")
    assert list(configs_of(headless, "width")) == [0.5, 1, 2, 4]


@pytest.mark.parametrize("size, key", [("depth", "n_layers"), ("context", "context_length"), ("batch", "batch_size")])
def test_each_size_is_changed_alone(make_bench, size, key):
    configured = make_bench(TWO_LAYERS).run_config
    for factor, config in cost.scaled(configured, size).items():
        before, after = (vars(c.model) | {"batch_size": c.data.batch_size} for c in (configured, config))
        assert after == before | {key: int(factor * before[key])}


@pytest.fixture
def literal(monkeypatch):
    """Replaces training: a step takes 10 ms times the width, times `slowdown[0]` if the test sets it."""
    slowdown = []

    class Loop:
        def __init__(self, module, windows, bench):
            self.step = bench.run_config.model.dim

    def step_seconds(step, device, *, warmup, steps=1):
        return [step * 0.01 * (slowdown[0] if slowdown else 1)] * steps

    monkeypatch.setattr(cost, "new_module", lambda bench: None)
    monkeypatch.setattr(cost, "new_windows", lambda bench: None)
    monkeypatch.setattr(cost, "BareLoop", Loop)
    monkeypatch.setattr(cost, "step_seconds", step_seconds)
    return slowdown


def test_ratios_from_literal_times(make_bench, literal):
    (section,) = cost.run(make_bench(TWO_LAYERS, "repeats=3"))
    rows = {(row["size"], row["factor"]): row for row in section.rows}
    factors = (0.5, 1, 2, 4)
    assert list(rows) == [(size, factor) for size in ("width", "depth", "context", "batch") for factor in factors]
    ratio = "relative to the configured step (median)"
    assert [rows["width", factor][ratio] for factor in factors] == pytest.approx([0.5, 1, 2, 4])
    assert [rows["depth", factor]["(largest)"] for factor in factors] == pytest.approx([1, 1, 1, 1])
    assert rows["width", 2]["value"] == 64 and rows["width", 2]["ms per step"] == pytest.approx(640)
    assert rows["batch", 4]["value"] == 8 and rows["context", 0.5]["value"] == 8
    assert {len(values) for values in section.samples.values()} == {3} and len(section.samples) == 16


def test_factor_4_is_left_out_if_a_step_would_take_too_long(make_bench, literal):
    literal.append(2)  # 0.64 s as configured, 1.28 s at factor 2, so 2.56 s at factor 4
    assert list(measured(make_bench(), "width")) == [0.5, 1, 2]
    assert list(measured(make_bench(TWO_LAYERS), "depth")) == [0.5, 1, 2, 4]


def test_extrapolated():
    assert cost.extrapolated({0.5: 9.0, 1.0: 2.0, 2.0: 6.0}) == 18.0


@pytest.mark.parametrize("first, steps, expected", [(0.1, 50, 3), (0.1, 2, 2), (1.0, 50, 1)])
def test_a_repetition_of_short_steps_has_several(make_bench, monkeypatch, literal, first, steps, expected):
    counts = []
    monkeypatch.setattr(
        cost, "step_seconds", lambda step, device, *, warmup, steps=1: counts.append(steps) or [first] * steps
    )
    measured(make_bench(TWO_LAYERS, f"steps={steps}"), "depth")
    assert counts[:4] == [1] * 4 and set(counts[4:]) == {expected}


def test_real_steps(make_bench):
    (section,) = cost.run(make_bench(TWO_LAYERS))
    assert len(section.rows) == 16 and all(row["ms per step"] > 0 for row in section.rows)
    ratio = "relative to the configured step (median)"
    assert [row[ratio] for row in section.rows if row["factor"] == 1] == [1] * 4


def test_the_plot_has_a_line_for_each_size_and_one_for_a_proportional_cost(make_bench, literal):
    (section,) = cost.run(make_bench(TWO_LAYERS))
    assert section.plot.lines["width"] == pytest.approx({0.5: 0.5, 1: 1, 2: 2, 4: 4})
    assert section.plot.lines["depth"] == {0.5: 1, 1: 1, 2: 1, 4: 1}
    assert section.plot.guides == {"proportional": {0.5: 0.5, 1: 1, 2: 2, 4: 4}}
