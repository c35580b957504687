"""Generation compared with a loop of full passes: `generate_ids` with and without a cache, in steps of constant shape,
for prompts of different lengths in one batch, and past the context length.

The loop here has its own rule for what a row still sees and its own draw of a token. It shares the random numbers.

B batch, N steps, V vocabulary.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tril.model.causality.case import Case, Result, first_true
from tril.model.causality.subject import GPTSubject
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.generation.step import decode_step
from tril.model.gpt import GPT

CONTEXT = 24  # a copy of the model gets this context length, so that few steps go past it
BEYOND_WINDOW = 8  # a window up to CONTEXT gets a context that is longer by so much
N_STEPS = 15  # half of CONTEXT and a few more: rows go past it twice
FEW_STEPS = 4  # at the model's own context length, and for FlexAttention on a CPU, which has no kernels there
FULL_BUDGET = 2e11  # FLOPs of the passes at that length; a larger model is tested at CONTEXT only
TEMPERATURE, SEED = 0.8, 0
DRAW_ROUNDING = 1e-4  # of the logarithms of probabilities and random numbers in float32
MODES = {  # arguments of `generate_ids`
    "with a cache": {},
    "without a cache": {"use_cache": False},
    "in steps of constant shape": {"step": decode_step},
}
Text = tuple[int, ...]


def check_generation(case: Case) -> Iterator[Result]:
    """`generate_ids` samples from the logits of full passes over what each row still sees, and takes those tokens."""
    subject = case.subject
    if type(subject) is not GPTSubject or subject.precision not in ("32-true", "64-true"):
        return  # a subclass expects what `generate_ids` does not give it, and sampling runs without autocast
    limit = subject.context_length
    windows = [window for window in subject.windows if window is not None and window <= CONTEXT]
    short = min(limit, max([CONTEXT, *(window + BEYOND_WINDOW for window in windows)]))
    slow = subject.model.config.backend == "flex" and subject.device.type == "cpu"
    passes = _FullPasses(case)
    for temperature in (0.0, TEMPERATURE):
        yield from _compare(case, passes, short, FEW_STEPS if slow else N_STEPS, temperature)
    cost = 2 * subject.n_parameters() * limit * len(MODES) * len(prompt_lengths(limit)) * FEW_STEPS
    if limit > short and cost <= FULL_BUDGET and not slow:
        yield from _compare(case, passes, limit, FEW_STEPS, 0.0)


def prompt_lengths(limit: int) -> list[int]:
    """One token, half of the context, almost all of it, and more."""
    return [1, max(1, limit // 2), max(1, limit - 2), limit + 5]


def visible_window(text: Text, limit: int) -> Text:
    """What a row still sees: when it is longer than the context, its newer half stays."""
    return text if len(text) <= limit else text[len(text) - max(1, limit // 2) :]


class _FullPasses:
    """Logits (V,) after a text by a full pass over it, kept for equal texts."""

    def __init__(self, case: Case) -> None:
        self.case, self.known = case, {}

    @torch.no_grad()
    def __call__(self, text: Text) -> Tensor:
        if text not in self.known:
            ids = torch.tensor([text], device=self.case.subject.device)
            self.known[text] = self.case.subject(ids)[0, -1].cpu()
        return self.known[text]


def _compare(case: Case, passes: _FullPasses, limit: int, n_steps: int, temperature: float) -> Iterator[Result]:
    """One result for the logits of each mode, and one for its tokens."""
    assert isinstance(case.subject, GPTSubject)
    prompts = [case.random_tokens(n).tolist() for n in prompt_lengths(limit)]
    draw = "greedy" if temperature == 0 else "sampled"
    for mode, options in MODES.items():
        how = f"{draw} {mode}, context length {limit}"
        logits, tokens = _generate(case.subject.model, limit, prompts, n_steps, temperature, options)
        expected, reach = torch.empty_like(logits), 0
        for row, prompt in enumerate(prompts):
            text = tuple(prompt[-limit:])
            for step in range(n_steps):
                text = visible_window(text, limit)
                expected[step, row], reach = passes(text), max(reach, len(text))
                text += (int(tokens[step, row]),)
        difference = (logits - expected).abs().amax(-1)  # (N, B)
        yield _result(case, f"{how}: other logits", difference, case.bound(), logits.numel(), reach)
        lost = _lost(expected, tokens, temperature, case.subject.device)  # (N, B)
        bound = 2 * case.bound() / (temperature or 1) + (DRAW_ROUNDING if temperature else 0)
        yield _result(case, f"{how}: another token", lost, bound, tokens.numel(), reach)


def _generate(
    model: GPT, limit: int, prompts: Sequence[Sequence[int]], n_steps: int, temperature: float, options: dict
) -> tuple[Tensor, Tensor]:
    """Logits (N, B, V) that `generate_ids` samples from, and its tokens (N, B), for a model with another context."""
    short, seen = copy.copy(model), []  # shares the weights
    short.config = replace(model.config, context_length=limit)

    def logits(hidden: Tensor) -> Tensor:
        seen.append(model.logits(hidden))  # (B, 1, V)
        return seen[-1]

    short.logits = logits
    sampling = SamplingConfig(max_new_tokens=n_steps, temperature=temperature, top_k=None, seed=SEED)
    tokens = list(generate_ids(short, prompts, sampling, **options))
    return torch.stack([each[:, -1].clone() for each in seen]).float().cpu(), torch.stack(tokens)


def _lost(logits: Tensor, tokens: Tensor, temperature: float, device: torch.device) -> Tensor:
    """How far each token (N, B) is from the best one: of the logits (N, B, V), or of those plus Gumbel noise.

    The largest sum of a logit and Gumbel noise is a sample of the softmax (Gumbel 1954).
    """
    scores = logits.double()
    if temperature:
        generator = torch.Generator(device).manual_seed(SEED)
        uniform = torch.stack([torch.empty_like(step, device=device).uniform_(generator=generator) for step in logits])
        smallest = math.log(torch.finfo(torch.float32).tiny)
        scores = scores / temperature - (-uniform.cpu().double().log().clamp(min=smallest)).log()
    return scores.amax(-1) - scores.gather(-1, tokens[..., None])[..., 0]


def _result(case: Case, what: str, figures: Tensor, bound: float, tested: int, length: int) -> Result:
    """A result that passes if no figure (N, B) is above the bound."""
    wrong = first_true(~(figures <= bound))
    where = f"{what} in row {wrong[1]} at step {wrong[0]}" if wrong else ""
    return case.result("generation", length, figures.max().item(), bound, tested, where)
