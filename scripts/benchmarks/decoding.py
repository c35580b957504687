"""what=decode: tokens per second, the time to the first token, and the time of a token against its position."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tril.model.causality.model import randomize
from tril.model.checkpoint import load
from tril.model.config import GPTConfig
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.section import Bench, Plot, Section
from tril.scripts.benchmarks.timing import StepTimer, interleaved, paired_ratio
from tril.scripts.cli.errors import UserError, user_errors

PROMPT = 16  # tokens
BATCHES = {1: "1 stream", 64: "batch of 64"}
MAX_NEW = 256  # tokens in a repetition; fewer if the context ends before
POSITIONS = 8  # at which the time of a token is measured
TOKENS = 8  # timed at each of them
MODES = {"cache": {}, "compiled": {"compile": True}, "no cache": {"use_cache": False}}  # compiled: with the cache
SAMPLING = SamplingConfig()
SETTINGS = f"default sampling (temperature {SAMPLING.temperature:g}, top-k {SAMPLING.top_k})"


def run(bench: Bench) -> Iterator[Section]:
    decoder = load_decoder(bench)
    yield throughput(bench, decoder)
    yield by_position(bench, decoder)
    if bench.config.vs_sample is not None:
        yield compared(bench, decoder)


class Decoder:
    """Continues random prompts with the default sampling settings of scripts/sample.py.

    Args:
        vocab_size: prompts and samples consist of the ids below it.
    """

    def __init__(self, model: GPT, vocab_size: int, device: str):
        self.model, self.vocab_size, self.device = model, vocab_size, device

    def step_seconds(self, batch: int, prompt: int, new: int, mode: str = "cache") -> list[float]:
        """Seconds of each step; the first one includes the prefill.

        An asynchronous device shifts the time of a step into the one before it.
        """
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self.vocab_size, (batch, prompt), generator=generator).tolist()
        timer = StepTimer(self.device)
        timer.mark()
        sampling = replace(SAMPLING, max_new_tokens=new)
        for _ in generate_ids(self.model, prompts, sampling, vocab_size=self.vocab_size, **MODES[mode]):
            timer.mark()
        return timer.seconds()


def load_decoder(bench: Bench) -> Decoder:
    """The model of `ckpt`, or the configured model with random weights."""
    if bench.config.ckpt is not None:
        with user_errors():
            lm = load(bench.config.ckpt, bench.device)
        model, vocab_size = lm.model, lm.n_ids
    else:
        config = bench.run_config.model
        model, vocab_size = random_model(bench, config).to(bench.device).eval(), config.vocab_size
    smallest, length = PROMPT + TOKENS, model.config.context_length
    if length < smallest:
        raise UserError(f"what=decode needs a context of at least {smallest} tokens, not {length}; leave decode out")
    return Decoder(model, vocab_size, bench.device)


def random_model(bench: Bench, config: GPTConfig) -> GPT:
    """A model without the zeros of the usual initialization."""
    torch.manual_seed(bench.run_config.top.seed)
    return randomize(GPT(config))


def cached_cases(bench: Bench) -> list[tuple[int, str]]:
    """Batch and mode."""
    return [(batch, mode) for mode in cached_modes(bench) for batch in BATCHES]


def cached_modes(bench: Bench) -> list[str]:
    return ["cache", "compiled"] if bench.hardware.compile else ["cache"]


def warmed_up(tasks: dict) -> dict:
    """The tasks after one untimed call each, with compilation."""
    for task in tasks.values():
        task()
    return tasks


def throughput(bench: Bench, decoder: Decoder) -> Section:
    model, new = decoder.model, min(MAX_NEW, decoder.model.config.context_length - PROMPT)
    cases = [*cached_cases(bench), (1, "no cache")]
    tasks = {(batch, mode): partial(decoder.step_seconds, batch, PROMPT, new, mode) for batch, mode in cases}
    rows, samples = [], {}
    for (batch, mode), repetitions in interleaved(warmed_up(tasks), bench.config.repeats, "decode").items():
        name = f"{BATCHES[batch]}, {mode}"
        first = samples[f"seconds to the first token, {name}"] = [seconds[0] for seconds in repetitions]
        later = samples[f"seconds per step, {name}"] = [statistics.mean(seconds[1:]) for seconds in repetitions]
        step, to_first = statistics.median(later), 1000 * statistics.median(first)
        row = {"decoding": name, "tokens/s": batch / step, "ms per step": 1000 * step}
        rows.append(row | {"ms to the first token": to_first})
    notes = [
        f"{bench.config.ckpt or 'A model with random weights'}, {model.n_parameters():,} parameters, context "
        f"{model.config.context_length}, {model.embed.weight.dtype}; the median of {bench.config.repeats} repetitions.",
        f"A prompt of {PROMPT} random tokens and {new} new ones, {SETTINGS}; ids in, ids out, without text.",
        "First token: prefill of the prompt and one draw. ms per step and tokens/s: the mean step after it.",
    ]
    return Section("decode", "Decoding", rows, samples, notes)


def by_position(bench: Bench, decoder: Decoder) -> Section:
    selected, modes = positions(decoder.model.config.context_length), [*cached_modes(bench), "no cache"]
    tasks = {(n, mode): partial(token_seconds, decoder, n, mode) for n in selected for mode in modes}
    times = interleaved(warmed_up(tasks), bench.config.repeats, "decode, positions")
    samples = {f"seconds per token at {n}, {mode}": values for (n, mode), values in times.items()}
    lines = {mode: {n: 1000 * statistics.median(times[n, mode]) for n in selected} for mode in modes}
    rows = [{"position": n} | {f"ms per token, {mode}": lines[mode][n] for mode in modes} for n in selected]
    note = f"One stream; the median of {bench.config.repeats} repetitions, each the median of the {TOKENS} tokens up to"
    title, plot = "Time of a token against its position", Plot(lines, "position", "ms")
    return Section("decode", title, rows, samples, [f"{note} the position."], plot)


def positions(context_length: int) -> list[int]:
    """Evenly spaced, up to the end of the context."""
    return np.unique(np.linspace(PROMPT + TOKENS, context_length, POSITIONS, dtype=int)).tolist()


def token_seconds(decoder: Decoder, position: int, mode: str) -> float:
    """The median time of the tokens up to `position`, without the prefill before them."""
    return statistics.median(decoder.step_seconds(1, position - TOKENS, TOKENS + 1, mode)[1:])


def compared(bench: Bench, decoder: Decoder) -> Section:
    """Next to the program `vs_sample`."""
    tasks = warmed_up(
        {f"tril, {BATCHES[b]}, {mode}": partial(seconds_per_token, decoder, b, mode) for b, mode in cached_cases(bench)}
    )
    tasks["other"] = partial(versus.sampling_seconds_per_token, bench.config)
    times = interleaved(tasks, bench.config.repeats, "decode, vs_sample")
    rows = []
    for name, values in times.items():
        ratio = paired_ratio(times["other"], values, versus.RATIO)
        if name == "other":
            ratio = dict.fromkeys(ratio)
        rows.append({"decoding": name, "tokens/s": 1 / statistics.median(values)} | ratio)
    notes = [
        f"{bench.config.repeats} repetitions; per token, {versus.LONG} new tokens minus {versus.SHORT} new tokens.",
        f"tril: a prompt of {PROMPT} tokens, {SETTINGS}, in this process, without compilation time.",
        f"other, as whole processes: `{bench.config.vs_sample}`",
    ]
    samples = {f"seconds per token, {name}": values for name, values in times.items()}
    return Section("decode", "Decoding compared with another program", rows, samples, notes)


def seconds_per_token(decoder: Decoder, batch: int, mode: str) -> float:
    """The difference of a long and a short sample, as for the other program."""
    short, long = (sum(decoder.step_seconds(batch, PROMPT, n, mode)) for n in (versus.SHORT, versus.LONG))
    return (long - short) / (versus.LONG - versus.SHORT) / batch
