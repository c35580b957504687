"""what=decode: tokens per second, the time to the first token, and the time of a token against its position."""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from tril.model.causality.subject import randomise
from tril.model.checkpoint import load
from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import Laps, interleaved, paired_ratio
from tril.scripts.common.cli import UserError, user_errors

PROMPT = 16  # tokens
BATCH = 64
MOST_NEW = 256  # tokens in a repetition; fewer where the context ends before
POSITIONS = 8  # at which the time of a token is measured
TOKENS = 8  # timed at each of them
WAYS = {
    "cache": {},
    "compiled": {"compile": True},  # with the cache
    "no cache": {"use_cache": False},
}


def run(bench: Bench) -> Iterator[Section]:
    model, vocab_size = subject(bench)
    decode = Decode(model, vocab_size, bench.device)
    yield throughput(bench, decode)
    yield against_position(bench, decode)
    if bench.cfg["vs_sample"] is not None:
        yield beside_another(bench, decode)


def subject(bench: Bench) -> tuple[GPT, int]:
    """The model, and how many ids can be drawn."""
    if bench.cfg["ckpt"] is not None:
        with user_errors():
            lm = load(bench.cfg["ckpt"], bench.device)
        model, vocab_size = lm.model, lm.n_ids
    else:
        torch.manual_seed(bench.cfg["seed"])
        model, vocab_size = randomise(GPT(bench.plan.model)).to(bench.device).eval(), bench.plan.model.vocab_size
    least, length = PROMPT + TOKENS, model.config.context_length
    if length < least:
        raise UserError(f"what=decode needs a context of at least {least} tokens, not {length}; leave decode out")
    return model, vocab_size


