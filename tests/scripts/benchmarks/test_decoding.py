"""what=decode: which tokens are timed, and what the figures are made of."""

import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models

from tests.conftest import tiny_gpt
from tests.scripts.benchmarks.test_bench import composed
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import decoding, versus
from tril.scripts.benchmarks.decoding import Decode
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import UserError, plain

TINY = [
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "data.tokenizer.vocab_size=300",
    "trainer.accelerator=cpu",
]


@pytest.fixture
def bench(tmp_path):
    def bench(*overrides, context=32, repeats=1):
        cfg = composed(*TINY, f"model.context_length={context}", *overrides, f"output_dir={tmp_path}")
        return Bench(plan_of(cfg), plain(cfg), repeats, 1, 1, [], tmp_path)

    return bench


@pytest.fixture
def laps(monkeypatch):
    """The arguments of every run; a step costs what the test says, the first 0.5 s."""
    asked = []

    def laps(self, batch, prompt, new, way="cache"):
        asked.append((batch, prompt, new, way))
        return [0.5] + [{"cache": 0.002, "compiled": 0.001, "no cache": 0.010}[way]] * (new - 1)

    monkeypatch.setattr(Decode, "laps", laps)
    return asked


def test_a_lap_for_every_token_of_the_model_itself(monkeypatch):
    asked = {}

    def recorded(model, prompts, **settings):
        asked.update(settings, prompts=prompts)
        return generate_ids(model, prompts, **settings)

    generate_ids = decoding.generate_ids
    monkeypatch.setattr(decoding, "generate_ids", recorded)
    model = tiny_gpt(context_length=32)
    laps = Decode(model, 20, "cpu").laps(3, 16, 5, "no cache")
    assert len(laps) == 5 and min(laps) > 0
    assert [len(prompt) for prompt in asked["prompts"]] == [16] * 3 and max(map(max, asked["prompts"])) < 20
    assert (asked["max_new_tokens"], asked["use_cache"], asked["vocab_size"]) == (5, False, 20)
    assert "eot_id" not in asked  # which could end it early


def test_a_compiled_run_compiles_the_steps_with_the_cache(bench, monkeypatch):
    asked = set()

    def noted(*_, use_cache=True, compile=False, **rest):
        asked.add((use_cache, compile))
        return iter(range(9))

    monkeypatch.setattr(decoding, "generate_ids", noted)
    list(decoding.run(bench("compile=false")))
    assert asked == {(True, False), (False, False)}
    list(decoding.run(bench("compile=true")))
    assert asked == {(True, False), (False, False), (True, True)}


def test_compiled_steps_stand_beside_the_plain_ones(bench, laps, monkeypatch):
    monkeypatch.setattr(versus, "sampling_seconds_per_token", lambda bench: 0.01)
    throughput, positions, beside = decoding.run(bench("compile=true", "vs_sample='other {n}'"))
    speeds = {row["decoding"]: row["tokens/s"] for row in throughput.rows}
    expected = {
        "1 stream, cache": 500,
        "batch of 64, cache": 32000,
        "1 stream, compiled": 1000,
        "batch of 64, compiled": 64000,
    }
    assert speeds == pytest.approx(expected | {"1 stream, no cache": 100})
    assert all(row["ms per token, compiled"] == pytest.approx(1) for row in positions.rows)
    ratios = {row["decoding"]: row["tokens/s, ours / theirs, median"] for row in beside.rows}
    assert ratios.pop("theirs") is None
    assert ratios == pytest.approx({f"ours, {name}": speed / 100 for name, speed in expected.items()})


def test_throughput_from_literal_times(bench, laps):
    bench = bench(context=100, repeats=3)
    section = decoding.throughput(bench, Decode(*decoding.subject(bench), "cpu"))
    one, many, without = section.rows
    assert one["tokens/s"] == pytest.approx(500) and one["ms per step"] == pytest.approx(2)
    assert many["tokens/s"] == pytest.approx(64 * 500)
    assert without["tokens/s"] == pytest.approx(100) and without["ms to the first token"] == pytest.approx(500)
    assert set(laps) == {
        (1, 16, 84, "cache"),
        (64, 16, 84, "cache"),
        (1, 16, 84, "no cache"),
    }  # up to the end of the context
    assert {len(values) for values in section.samples.values()} == {3} and len(section.samples) == 6


