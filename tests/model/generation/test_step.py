"""The decoding step against full passes: plain, and as torch.compile captures it.

All tests but one run the captured graph without generating code, so that no C++ or Triton is compiled.
"""

import itertools
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.conftest import assert_close, tiny_gpt
from tests.model.generation.test_generate import GREEDY, LIMIT, PARTS, alone, forced, greedy_ids, ids_of, random_ids
from tril.model.compilation import RECOMPILE_LIMIT
from tril.model.generation.generate import Rows, generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.generation.step import COMPILE_OPTIONS, compiled_step, decode_step
from tril.model.gpt import GPT


@pytest.fixture
def plain_step(monkeypatch):
    """Disables compilation. Returns the positions at which the step runs."""
    positions = []

    def step(model, cache, ids, position, *options):
        positions.append(position.item())
        return decode_step(model, cache, ids, position, *options)

    monkeypatch.setattr("tril.model.generation.generate.compiled_step", lambda device_type: step)
    return positions


@pytest.fixture
def captured_step(monkeypatch):
    """Captures the step as one graph for each set of shapes. Returns the counter of captures."""
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(decode_step, backend=counter, fullgraph=True, dynamic=False)
    monkeypatch.setattr("tril.model.generation.generate.compiled_step", lambda device_type: step)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "parts", [*PARTS, {"backend": "stacked", "window": 4}, {"n_heads": 0}, {"mlp": "none"}], ids=str
)
def test_logits_equal_full_passes_over_several_crops(parts, plain_step):
    model = tiny_gpt(**parts)
    for length in (1, 12):
        prompt, new = random_ids(length), random_ids(20)
        assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))
    assert set(plain_step) == set(range(1, model.config.context_length))


@pytest.mark.slow
def test_logits_with_flex(plain_step):
    model, prompt, new = tiny_gpt(backend="flex", n_kv_heads=2, n_layers=1), random_ids(5), random_ids(1)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_rows_of_unequal_length_equal_each_row_alone(parts, plain_step):
    model = tiny_gpt(**parts)
    prompts, new, gate = [random_ids(n) for n in (3, 1, 20, 3, 11)], random_ids(5, 25), torch.rand(2, 4)
    batch = forced(model, prompts, new, head_gate=gate, compile=True)
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        assert_close(batch[:, row], alone(model, prompt, tokens, head_gate=gate))


CAPTURED = [{}, {"n_kv_heads": 1, "window": 3}, {"pos": "alibi"}]
SLOW_CAPTURED = [PARTS[5], PARTS[6], PARTS[7], {"backend": "stacked", "n_kv_heads": 2}, {"n_heads": 0}]


@pytest.mark.parametrize(
    "parts", [*CAPTURED, *(pytest.param(parts, marks=pytest.mark.slow) for parts in SLOW_CAPTURED)], ids=str
)
@pytest.mark.parametrize("lengths", [pytest.param([4], marks=pytest.mark.slow), [3, 1, 20]], ids=str)
def test_torch_captures_the_step_once_for_all_positions(parts, lengths, captured_step):
    model = tiny_gpt(**parts)
    prompts, new = [random_ids(n) for n in lengths], random_ids(len(lengths), 20)
    logits = forced(model, prompts, new, compile=True)
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        assert_close(logits[:, row], alone(model, prompt, tokens))
    assert captured_step.frame_count == 1


def interleaved(runs, n_steps):
    """Logits of (model, prompts, gate) runs, one step of each in turn, and the tokens that the runs were fed with."""
    started = [
        Rows(model, prompts, max_new_tokens=n_steps, head_gate=gate, compile=True) for model, prompts, gate in runs
    ]
    new = [random_ids(len(prompts), n_steps - 1) for _, prompts, _ in runs]
    logits = [[rows.logits()] for rows in started]
    for step in range(n_steps - 1):
        for rows, tokens, row_logits in zip(started, new, logits, strict=True):
            rows.append(torch.tensor(tokens)[:, step])
            row_logits.append(rows.logits())
    return [torch.stack(steps) for steps in logits], new


