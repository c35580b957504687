"""what=decode: tokens per second, the time to the first token, and the time of a token against its position."""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from tril.model.causality.subject import randomize
from tril.model.checkpoint import load
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.bench_plot import Plot
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import StepTimer, interleaved, paired_ratio
from tril.scripts.common.cli import UserError, user_errors

PROMPT = 16  # tokens
BATCHES = {1: "1 stream", 64: "batch of 64"}
MAX_NEW = 256  # tokens in a repetition; fewer if the context ends before
POSITIONS = 8  # at which the time of a token is measured
TOKENS = 8  # timed at each of them
MODES = {
    "cache": {},
    "compiled": {"compile": True},  # with the cache
    "no cache": {"use_cache": False},
}
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
        settings = {"sampling": SAMPLING, "seed": 0, "vocab_size": self.vocab_size} | MODES[mode]
        for _ in generate_ids(self.model, prompts, max_new_tokens=new, **settings):
            timer.mark()
        return timer.seconds()


def load_decoder(bench: Bench) -> Decoder:
    """The model of `ckpt`, or the configured model with random weights."""
    if bench.config.ckpt is not None:
        with user_errors():
            lm = load(bench.config.ckpt, bench.device)
        model, vocab_size = lm.model, lm.n_ids
    else:
        torch.manual_seed(bench.cfg["seed"])
        model, vocab_size = GPT(bench.run_config.model), bench.run_config.model.vocab_size
        randomize(model).to(bench.device).eval()
    smallest, length = PROMPT + TOKENS, model.config.context_length
    if length < smallest:
        raise UserError(f"what=decode needs a context of at least {smallest} tokens, not {length}; leave decode out")
    return Decoder(model, vocab_size, bench.device)


def throughput(bench: Bench, decoder: Decoder) -> Section:
    new = min(MAX_NEW, decoder.model.config.context_length - PROMPT)
    runs = [(batch, mode) for mode in cached_modes(bench) for batch in BATCHES] + [(1, "no cache")]
    cases = {f"{BATCHES[batch]}, {mode}": (batch, PROMPT, new, mode) for batch, mode in runs}
    for case in cases.values():
        decoder.step_seconds(*case)  # warm-up, with compilation
    tasks = {name: partial(decoder.step_seconds, *case) for name, case in cases.items()}
    times = interleaved(tasks, bench.config.repeats, "decode")
    first = {name: [seconds[0] for seconds in repetitions] for name, repetitions in times.items()}
    steps = {name: [statistics.mean(seconds[1:]) for seconds in repetitions] for name, repetitions in times.items()}
    rows = [
        {
            "decoding": name,
            "tokens/s": cases[name][0] / statistics.median(values),
            "ms per step": 1000 * statistics.median(values),
            "ms to the first token": 1000 * statistics.median(first[name]),
        }
        for name, values in steps.items()
    ]
    model = decoder.model
    notes = [
        f"{bench.config.ckpt or 'A model with random weights'}, {model.n_parameters():,} parameters, context "
        f"{model.config.context_length}, {model.embed.weight.dtype}; the median of {bench.config.repeats} repetitions.",
        f"A prompt of {PROMPT} random tokens and {new} new ones, {SETTINGS}; ids in, ids out, without text.",
        "First token: prefill of the prompt and one draw. ms per step and tokens/s: the mean step after it.",
    ]
    samples = {f"seconds per step, {name}": values for name, values in steps.items()}
    samples |= {f"seconds to the first token, {name}": values for name, values in first.items()}
    return Section("decode", "Decoding", rows, samples, notes)


def cached_modes(bench: Bench) -> list[str]:
    return ["cache", "compiled"] if bench.hardware.compile else ["cache"]


def by_position(bench: Bench, decoder: Decoder) -> Section:
    selected, modes = positions(decoder.model.config.context_length), [*cached_modes(bench), "no cache"]
    tasks = {(n, mode): partial(token_seconds, decoder, n, mode) for n in selected for mode in modes}
    for task in tasks.values():
        task()  # warm-up
    times = interleaved(tasks, bench.config.repeats, "decode, positions")
    count = f"the median of {bench.config.repeats} repetitions"
    notes = [f"One stream; {count} of the median time of the {TOKENS} tokens up to the position."]
    samples = {f"seconds per token at {n}, {mode}": values for (n, mode), values in times.items()}
    lines = {mode: {n: 1000 * statistics.median(times[n, mode]) for n in selected} for mode in modes}
    rows = [{"position": n} | {f"ms per token, {mode}": lines[mode][n] for mode in modes} for n in selected]
    plot = Plot(lines, "position", "ms")
    return Section("decode", "Time of a token against its position", rows, samples, notes, plot)


def positions(context_length: int) -> list[int]:
    """Evenly spaced, up to the end of the context."""
    first = PROMPT + TOKENS
    return sorted({first + (context_length - first) * i // (POSITIONS - 1) for i in range(POSITIONS)})


def token_seconds(decoder: Decoder, position: int, mode: str) -> float:
    """The median time of the tokens up to `position`, without the prefill before them."""
    return statistics.median(decoder.step_seconds(1, position - TOKENS, TOKENS + 1, mode)[1:])


def compared(bench: Bench, decoder: Decoder) -> Section:
    """Next to the program `vs_sample`."""
    tasks = {
        f"tril, {BATCHES[batch]}, {mode}": partial(seconds_per_token, decoder, batch, mode)
        for mode in cached_modes(bench)
        for batch in BATCHES
    }
    for task in tasks.values():
        task()  # warm-up
    tasks["other"] = partial(versus.sampling_seconds_per_token, bench.config)
    times = interleaved(tasks, bench.config.repeats, "decode, vs_sample")
    rows = []
    for name, values in times.items():
        ratio = {
            f"{versus.RATIO}, {key}": None if name == "other" else value
            for key, value in paired_ratio(times["other"], values).items()
        }
        rows.append({"decoding": name, "tokens/s": 1 / statistics.median(values)} | ratio)
    notes = [
        f"{bench.config.repeats} repetitions in alternating order. Both programs: the time of {versus.LONG} new tokens "
        f"minus that of {versus.SHORT}, per token.",
        f"tril: a prompt of {PROMPT} tokens, {SETTINGS}, in this process, without compilation time.",
        f"other, as whole processes: `{bench.config.vs_sample}`",
    ]
    samples = {f"seconds per token, {name}": values for name, values in times.items()}
    return Section("decode", "Decoding compared with another program", rows, samples, notes)


def seconds_per_token(decoder: Decoder, batch: int, mode: str) -> float:
    """The difference of a long and a short sample, as for the other program."""
    short, long = (sum(decoder.step_seconds(batch, PROMPT, n, mode)) for n in (versus.SHORT, versus.LONG))
    return (long - short) / (versus.LONG - versus.SHORT) / batch
