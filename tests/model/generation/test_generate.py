"""Generation against one reference: one row, no cache, no batch, a full pass for each token. It compares logits.

Below: filters and draws at their limits.
"""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.conftest import assert_close, tiny_gpt
from tests.oracles import full_passes
from tril.model.generation.config import SamplingConfig
from tril.model.generation.generate import Choice, Rows, choose, decode_step, generate_ids, probabilities
from tril.model.gpt import GPT, RECOMPILE_LIMIT

PARTS = [
    {"backend": "explicit", "n_kv_heads": 2},
    {"pos": "learned", "window": 5, "mlp": "swiglu", "norm": "layernorm", "bias": True, "qk_norm": "none"},
    {"pos": "none", "n_kv_heads": 1, "window": 3, "context_length": 7},
    {"pos": "alibi", "n_kv_heads": 2, "window": 5, "logit_softcap": 2.0, "tie_embeddings": True},
    {"backend": "stacked", "context_length": 1},
    {"n_heads": 0},
    {"causal": False},
]


def forced(model, prompts, new, **options):
    """Logits (steps, B, V) of `Rows`, fed with the tokens `new` (B, steps - 1)."""
    rows = Rows(model, prompts, max_new_tokens=len(new[0]) + 1, **options)
    logits = [rows.next()]
    for ids in torch.tensor(new).T:
        rows.append(ids)
        logits.append(rows.next())
    return torch.stack(logits)


def use_step(step, monkeypatch):
    """Runs this function in place of the compiled one."""
    monkeypatch.setattr("tril.model.generation.generate.compiled_step", lambda device_type: step)


def random_ids(*shape):
    return torch.randint(31, shape).tolist()


def greedy(n, **values):
    return SamplingConfig(max_new_tokens=n, temperature=0, **values)


def ids_of(steps):
    """(B, steps) as lists."""
    return torch.stack(list(steps), dim=1).tolist()


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_logits_are_those_of_full_passes_alone_and_in_a_batch_over_several_crops(parts, monkeypatch):
    use_step(decode_step, monkeypatch)
    model = tiny_gpt(**parts)
    gate = torch.rand(2, 4) if model.config.n_heads else None
    prompts, new = [random_ids(n) for n in (3, 1, 20, 3, 11)], random_ids(5, 20)
    rows = zip(prompts, new, strict=True)
    expected = torch.stack([full_passes(model, prompt, tokens, head_gate=gate) for prompt, tokens in rows], dim=1)
    for mode in ({}, {"use_cache": False}, {"compile": True}):  # compile: constant shapes
        assert_close(forced(model, prompts, new, head_gate=gate, **mode), expected)
        assert_close(forced(model, prompts[-1:], new[-1:], head_gate=gate, **mode), expected[:, -1:])


def test_rows_end_with_end_of_text_and_the_batch_with_its_last_row():
    model, prompts = tiny_gpt(), [random_ids(4) for _ in range(6)]
    free = ids_of(generate_ids(model, prompts, greedy(20)))
    eot = max(range(31), key=lambda token: sum(token in row for row in free))
    ends = [row.index(eot) + 1 if eot in row else 20 for row in free]
    assert len(set(ends)) > 1 and min(ends) < 20
    expected = [(row[:end] + [eot] * 20)[: max(ends)] for row, end in zip(free, ends, strict=True)]
    assert ids_of(generate_ids(model, prompts, greedy(20), eot_id=eot)) == expected
    first = ends.index(min(ends))
    assert ids_of(generate_ids(model, [prompts[first]], greedy(20), eot_id=eot)) == [free[first][: min(ends)]]


def test_between_steps_and_after_an_error_the_modes_of_model_and_torch_are_unchanged():
    model = tiny_gpt(attn_dropout=0.5, resid_dropout=0.5, embd_dropout=0.5).train()
    model.blocks[1].eval()
    modes, prompt = [module.training for module in model.modules()], random_ids(4)
    steps, seen = generate_ids(model, [prompt], greedy(9)), []
    for ids in itertools.islice(steps, 7):
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not ids.is_inference()
        seen.append(ids.item())
    steps.close()
    with pytest.raises(ValueError, match="head_gate"):
        next(generate_ids(model, [[1]], greedy(2), head_gate=torch.ones(2, 3)))
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert [seen] == ids_of(generate_ids(model.eval(), [prompt], greedy(7)))  # no dropout


