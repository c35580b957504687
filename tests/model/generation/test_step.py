"""The step of fixed shapes against full passes, as it is and as torch.compile captures it: but for one test by a backend that runs the
captured graph as it stands, so that no C++ or Triton is compiled."""

import itertools
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.conftest import assert_close, tiny_gpt
from tests.model.generation.test_generate import GREEDY, LIMIT, PARTS, alone, forced, greedy_ids, ids_of, random_ids
from tril.model.backends import RECOMPILE_LIMIT
from tril.model.generation.generate import Rows, generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.generation.step import HOW, compiled_step, decode_step
from tril.model.gpt import GPT


@pytest.fixture
def plain_step(monkeypatch):
    """Nothing is compiled; returns the positions at which the step ran."""
    positions = []

    def step(model, cache, ids, position, *options):
        positions.append(position.item())
        return decode_step(model, cache, ids, position, *options)

    monkeypatch.setattr("tril.model.generation.generate.compiled_step", lambda device_type: step)
    return positions


@pytest.fixture
def captured_step(monkeypatch):
    """Captured as one graph, for each shape anew; returns the counter of the captures."""
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
    for length in (1, 5, 12, 30):
        prompt, new = random_ids(length), random_ids(30)
        assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))
    assert set(plain_step) == set(range(1, model.config.context_length))


def test_logits_with_flex(plain_step):
    model, prompt, new = tiny_gpt(backend="flex", n_kv_heads=2, n_layers=1), random_ids(5), random_ids(1)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_rows_of_unequal_length_equal_each_row_alone(parts, plain_step):
    model = tiny_gpt(**parts)
    prompts, new, gate = [random_ids(n) for n in (3, 1, 20, 3, 11)], random_ids(5, 25), torch.rand(2, 4)
    batch = forced(model, prompts, new, head_gate=gate, compile=True)
    for row, (prompt, tokens) in enumerate(zip(prompts, new)):
        assert_close(batch[:, row], alone(model, prompt, tokens, head_gate=gate))


@pytest.mark.parametrize(
    "parts", [PARTS[0], PARTS[5], PARTS[6], PARTS[7], {"backend": "stacked", "n_kv_heads": 2}, {"n_heads": 0}], ids=str
)
@pytest.mark.parametrize("lengths", [[4], [3, 1, 20]])
def test_torch_captures_it_once_for_all_positions(parts, lengths, captured_step):
    model = tiny_gpt(**parts)
    prompts, new = [random_ids(n) for n in lengths], random_ids(len(lengths), 20)
    logits = forced(model, prompts, new, compile=True)
    for row, (prompt, tokens) in enumerate(zip(prompts, new)):
        assert_close(logits[:, row], alone(model, prompt, tokens))
    assert captured_step.frame_count == 1


def test_models_and_forms_in_turn_are_told_apart(captured_step):
    """What is not checked again before each call must not let one call run another's code."""
    models = [tiny_gpt(), tiny_gpt(n_layers=1), tiny_gpt(), tiny_gpt(window=3)]
    gates = [None, None, torch.rand(2, 4), None]
    runs = []  # (model, prompts, gate)
    for model, gate in zip(models, gates):
        runs += [
            (model, [random_ids(3)], gate),
            (model, [random_ids(3), random_ids(3)], gate),
            (model, [random_ids(3), random_ids(4)], gate),
        ]
    started = [Rows(model, prompts, max_new_tokens=16, head_gate=gate, compile=True) for model, prompts, gate in runs]
    new = [random_ids(len(prompts), 15) for _, prompts, _ in runs]
    logits = [[rows.logits()] for rows in started]
    for step in range(15):  # past the end of the context, where padding can begin or end
        for rows, tokens, found in zip(started, new, logits):
            rows.append(torch.tensor(tokens)[:, step])
            found.append(rows.logits())
    for (model, prompts, gate), tokens, found in zip(runs, new, logits):
        for row, prompt in enumerate(prompts):
            assert_close(torch.stack(found)[:, row], alone(model, prompt, tokens[row], head_gate=gate))
    assert 4 < captured_step.frame_count <= len(runs)


def test_ways_to_choose_in_turn_are_told_apart(captured_step):
    model, prompts = tiny_gpt(), [random_ids(3), random_ids(3)]
    ways = [
        GREEDY,
        SamplingConfig(top_k=2),
        SamplingConfig(top_k=None),
        SamplingConfig(top_p=0.5),
        SamplingConfig(repetition_penalty=9.0),
    ]
    options = {"max_new_tokens": 16, "seed": 3}
    steps = list(
        zip(*(generate_ids(model, prompts, sampling=way, compile=True, **options) for way in ways))
    )  # a token of each in turn
    for number, way in enumerate(ways):
        assert ids_of(step[number] for step in steps) == ids_of(generate_ids(model, prompts, sampling=way, **options))
    assert captured_step.frame_count == len(ways)


def test_another_temperature_is_the_same_program(captured_step):
    model, prompts, options = tiny_gpt(), [random_ids(3)], {"max_new_tokens": 16, "seed": 3}
    found = set()
    for temperature in (0.5, 1.0, 3.0):
        ways = {"sampling": SamplingConfig(temperature=temperature), **options}
        ids = ids_of(generate_ids(model, prompts, compile=True, **ways))
        assert ids == ids_of(generate_ids(model, prompts, **ways))
        found.add(str(ids))
    assert len(found) == 3 and captured_step.frame_count == 1