def check_interleaved(runs, captured_step):
    """Guards that are skipped must not let one run use the graph of another."""
    logits, new = interleaved(runs, n_steps=16)  # beyond the context, where padding can start or end
    for (model, prompts, gate), tokens, run_logits in zip(runs, new, logits, strict=True):
        for row, prompt in enumerate(prompts):
            assert_close(run_logits[:, row], alone(model, prompt, tokens[row], head_gate=gate))
    assert captured_step.frame_count <= len(runs)


def test_models_and_shapes_in_turn_use_separate_graphs(captured_step):
    one, other = tiny_gpt(n_layers=1), tiny_gpt(n_layers=1, window=3)
    prompts = [random_ids(3)]
    check_interleaved(
        [
            (one, prompts, None),
            (other, prompts, None),
            (one, prompts, torch.rand(1, 4)),
            (one, [random_ids(3), random_ids(4)], None),
        ],
        captured_step,
    )
    assert captured_step.frame_count == 4


@pytest.mark.slow
def test_many_models_and_shapes_in_turn_use_separate_graphs(captured_step):
    models = [tiny_gpt(), tiny_gpt(n_layers=1), tiny_gpt(), tiny_gpt(window=3)]
    gates = [None, None, torch.rand(2, 4), None]
    runs = []
    for model, gate in zip(models, gates, strict=True):
        runs += [(model, [random_ids(n) for n in lengths], gate) for lengths in ([3], [3, 3], [3, 4])]
    check_interleaved(runs, captured_step)
    assert captured_step.frame_count > 4


def test_sampling_settings_in_turn_use_separate_graphs(captured_step):
    model, prompts = tiny_gpt(n_layers=1), [random_ids(3), random_ids(3)]
    settings = [
        GREEDY,
        SamplingConfig(top_k=2),
        SamplingConfig(top_k=None),
        SamplingConfig(top_p=0.5),
        SamplingConfig(repetition_penalty=9.0),
    ]
    options = {"max_new_tokens": 16, "seed": 3}
    streams = [generate_ids(model, prompts, sampling=sampling, compile=True, **options) for sampling in settings]
    steps = list(zip(*streams, strict=True))  # one token of each in turn
    for number, sampling in enumerate(settings):
        expected = ids_of(generate_ids(model, prompts, sampling=sampling, **options))
        assert ids_of(step[number] for step in steps) == expected
    assert captured_step.frame_count == len(settings)


def test_another_temperature_uses_the_same_graph(captured_step):
    model, prompts, options = tiny_gpt(n_layers=1), [random_ids(3)], {"max_new_tokens": 16, "seed": 3}
    texts = set()
    for temperature in (0.5, 1.0, 3.0):
        settings = {"sampling": SamplingConfig(temperature=temperature), **options}
        ids = ids_of(generate_ids(model, prompts, compile=True, **settings))
        assert ids == ids_of(generate_ids(model, prompts, **settings))
        texts.add(str(ids))
    assert len(texts) == 3 and captured_step.frame_count == 1


def test_padding_that_ends_uses_another_graph(captured_step):
    model, prompts, new = tiny_gpt(n_layers=1), [random_ids(3), random_ids(10)], random_ids(2, 20)
    logits = forced(model, prompts, new, compile=True)  # the second row is cropped to the length of the first
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        assert_close(logits[:, row], alone(model, prompt, tokens))
    assert captured_step.frame_count == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
