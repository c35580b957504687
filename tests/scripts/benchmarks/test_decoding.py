"""what=decode: which tokens are timed, and what the figures consist of."""

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.conftest import tiny_gpt
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.benchmarks import decoding, versus
from tril.scripts.benchmarks.decoding import Decoder
from tril.scripts.cli.errors import UserError


@pytest.fixture
def bench(make_bench):
    return lambda *overrides, context=32: make_bench(f"model.context_length={context}", *overrides)


@pytest.fixture
def calls(monkeypatch):
    """Replaces decoding: the arguments of every call; the first step takes 0.5 s, the others depend on the mode."""
    calls = []
    seconds = {"cache": 0.002, "compiled": 0.001, "no cache": 0.010}

    def step_seconds(self, batch, prompt, new, mode="cache"):
        calls.append((batch, prompt, new, mode))
        return [0.5] + [seconds[mode]] * (new - 1)

    monkeypatch.setattr(Decoder, "step_seconds", step_seconds)
    return calls


def test_every_token_of_the_model_is_timed(monkeypatch):
    arguments = {}

    def recorded(model, prompts, sampling, **settings):
        arguments.update(settings, prompts=prompts, max_new_tokens=sampling.max_new_tokens)
        return generate_ids(model, prompts, sampling, **settings)

    generate_ids = decoding.generate_ids
    monkeypatch.setattr(decoding, "generate_ids", recorded)
    seconds = Decoder(tiny_gpt(context_length=32), 20, "cpu").step_seconds(3, 16, 5, "no cache")
    assert len(seconds) == 5 and min(seconds) > 0
    assert [len(prompt) for prompt in arguments["prompts"]] == [16] * 3 and max(map(max, arguments["prompts"])) < 20
    assert (arguments["max_new_tokens"], arguments["use_cache"], arguments["vocab_size"]) == (5, False, 20)
    assert "eot_id" not in arguments  # it could end generation early


def test_compilation_adds_the_compiled_mode(bench, monkeypatch):
    modes = set()

    def generate_ids(*_, use_cache=True, compile=False, **rest):
        modes.add((use_cache, compile))
        return iter(range(9))

    monkeypatch.setattr(decoding, "generate_ids", generate_ids)
    list(decoding.run(bench("compile=false")))
    assert modes == {(True, False), (False, False)}
    list(decoding.run(bench("compile=true")))
    assert modes == {(True, False), (False, False), (True, True)}


def test_compiled_steps_are_shown_next_to_the_others(bench, calls, monkeypatch):
    monkeypatch.setattr(versus, "sampling_seconds_per_token", lambda config: 0.01)
    throughput, by_position, compared = decoding.run(bench("compile=true", "vs_sample='python {n}'"))
    speeds = {row["decoding"]: row["tokens/s"] for row in throughput.rows}
    expected = {
        "1 stream, cache": 500,
        "batch of 64, cache": 32000,
        "1 stream, compiled": 1000,
        "batch of 64, compiled": 64000,
    }
    assert speeds == pytest.approx(expected | {"1 stream, no cache": 100})
    assert all(row["ms per token, compiled"] == pytest.approx(1) for row in by_position.rows)
    ratios = {row["decoding"]: row["tokens/s, tril / other, median"] for row in compared.rows}
    assert ratios.pop("other") is None
    assert ratios == pytest.approx({f"tril, {name}": speed / 100 for name, speed in expected.items()})


def test_throughput_from_literal_times(bench, calls):
    bench = bench("repeats=3", context=100)
    section = decoding.throughput(bench, decoding.load_decoder(bench))
    one, many, without = section.rows
    assert one["tokens/s"] == pytest.approx(500) and one["ms per step"] == pytest.approx(2)
    assert many["tokens/s"] == pytest.approx(64 * 500)
    assert without["tokens/s"] == pytest.approx(100) and without["ms to the first token"] == pytest.approx(500)
    # up to the end of the context
    assert set(calls) == {(1, 16, 84, "cache"), (64, 16, 84, "cache"), (1, 16, 84, "no cache")}
    assert {len(values) for values in section.samples.values()} == {3} and len(section.samples) == 6


def test_throughput_does_not_fill_a_long_context(bench, calls):
    bench = bench(context=1024)
    decoding.throughput(bench, decoding.load_decoder(bench))
    assert {new for _, _, new, _ in calls} == {256}


def test_positions_end_with_the_context():
    assert decoding.positions(256) == [24, 57, 90, 123, 156, 189, 222, 256]
    assert decoding.positions(25) == [24, 25] and decoding.positions(24) == [24]


def test_the_time_at_a_position_is_that_of_the_tokens_before_it(bench, monkeypatch):
    calls = []
    times = [9.0, 1.0, 2, 3, 4, 5, 6, 7, 80]
    monkeypatch.setattr(Decoder, "step_seconds", lambda self, *arguments: calls.append(arguments) or times)
    bench = bench("repeats=2", context=24)
    section = decoding.by_position(bench, decoding.load_decoder(bench))
    assert section.rows == [{"position": 24, "ms per token, cache": 4500, "ms per token, no cache": 4500}]
    # 16 + 9 - 1 tokens: the last one is computed from the whole context
    assert set(calls) == {(1, 16, 9, "cache"), (1, 16, 9, "no cache")}
    assert section.plot.lines == {"cache": {24: 4500}, "no cache": {24: 4500}}


def test_both_programs_are_compared_by_differences(bench, calls, monkeypatch):
    seconds = iter([0.02, 0.04, 0.03])
    monkeypatch.setattr(versus, "sampling_seconds_per_token", lambda config: next(seconds))
    *_, section = decoding.run(bench("vs_sample='python {n}'", "repeats=3"))
    one, many, other = section.rows
    assert [row["tokens/s"] for row in (one, many, other)] == pytest.approx([500, 64 * 500, 100 / 3])
    ratios = [one[f"tokens/s, tril / other, {key}"] for key in ("median", "smallest", "largest")]
    assert ratios == pytest.approx([15, 10, 20])
    assert many["tokens/s, tril / other, median"] == pytest.approx(64 * 15)
    assert other["tokens/s, tril / other, median"] is None
    assert {(1, 16, 64, "cache"), (1, 16, 576, "cache"), (64, 16, 64, "cache"), (64, 16, 576, "cache")} <= set(calls)


def test_a_model_with_random_weights_is_timed(bench):
    throughput, by_position = decoding.run(bench("repeats=2"))
    assert [row["decoding"] for row in throughput.rows] == [
        "1 stream, cache",
        "batch of 64, cache",
        "1 stream, no cache",
    ]
    assert all(x > 0 for row in throughput.rows for x in list(row.values())[1:])
    assert [row["position"] for row in by_position.rows] == decoding.positions(32)


def test_random_weights_are_nowhere_zero(bench):
    decoder = decoding.load_decoder(bench())
    assert decoder.vocab_size == 300 and not decoder.model.training
    assert all(p.abs().max() > 0 for p in decoder.model.parameters())


def test_a_checkpoint_is_decoded_with_its_own_vocabulary(bench, tmp_path):
    model = tiny_gpt(context_length=40)
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    save(tmp_path / "other.ckpt", LanguageModel(model, tokenizer))
    decoder = decoding.load_decoder(bench(f"ckpt={tmp_path / 'other.ckpt'}"))
    assert decoder.vocab_size == 2 and torch.equal(decoder.model.embed.weight, model.embed.weight)


def test_a_short_context_is_refused(bench):
    with pytest.raises(UserError, match="at least 24 tokens, not 23; leave decode out"):
        decoding.load_decoder(bench(context=23))