@pytest.fixture
def captured_step(monkeypatch):
    """Captures the step as one graph for each set of shapes, without generating code; the counter of captures."""
    torch._dynamo.reset()
    counter = CompileCounter()
    use_step(torch.compile(decode_step, backend=counter, fullgraph=True, dynamic=False), monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        yield counter
    torch._dynamo.reset()


def test_models_and_shapes_in_turn_use_separate_graphs_for_all_positions(captured_step):
    """Guards that are skipped must not let one run use the graph of another."""
    one, other = tiny_gpt(n_layers=1), tiny_gpt(n_layers=1, window=3)
    prompts, unequal = [random_ids(3)], [random_ids(3), random_ids(10)]
    runs = [(one, prompts, None), (other, prompts, None), (one, prompts, torch.rand(1, 4)), (one, unequal, None)]
    new = [torch.randint(31, (len(prompts), 15)) for _, prompts, _ in runs]
    rows = [Rows(model, prompts, max_new_tokens=16, head_gate=gate, compile=True) for model, prompts, gate in runs]
    logits = [[each.next() for each in rows]]
    for step in range(15):
        [each.append(tokens[:, step]) for each, tokens in zip(rows, new, strict=True)]
        logits.append([each.next() for each in rows])
    for number, (model, prompts, gate) in enumerate(runs):
        for row, prompt in enumerate(prompts):
            found, tokens = torch.stack([each[number][row] for each in logits]), new[number][row].tolist()
            assert_close(found, full_passes(model, prompt, tokens, head_gate=gate))
    assert captured_step.frame_count == 5  # two for the last run, whose padding ends when its second row is cropped


def test_filters_in_turn_use_separate_graphs_and_temperatures_one(captured_step):
    model, prompts, options = tiny_gpt(n_layers=1), [random_ids(3), random_ids(3)], {"max_new_tokens": 16, "seed": 3}
    penalty = [SamplingConfig(repetition_penalty=9.0, temperature=t, **options) for t in (0.5, 3.0)]
    settings = [*penalty, greedy(16)]
    steps = zip(*(generate_ids(model, prompts, each, compile=True) for each in settings), strict=True)  # in turn
    for found, sampling in zip(zip(*steps, strict=True), settings, strict=True):
        assert ids_of(found) == ids_of(generate_ids(model, prompts, sampling))
    assert captured_step.frame_count == 2


def test_returned_logits_are_not_overwritten_by_later_steps(monkeypatch):
    """A CUDA graph returns the same memory at each step."""
    memory, model, prompt, new = torch.empty(1, 31), tiny_gpt(), random_ids(4), random_ids(1, 6)
    use_step(lambda *inputs, **options: memory.copy_(decode_step(*inputs, **options)), monkeypatch)
    assert_close(forced(model, [prompt], new, compile=True)[:, 0], full_passes(model, prompt, new[0]))


def test_after_the_prompt_each_token_is_one_call_which_no_token_waits_for(monkeypatch):
    model, calls, hidden = tiny_gpt(), [], GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda self, ids, **more: calls.append(ids.shape[1]) or hidden(self, ids, **more)
    )
    steps = generate_ids(model, [random_ids(4)] * 2, greedy(9))
    assert [len(calls) for _ in itertools.islice(steps, 8)] == [*range(1, 9)] and calls == [4, *[1] * 7]
    assert Rows(model, [[1, 2], [3]], max_new_tokens=4).cache.capacity == 5  # nothing follows the last token


# --- filters and draws


def choice_of(config, prompts, vocab_size, seed=0, **changes):
    choice = Choice.of(config, prompts, vocab_size, torch.device("cpu"))._replace(**changes)
    choice.draw(torch.Generator().manual_seed(seed))
    return choice


def test_ties_with_the_last_kept_token_and_the_exact_end_of_top_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()  # powers of two: sums without rounding
    for values, n in (({"top_k": 4}, 5), ({"top_k": None, "top_p": 0.75}, 2), ({"top_k": 2, "top_p": 0.6}, 1)):
        found = probabilities(logits, choice_of(SamplingConfig(temperature=1.0, **values), [[0]], 5))
        assert (found > 0).tolist() == [[True] * n + [False] * (5 - n)]


@pytest.mark.parametrize("row", [[-4e30, -2e30, -3e30, -1e30], [0.0, 1e30, 0.0, 1e30], [0.0, 0.0, 0.0, 0.0]])
def test_the_strictest_filters_leave_the_most_probable_token(row):
    for noise in (0.0, 1 - 2**-24):  # the limits of torch.rand
        for values in (
            {"temperature": 0},
            {"temperature": 1e-300, "top_k": None},
            {"temperature": 0.001, "top_k": 1, "top_p": 1e-6, "min_p": 1.0},
        ):
            choice = choice_of(SamplingConfig(**values), [[0]], 4)
            if choice.noise is not None:
                choice.noise.fill_(noise)
            assert row[int(choose(torch.tensor([row]), choice))] == max(row)


def test_tokens_that_are_not_allowed_or_pad_the_vocabulary_are_never_chosen():
    logits, allowed = torch.tensor([[5.0, 1.0, 2.0, 9.0]] * 2), torch.tensor([[True, True, True], [False, True, False]])
    for temperature in (0.0, 5.0):
        choice = choice_of(SamplingConfig(temperature=temperature), [[0]] * 2, 3, allowed=allowed)
        draws = [choose(logits, choice).tolist() for _ in range(30) if choice.draw(None) is None]
        assert {row[1] for row in draws} == {1} and {row[0] for row in draws} <= {0, 1, 2}
    low = choice_of(SamplingConfig(top_p=0.9), [[0]] * 500, 50)
    logits = torch.randn(500, 50).bfloat16()
    assert torch.equal(choose(logits, low), choose(logits.float(), low)), "in float32, whatever the model's dtype"
