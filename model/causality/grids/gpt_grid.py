"""The grid of a GPT: its own and random weights in every backend, precision and window."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tril.model.attention import BACKENDS
from tril.model.autocast import AUTOCAST, has_bf16
from tril.model.backends import MIN_HEAD_DIM
from tril.model.causality.case import MAX_ROWS, ODD_LENGTH, Case, lengths_to_test, structural_lengths
from tril.model.causality.subject import GPTSubject, attention_layers, randomize, same_random_numbers
from tril.model.config import GPTConfig
from tril.model.gpt import GPT

PRECISIONS = ("32-true", "bf16-mixed")
FRESH_VOCABULARY = 128  # of a fresh model, which needs no tokenizer: the checks are about positions
OTHER_WINDOW = 16  # tested in addition to a config without a window
FLEX_CPU_LENGTH = 130  # longest input of flex on a CPU: more than one of its blocks of 128
SLOW_ODD_LENGTH = OTHER_WINDOW + 1  # instead of `ODD_LENGTH`: flex on a CPU takes 50 ms for a pass, emulated bf16 more
DROPOUT = 0.2  # in the cases in training mode
SHARPENING = 100.0  # factor on q and k, which makes scores of 10^4
MAX_GRADIENTS = 64  # of the first case, where single tokens test each pair of positions at a third of the cost
OTHER_ROWS = 8  # texts that are replaced in each case but the first
SLOW_GRADIENTS, SLOW_ROWS = 8, 4  # where bf16 is emulated, which takes ten times as long as float32
LARGE_BUDGET, SMALL_BUDGET = 3e12, 5e9  # FLOPs of one dependency matrix: of the first case, and of each other one


def gpt_cases(config: GPTConfig, weights: dict[str, Tensor] | None = None, **options: Any) -> Iterator[Case]:
    """The cases of `gpt_case_builders`, each built when it is needed."""
    return (build_case() for build_case in gpt_case_builders(config, weights, **options))


def gpt_case_builders(
    config: GPTConfig,
    weights: dict[str, Tensor] | None = None,
    *,
    device: str = "cpu",
    compile: bool = False,
    exhaustive: bool = False,
    precisions: Sequence[str] = PRECISIONS,
    backends: Sequence[str] = tuple(BACKENDS),
    build: Callable[[GPTConfig], GPT] = GPT,
    subject: Callable[..., GPTSubject] = GPTSubject,
) -> Sequence[Callable[[], Case]]:
    """The grid of a GPT.

    A model without attention has no scores to sharpen and no backends. FlexAttention is left out where it cannot
    compute heads as small as the config's.

    Args:
        weights: state dict of a checkpoint; None: initial weights.
        compile: test compiled models too.
        exhaustive: test every pair of positions in every case, at any cost, instead of a sample for long inputs.
        build, subject: for a model with other parts: a subclass of GPT, and of the subject that knows what to expect.

    Returns:
        Functions that build a case. The first case is the model itself.
    """
    has_attention = config.n_heads > 0
    weights_kind = "initial" if weights is None else "trained"
    random = randomize(build(config), torch.Generator().manual_seed(0)).state_dict()

    def case(
        kind: str, precision: str, *, training: bool = False, compiled: bool = False, first: bool = False, **changes
    ) -> Case:
        if changes.get("backend") == "flex" or not has_attention:
            changes["attn_dropout"] = 0.0  # not implemented there
        changed = replace(config, **changes)
        with same_random_numbers(torch.device("cpu")):
            model = build(changed)
        if kind != "initial":
            model.load_state_dict(weights if kind == "trained" and weights else random)
        if kind == "sharp":
            sharpen(model)
        labels = {"weights": kind, "backend": changed.backend, "precision": precision, "window": changed.window}
        labels |= {name: True for name, on in (("dropout", training), ("compiled", compiled)) if on}
        plain = kind in ("random", "trained") and not (training or compiled)
        windowed = (
            plain and precision == precisions[0] and changes == {"backend": config.backend, "window": OTHER_WINDOW}
        )
        longest, odd, redrawn = config.context_length, ODD_LENGTH, []
        max_gradients, rows = MAX_GRADIENTS, MAX_ROWS if first or exhaustive else OTHER_ROWS
        if changed.backend == "flex" and device == "cpu":
            longest, odd = min(longest, FLEX_CPU_LENGTH), SLOW_ODD_LENGTH
        elif precision in AUTOCAST and device == "cpu" and not has_bf16(device):  # emulated
            odd, max_gradients, rows = SLOW_ODD_LENGTH, SLOW_GRADIENTS, rows if exhaustive else SLOW_ROWS
        lengths = [min(odd, longest)]
        if first or plain and kind == "random":
            lengths, redrawn = sorted({*lengths_to_test(longest, [changed.window]), *lengths}), [longest]
            if not (first or exhaustive):  # the longest texts are replaced as a whole, and not token by token
                lengths = [n for n in lengths if n <= max(odd, (changed.window or 0) + 1)]
        return Case(
            subject(model.to(device).train(training), precision=precision, compile=compiled),
            labels,
            lengths,
            budget=math.inf if exhaustive else LARGE_BUDGET if first else SMALL_BUDGET,
            full_past=kind in ("random", "trained") and not training,
            equivalence=plain,
            redrawn=structural_lengths(longest) if first else redrawn,
            rows=rows,
            single_tokens=first or exhaustive,
            max_gradients=None if exhaustive else max_gradients,
            generation=first or windowed,
        )

    grid = []

    def add(kind: str, precision: str, **options: Any) -> None:
        grid.append(functools.partial(case, kind, precision, **options))

    add("random" if weights is None else weights_kind, precisions[0], first=True)
    windows = [config.window]
    if has_attention and config.window is None and config.causal:
        windows.append(OTHER_WINDOW)
    dropout = dict.fromkeys(("embd_dropout", "attn_dropout", "resid_dropout"), DROPOUT)
    if not has_attention:
        backends = [config.backend]  # all compute the same
    elif device == "cuda" and config.head_size < MIN_HEAD_DIM:
        backends = [backend for backend in backends if backend != "flex"]
    for backend, precision in itertools.product(backends, precisions):
        slow = backend == "flex" and device == "cpu"  # no kernels there, and the same computation in every precision
        if slow and precision != precisions[0]:
            continue
        for window in windows:
            add("random", precision, backend=backend, window=window)
        if not slow and (weights is not None or backend == config.backend):
            add(weights_kind, precision, backend=backend)  # initial weights hide more than random ones
        if has_attention:
            add("sharp", precision, backend=backend)
        add("random", precision, backend=backend, training=True, **dropout)
    if compile:
        for precision in precisions:
            add("random", precision, compiled=True)
    return grid


@torch.no_grad()
def sharpen(model: GPT) -> None:
    """Makes scores so large that a mask which is a finite number, or which is added too late, has no effect."""
    for attn in attention_layers(model):
        for norm, projection in ((attn.q_norm, attn.q_proj), (attn.k_norm, attn.k_proj)):
            getattr(norm, "weight", projection.weight).mul_(SHARPENING)