@pytest.mark.parametrize("pos", ["rope", "alibi"])
def test_generated_code_computes_the_same(pos, tmp_path, monkeypatch):
    """The only test here in which torch generates and compiles C++, which takes 20 s."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no code of an earlier run
    torch._dynamo.reset()
    compiled_step.cache_clear()
    model = tiny_gpt(n_layers=1, n_kv_heads=2, pos=pos)
    prompt, new = random_ids(3), random_ids(20)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))
    options = {"max_new_tokens": 20, "sampling": SamplingConfig(top_k=5, top_p=0.9), "seed": 3}
    assert ids_of(generate_ids(model, [prompt], compile=True, **options)) == ids_of(
        generate_ids(model, [prompt], **options)
    )


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(), SamplingConfig(top_p=0.9, repetition_penalty=1.5)], ids=str
)
def test_ids_equal_those_without_compilation(sampling, plain_step):
    model, prompts = tiny_gpt(), [random_ids(4), random_ids(9)]
    options = {"max_new_tokens": 25, "sampling": sampling, "seed": 3, "vocab_size": 30, "eot_id": 29}
    prompts = [[token % 30 for token in prompt] for prompt in prompts]
    assert ids_of(generate_ids(model, prompts, **options, compile=True)) == ids_of(
        generate_ids(model, prompts, **options)
    )
    assert len(plain_step) > 5


def test_returned_logits_are_not_overwritten_by_later_steps(plain_step, monkeypatch):
    """A CUDA graph returns the same memory at each step."""
    memory = torch.empty(1, 31)
    monkeypatch.setattr(
        "tril.model.generation.generate.compiled_step",
        lambda device_type: lambda *inputs: memory.copy_(decode_step(*inputs)),
    )
    model, prompt, new = tiny_gpt(), random_ids(4), random_ids(6)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_steps_ahead_of_the_reader_change_nothing(steps_ahead, monkeypatch):
    model = tiny_gpt()
    prompts = [random_ids(4) for _ in range(6)]
    without_eot = ids_of(generate_ids(model, prompts, max_new_tokens=20, sampling=GREEDY))
    eot = max(range(31), key=lambda token: sum(token in row for row in without_eot))
    options = {"max_new_tokens": 20, "sampling": GREEDY, "eot_id": eot}
    expected = [ids_of(generate_ids(model, batch, **options)) for batch in (prompts, prompts[:1])]
    monkeypatch.setattr("tril.model.generation.generate.STEPS_AHEAD", {"cpu": steps_ahead})
    assert [ids_of(generate_ids(model, batch, **options)) for batch in (prompts, prompts[:1])] == expected
    assert ids_of(generate_ids(model, prompts[:1], max_new_tokens=1, sampling=GREEDY)) == [without_eot[0][:1]]


def test_the_first_token_does_not_wait_for_the_second(monkeypatch):
    monkeypatch.setattr("tril.model.generation.generate.STEPS_AHEAD", {"cpu": 2})
    calls, hidden = [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, ids, **options: calls.append(1) or hidden(self, ids, **options))
    steps = generate_ids(tiny_gpt(), [[1]], max_new_tokens=9, sampling=GREEDY)
    assert [len(calls) for _ in itertools.islice(steps, 8)] == [1, 4, 5, 6, 7, 8, 9, 9]


def test_the_cache_always_has_the_size_of_the_context(plain_step):
    assert Rows(tiny_gpt(), [[1, 2]], max_new_tokens=3, compile=True).cache.capacity == LIMIT


def test_a_model_without_causal_is_computed_in_full(plain_step):
    model, prompt = tiny_gpt(causal=False), random_ids(4)
    [ids] = ids_of(generate_ids(model, [prompt], max_new_tokens=10, sampling=GREEDY, compile=True))
    assert ids == greedy_ids(model, prompt, 10) and plain_step == []


def test_compilation_needs_the_cache():
    with pytest.raises(ValueError, match="compile=True needs use_cache=True"):
        generate_ids(tiny_gpt(), [[1]], max_new_tokens=2, sampling=GREEDY, use_cache=False, compile=True)


@pytest.mark.parametrize(
    "device_type, options", [("cuda", {"mode": "reduce-overhead"}), ("cpu", COMPILE_OPTIONS["cpu"]), ("mps", {})]
)
def test_compile_options_of_each_device(device_type, options, monkeypatch):
    used = {}
    monkeypatch.setattr(torch, "compile", lambda step, **options: used.update(options) or step)
    assert compiled_step.__wrapped__(device_type) is decode_step
    assert used == {**options, "fullgraph": True, "dynamic": False}