class Decode:
    """Random prompts, continued with the sampling settings that scripts/sample.py has by default."""

    def __init__(self, model: GPT, vocab_size: int, device: str):
        self.model, self.vocab_size, self.device = model, vocab_size, device

    def laps(self, batch: int, prompt: int, new: int, way: str = "cache") -> list[float]:
        """Seconds of each step, the first with the prefill; a device that runs ahead of the reader shifts a step into the lap before."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self.vocab_size, (batch, prompt), generator=generator).tolist()
        laps = Laps(self.device)
        laps.mark()
        settings = {"sampling": SamplingConfig(), "seed": 0, "vocab_size": self.vocab_size}
        settings |= WAYS[way]
        for _ in generate_ids(self.model, prompts, max_new_tokens=new, **settings):
            laps.mark()
        return laps.seconds()


def throughput(bench: Bench, decode: Decode) -> Section:
    new = min(MOST_NEW, decode.model.config.context_length - PROMPT)
    pairs = [(batch, way) for way in cached_ways(bench) for batch in (1, BATCH)] + [(1, "no cache")]
    ways = {f"{streams(batch)}, {way}": (batch, PROMPT, new, way) for batch, way in pairs}
    first: dict[str, list[float]] = {name: [] for name in ways}

    def repetition(name: str) -> float:
        laps = decode.laps(*ways[name])
        first[name].append(laps[0])
        return statistics.mean(laps[1:])

    for way in ways.values():
        decode.laps(*way)  # warms up; where decoding is compiled, it is now
    steps = interleaved({name: partial(repetition, name) for name in ways}, bench.repeats, "decode")
    rows = [
        {
            "decoding": name,
            "tokens/s": ways[name][0] / statistics.median(values),
            "ms per step": 1000 * statistics.median(values),
            "ms to the first token": 1000 * statistics.median(first[name]),
        }
        for name, values in steps.items()
    ]
    source = "A model with random weights" if bench.cfg["ckpt"] is None else str(bench.cfg["ckpt"])
    model = decode.model
    size = f"{model.n_parameters():,} parameters, context {model.config.context_length}, {model.embed.weight.dtype}"
    notes = [
        f"{source}, {size}; the median of {bench.repeats} repetitions.",
        f"A prompt of {PROMPT} random tokens and {new} new ones, default sampling ({sampling_words()}); ids in, ids out, without text.",
        "The first token: prefill of the prompt, and one draw. ms per step and tokens/s: the mean step after it.",
    ]
    samples = {f"seconds per step, {name}": values for name, values in steps.items()}
    samples |= {f"seconds to the first token, {name}": values for name, values in first.items()}
    return Section("decode", "Decoding", rows, samples, notes)


def cached_ways(bench: Bench) -> list[str]:
    return ["cache", "compiled"] if bench.plan.hardware.compile else ["cache"]


def streams(batch: int) -> str:
    return "1 stream" if batch == 1 else f"batch of {batch}"


def sampling_words() -> str:
    sampling = SamplingConfig()
    return f"temperature {sampling.temperature:g}, top-k {sampling.top_k}"


def against_position(bench: Bench, decode: Decode) -> Section:
    found, ways = positions(decode.model.config.context_length), [*cached_ways(bench), "no cache"]
    tasks = {(position, way): partial(token_seconds, decode, position, way) for position in found for way in ways}
    for task in tasks.values():
        task()  # warm
    times = interleaved(tasks, bench.repeats, "decode, positions")
    median = {key: 1000 * statistics.median(values) for key, values in times.items()}
    rows = [{"position": n} | {f"ms per token, {way}": median[n, way] for way in ways} for n in found]
    notes = [
        f"One stream; the median of {bench.repeats} repetitions of the median of {TOKENS} tokens, which end at that position."
    ]
    samples = {f"seconds per token at {n}, {way}": values for (n, way), values in times.items()}
    return Section("decode", "Time of a token against its position", rows, samples, notes, partial(draw, rows, ways))


def positions(context_length: int) -> list[int]:
    """Evenly, up to the end of the context."""
    first = PROMPT + TOKENS
    return sorted({first + (context_length - first) * i // (POSITIONS - 1) for i in range(POSITIONS)})


def token_seconds(decode: Decode, position: int, way: str) -> float:
    """Of the median of the tokens that end at `position`; the prefill before them is not counted."""
    return statistics.median(decode.laps(1, position - TOKENS, TOKENS + 1, way)[1:])


def beside_another(bench: Bench, decode: Decode) -> Section:
    tasks = {
        f"ours, {streams(batch)}, {way}": partial(long_run, decode, batch, way)
        for way in cached_ways(bench)
        for batch in (1, BATCH)
    }
    for task in tasks.values():
        task()  # warm
    times = interleaved(
        tasks | {"theirs": partial(versus.sampling_seconds_per_token, bench)}, bench.repeats, "decode, vs_sample"
    )
    rows = []
    for name, values in times.items():
        ratio = paired_ratio(times["theirs"], values) if name in tasks else (None, None, None)
        named = {f"tokens/s, ours / theirs, {key}": x for key, x in zip(("median", "smallest", "largest"), ratio)}
        rows.append({"decoding": name, "tokens/s": 1 / statistics.median(values)} | named)
    notes = [
        f"{bench.repeats} repetitions in turn. Both: how much longer {versus.LONG} new tokens take than {versus.SHORT}, per token.",
        f"Ours: a prompt of {PROMPT} tokens, default sampling ({sampling_words()}), in this process; compilation is not counted.",
        f"Theirs, as whole processes: `{bench.cfg['vs_sample']}`",
    ]
    samples = {f"seconds per token, {name}": values for name, values in times.items()}
    return Section("decode", "Decoding beside another program", rows, samples, notes)


def long_run(decode: Decode, batch: int, way: str) -> float:
    """Seconds per token, by the same difference as the other program's."""
    short, long = (sum(decode.laps(batch, PROMPT, n, way)) for n in (versus.SHORT, versus.LONG))
    return (long - short) / (versus.LONG - versus.SHORT) / batch


def draw(rows: list[dict], ways: list[str], axes) -> None:
    """Flat with the cache, growing without."""
    for way in ways:
        axes.plot(
            [row["position"] for row in rows], [row[f"ms per token, {way}"] for row in rows], "o-", ms=4, label=way
        )
    axes.set(title="Time of a token against its position", xlabel="position", ylabel="ms", ylim=(0, None))
    axes.legend(fontsize=8)
