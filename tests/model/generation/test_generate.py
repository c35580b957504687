"""Generation against a slow reference: one row, no cache, no batch, the context cropped by hand. It compares logits."""

import itertools
import re

import pytest
import torch

from tests.conftest import assert_close, tiny_gpt
from tril.model.generation.generate import Rows, generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT
from tril.scripts.common.cli import message_of

GREEDY = SamplingConfig(temperature=0)
LIMIT = 12  # context_length of tiny_gpt
PARTS = [
    {},
    {"pos": "learned"},
    {"pos": "none"},
    {"n_kv_heads": 2},
    {"n_kv_heads": 1, "window": 3},
    {"pos": "learned", "window": 5},
    {"mlp": "swiglu", "norm": "layernorm", "bias": True, "qk_norm": False},
    {"logit_softcap": 2.0, "tie_embeddings": True},
    {"backend": "explicit", "n_kv_heads": 2},
    {"context_length": 7},
    {"context_length": 1},
    {"pos": "alibi"},
    {"pos": "alibi", "n_kv_heads": 2, "window": 5, "backend": "explicit"},
]


def contexts(prompt, new, limit=LIMIT):
    """The context before each of the new tokens and after the last."""
    context = prompt[-limit:]
    yield context
    for token in new:
        context = context + [token]
        if len(context) > limit:
            context = context[-max(1, limit // 2) :]
        yield context


@torch.no_grad()
def alone(model, prompt, new, **options):
    """(len(new) + 1, V): logits by one full pass for each context."""
    return torch.cat(
        [model(torch.tensor([c]), **options)[:, -1] for c in contexts(prompt, new, model.config.context_length)]
    )


def forced(model, prompts, new, **options):
    """Logits (steps, B, V) of `Rows`, fed with the tokens `new` (B, steps - 1)."""
    rows = Rows(model, prompts, max_new_tokens=len(new[0]) + 1, **options)
    logits = [rows.logits()]
    for ids in torch.tensor(new).T:
        rows.append(ids)
        logits.append(rows.logits())
    return torch.stack(logits)


def random_ids(*shape, vocab_size=31):
    return torch.randint(vocab_size, shape).tolist()


@torch.no_grad()
def greedy_ids(model, prompt, n, penalty=1.0, vocab_size=None):
    """Token after token with the greatest logit, repetitions penalized by hand."""
    new = []
    for _ in range(n):
        *_, context = contexts(prompt, new, model.config.context_length)
        logits = model(torch.tensor([context]))[0, -1, :vocab_size]
        for token in {*prompt, *new}:
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        new.append(logits.argmax().item())
    return new


def ids_of(steps):
    """(B, steps) as lists."""
    return torch.stack(list(steps), dim=1).tolist()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_logits_equal_full_passes_over_several_crops(parts, use_cache):
    model = tiny_gpt(**parts)
    for length in (1, 12, 30):
        prompt, new = random_ids(length), random_ids(20)  # at context 12 a crop after every 6 or 7 tokens
        assert_close(forced(model, [prompt], [new], use_cache=use_cache)[:, 0], alone(model, prompt, new))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_rows_of_unequal_length_equal_each_row_alone(parts, use_cache):
    model = tiny_gpt(**parts)
    prompts, new = [random_ids(n) for n in (3, 1, 20, 11)], random_ids(4, 16)
    batch = forced(model, prompts, new, use_cache=use_cache)
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        assert_close(batch[:, row], alone(model, prompt, tokens))


def test_a_model_that_is_not_causal_computes_the_whole_context():
    model = tiny_gpt(causal=False)
    prompt, new = random_ids(4), random_ids(15)
    assert_close(forced(model, [prompt], [new], use_cache=True)[:, 0], alone(model, prompt, new))


def test_head_gate_applies_to_every_step():
    model = tiny_gpt()
    gate, prompt, new = torch.rand(2, 4), random_ids(4), random_ids(15)
    assert_close(forced(model, [prompt], [new], head_gate=gate)[:, 0], alone(model, prompt, new, head_gate=gate))


@pytest.mark.parametrize(
    "use_cache, widths",
    [
        (True, [5, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1, 1, 6, 1]),
        (False, [5, 6, 7, 8, 9, 10, 11, 12, 6, 7, 8, 9, 10, 11, 12, 6, 7]),
    ],
)
def test_number_of_positions_per_forward_pass(use_cache, widths, monkeypatch):
    """One prefill, then single tokens, then one prefill of half a context; equal rows never get a mask."""
    model, calls, hidden = tiny_gpt(), [], GPT.hidden

    def spy(self, ids, *, mask, positions, **options):
        calls.append(ids.shape[1])
        assert mask is None and positions is None
        return hidden(self, ids, mask=mask, positions=positions, **options)

    monkeypatch.setattr(GPT, "hidden", spy)
    list(generate_ids(model, [random_ids(5)] * 2, max_new_tokens=17, sampling=GREEDY, use_cache=use_cache))
    assert calls == widths


def test_the_cache_is_no_larger_than_needed():
    model = tiny_gpt()
    assert Rows(model, [[1, 2], [3]], max_new_tokens=4).cache.capacity == 5  # nothing follows the last token
    assert Rows(model, [[1, 2]], max_new_tokens=4000).cache.capacity == LIMIT


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_ids(use_cache):
    model = tiny_gpt()
    prompts = [random_ids(4), random_ids(9)]
    steps = generate_ids(model, prompts, max_new_tokens=20, sampling=GREEDY, use_cache=use_cache)
    assert ids_of(steps) == [greedy_ids(model, prompt, 20) for prompt in prompts]


def test_repetition_penalty_counts_the_row_and_not_its_padding():
    model = tiny_gpt(logit_softcap=1.0)  # close logits: the penalty decides
    prompts = [[5, 6, 7, 8, 9, 10], [3]]  # the second row is padded with id 0, which it does not have
    steps = generate_ids(
        model, prompts, max_new_tokens=10, sampling=SamplingConfig(temperature=0, repetition_penalty=3.0)
    )
    expected = [greedy_ids(model, prompt, 10, penalty=3.0) for prompt in prompts]
    assert ids_of(steps) == expected != [greedy_ids(model, prompt, 10) for prompt in prompts]


def test_ids_of_the_padded_vocabulary_are_never_drawn():
    model = tiny_gpt(vocab_size=40)
    with torch.no_grad():
        model.head.weight[31:] *= 100.0  # else they would win
    prompt = random_ids(4)
    draws = ids_of(generate_ids(model, [prompt], max_new_tokens=50, sampling=SamplingConfig(), seed=0, vocab_size=31))
    assert max(draws[0]) < 31
    [ids] = ids_of(generate_ids(model, [prompt], max_new_tokens=10, sampling=GREEDY, vocab_size=31))
    assert ids == greedy_ids(model, prompt, 10, vocab_size=31)


def test_the_seed_decides():
    model = tiny_gpt()

    def draw(seed):
        torch.manual_seed(0)  # the global generator is not used
        return ids_of(generate_ids(model, [[1], [1]], max_new_tokens=20, sampling=SamplingConfig(), seed=seed))

    assert draw(0) == draw(0) != draw(1)
    assert draw(None) != draw(None)
    assert draw(0)[0] != draw(0)[1]  # equal prompts: several samples at once


def test_rows_end_with_end_of_text_and_the_batch_with_its_last_row():
    model = tiny_gpt()
    prompts = [random_ids(4) for _ in range(6)]
    free = ids_of(generate_ids(model, prompts, max_new_tokens=20, sampling=GREEDY))
    eot = max(range(31), key=lambda token: sum(token in row for row in free))
    ends = [row.index(eot) + 1 if eot in row else 20 for row in free]
    assert len(set(ends)) > 1 and min(ends) < 20
    expected = [(row[:end] + [eot] * 20)[: max(ends)] for row, end in zip(free, ends, strict=True)]
    assert ids_of(generate_ids(model, prompts, max_new_tokens=20, sampling=GREEDY, eot_id=eot)) == expected

    first = ends.index(min(ends))
    [single] = ids_of(generate_ids(model, [prompts[first]], max_new_tokens=20, sampling=GREEDY, eot_id=eot))
    assert single == free[first][: min(ends)]


def test_between_steps_the_modes_of_model_and_torch_are_unchanged():
    model = tiny_gpt(attn_dropout=0.5, resid_dropout=0.5, embd_dropout=0.5).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    prompt = random_ids(4)
    steps, seen = generate_ids(model, [prompt], max_new_tokens=9, sampling=GREEDY), []
    for ids in itertools.islice(steps, 7):
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not ids.is_inference()
        seen.append(ids.item())
    steps.close()
    assert [module.training for module in model.modules()] == modes
    assert seen == greedy_ids(model.eval(), prompt, 7)  # no dropout


def test_an_error_in_a_step_restores_the_mode():
    model = tiny_gpt().train()
    with pytest.raises(ValueError, match="head_gate"):
        next(generate_ids(model, [[1]], max_new_tokens=2, sampling=GREEDY, head_gate=torch.ones(2, 3)))
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 31]], {}, "prompt 0 has ids from 1 to 31; use ids from 0 to 30"),
        ([[-1]], {}, "prompt 0 has ids from -1 to -1"),
        ([[7]], {"vocab_size": 7}, "use ids from 0 to 6"),
        ([[1]], {"vocab_size": 32}, "vocab_size=32 must be from 1 to the model's 31"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be greater than or equal to 1"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be a valid integer"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens=true must be a valid integer"),
        ([[1]], {"seed": -1}, "seed=-1 must be greater than or equal to 0"),
        ([[1]], {"seed": 2**64}, "seed=18446744073709551616 must be less than"),
        ([[1]], {"seed": "x", "max_new_tokens": -2}, "max_new_tokens=-2 .*; seed='x' must be a valid integer"),
        ([[], [31]], {}, "prompt 0 is empty.*; prompt 1 has ids from 31 to 31"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(prompts, options, message):
    with pytest.raises(ValueError) as error:
        generate_ids(tiny_gpt(), prompts, **{"max_new_tokens": 5, "sampling": GREEDY, **options})
    assert re.search(message, message_of(error.value))