def test_padding_that_ends_is_another_form(captured_step):
    model, prompts, new = tiny_gpt(), [random_ids(3), random_ids(10)], random_ids(2, 20)
    logits = forced(model, prompts, new, compile=True)  # the second row is cut to the length that the first then has
    for row, (prompt, tokens) in enumerate(zip(prompts, new)):
        assert_close(logits[:, row], alone(model, prompt, tokens))
    assert captured_step.frame_count == 2


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_machine_code_computes_the_same(tmp_path, monkeypatch):
    """The one test here in which torch writes C++ and compiles it (some 20 s)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # another time's code would prove nothing
    torch._dynamo.reset()
    compiled_step.cache_clear()
    model = tiny_gpt(n_layers=1, n_kv_heads=2)
    prompt, new = random_ids(3), random_ids(20)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))
    options = {"max_new_tokens": 20, "sampling": SamplingConfig(top_k=5, top_p=0.9), "seed": 3}
    assert ids_of(generate_ids(model, [prompt], compile=True, **options)) == ids_of(
        generate_ids(model, [prompt], **options)
    )


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(), SamplingConfig(top_p=0.9, repetition_penalty=1.5)], ids=str
)
def test_ids_are_those_without_compilation(sampling, plain_step):
    model, prompts = tiny_gpt(), [random_ids(4), random_ids(9)]
    options = {"max_new_tokens": 25, "sampling": sampling, "seed": 3, "vocab_size": 30, "eot_id": 29}
    prompts = [[token % 30 for token in prompt] for prompt in prompts]
    assert ids_of(generate_ids(model, prompts, **options, compile=True)) == ids_of(
        generate_ids(model, prompts, **options)
    )
    assert len(plain_step) > 5


def test_the_step_does_not_write_into_what_was_returned(plain_step, monkeypatch):
    """A CUDA graph returns the same memory each time."""
    memory = torch.empty(1, 31)
    monkeypatch.setattr(
        "tril.model.generation.generate.compiled_step",
        lambda device_type: lambda *inputs: memory.copy_(decode_step(*inputs)),
    )
    model, prompt, new = tiny_gpt(), random_ids(4), random_ids(6)
    assert_close(forced(model, [prompt], [new], compile=True)[:, 0], alone(model, prompt, new))


@pytest.mark.parametrize("late", [1, 3])
def test_reading_late_changes_nothing(late, monkeypatch):
    model = tiny_gpt()
    prompts = [random_ids(4) for _ in range(6)]
    free = ids_of(generate_ids(model, prompts, max_new_tokens=20, sampling=GREEDY))
    eot = max(range(31), key=lambda token: sum(token in row for row in free))
    options = {"max_new_tokens": 20, "sampling": GREEDY, "eot_id": eot}
    expected = [ids_of(generate_ids(model, batch, **options)) for batch in (prompts, prompts[:1])]
    monkeypatch.setattr("tril.model.generation.generate.LATE", {"cpu": late})
    assert [ids_of(generate_ids(model, batch, **options)) for batch in (prompts, prompts[:1])] == expected
    assert ids_of(generate_ids(model, prompts[:1], max_new_tokens=1, sampling=GREEDY)) == [free[0][:1]]


def test_the_first_token_does_not_wait_for_the_second(monkeypatch):
    monkeypatch.setattr("tril.model.generation.generate.LATE", {"cpu": 2})
    calls, hidden = [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, ids, **options: calls.append(1) or hidden(self, ids, **options))
    steps = generate_ids(tiny_gpt(), [[1]], max_new_tokens=9, sampling=GREEDY)
    assert [len(calls) for _ in itertools.islice(steps, 8)] == [1, 4, 5, 6, 7, 8, 9, 9]


def test_the_cache_has_one_size_whatever_is_asked_for(plain_step):
    assert Rows(tiny_gpt(), [[1, 2]], max_new_tokens=3, compile=True).cache.capacity == LIMIT


def test_a_model_that_sees_the_future_is_computed_in_full(plain_step):
    model, prompt = tiny_gpt(causal=False), random_ids(4)
    [ids] = ids_of(generate_ids(model, [prompt], max_new_tokens=10, sampling=GREEDY, compile=True))
    assert ids == greedy_ids(model, prompt, 10) and plain_step == []


def test_without_the_cache_there_is_nothing_to_compile():
    with pytest.raises(ValueError, match="compile=True needs use_cache=True"):
        generate_ids(tiny_gpt(), [[1]], max_new_tokens=2, sampling=GREEDY, use_cache=False, compile=True)


@pytest.mark.parametrize("device_type, how", [("cuda", {"mode": "reduce-overhead"}), ("cpu", HOW["cpu"]), ("mps", {})])
def test_how_it_is_compiled(device_type, how, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda step, **options: asked.update(options) or step)
    assert compiled_step.__wrapped__(device_type) is decode_step
    assert asked == {**how, "fullgraph": True, "dynamic": False}