def test_a_long_context_is_not_filled_for_the_throughput(bench, laps):
    bench = bench(context=1024)
    decoding.throughput(bench, Decode(*decoding.subject(bench), "cpu"))
    assert {new for _, _, new, _ in laps} == {256}


def test_positions_end_with_the_context():
    assert decoding.positions(256) == [24, 57, 90, 123, 156, 189, 222, 256]
    assert decoding.positions(25) == [24, 25] and decoding.positions(24) == [24]


def test_a_token_at_a_position_is_that_of_the_steps_before_it(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Decode, "laps", lambda self, *arguments: asked.append(arguments) or [9.0] + [1.0, 2, 3, 4, 5, 6, 7, 80]
    )
    bench = bench(context=24, repeats=2)
    section = decoding.against_position(bench, Decode(*decoding.subject(bench), "cpu"))
    assert section.rows == [{"position": 24, "ms per token, cache": 4500, "ms per token, no cache": 4500}]
    assert set(asked) == {
        (1, 16, 9, "cache"),
        (1, 16, 9, "no cache"),
    }  # 16 + 9 - 1 tokens: the last is computed from all of the context
    axes = Figure().subplots()
    section.draw(axes)
    assert [line.get_xydata().tolist() for line in axes.get_lines()] == [[[24, 4500]]] * 2


def test_beside_another_program_both_are_differences(bench, laps, monkeypatch):
    theirs = iter([0.02, 0.04, 0.03])
    monkeypatch.setattr(versus, "sampling_seconds_per_token", lambda bench: next(theirs))
    bench = bench("vs_sample='other {n}'", repeats=3)
    *_, section = decoding.run(bench)
    one, many, other = section.rows
    assert [row["tokens/s"] for row in (one, many, other)] == pytest.approx([500, 64 * 500, 100 / 3])
    ratios = [one[f"tokens/s, ours / theirs, {key}"] for key in ("median", "smallest", "largest")]
    assert ratios == pytest.approx([15, 10, 20])
    assert many["tokens/s, ours / theirs, median"] == pytest.approx(64 * 15)
    assert other["tokens/s, ours / theirs, median"] is None
    assert {(1, 16, 64, "cache"), (1, 16, 576, "cache"), (64, 16, 64, "cache"), (64, 16, 576, "cache")} <= set(laps)


def test_a_whole_run_of_a_fresh_model(bench):
    throughput, positions = decoding.run(bench(repeats=2))
    assert [row["decoding"] for row in throughput.rows] == [
        "1 stream, cache",
        "batch of 64, cache",
        "1 stream, no cache",
    ]
    assert all(x > 0 for row in throughput.rows for x in list(row.values())[1:])
    assert [row["position"] for row in positions.rows] == decoding.positions(32)


def test_a_fresh_model_is_not_the_identity(bench):
    model, vocab_size = decoding.subject(bench())
    assert vocab_size == 300 and not model.training
    assert all(p.abs().max() > 0 for p in model.parameters())


def test_a_checkpoint_is_decoded_with_its_own_vocabulary(bench, tmp_path):
    model = tiny_gpt(context_length=40)
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    save(tmp_path / "other.ckpt", LanguageModel(model, tokenizer))
    loaded, vocab_size = decoding.subject(bench(f"ckpt={tmp_path / 'other.ckpt'}"))
    assert vocab_size == 2 and torch.equal(loaded.embed.weight, model.embed.weight)


def test_refuses_a_context_that_is_too_short(bench):
    with pytest.raises(UserError, match="at least 24 tokens, not 23; leave decode out"):
        decoding.subject(bench(context=23))
