"""The memory of a step that is calculated without content is that of real steps."""

import itertools
import json
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.conftest import run_python
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.training.hardware import Hardware
from tril.model.training.optim import OptimConfig, build_optimizer
from tril.scripts.planning.step_memory import largest_batch, step_bytes, step_memory

CPU = Hardware("cpu", "32-true", None, "a machine", None)
TABLE = {"n_heads": 0, "mlp_hidden": 1, "n_layers": 1, "pos": "none"}  # nearly all is the embedding
SHAPE = {"vocab_size": 300, "context_length": 64, "n_layers": 3, "dim": 64, "n_heads": 4}
MODELS = {
    "default": {},
    "llama": {"n_kv_heads": 2, "mlp": "swiglu", "qk_norm": "none", "tie_embeddings": False, "backend": "explicit"},
    "gpt2": {"pos": "learned", "bias": True, "norm": "layernorm", "mlp": "gelu", "resid_dropout": 0.1},
    "checkpointed": {"checkpoint_activations": True, "n_layers": 6},
    "mostly weights": {"vocab_size": 20, "context_length": 4},
}


def real_peaks(config: GPTConfig, optim: OptimConfig, windows: int, precision: str, accumulate: bool) -> list[int]:
    """The most bytes that torch's allocator has handed out: in forward and backward pass, and in the update."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model = GPT(config)
        optimizer = build_optimizer(model, optim)
        ids = torch.randint(config.vocab_size, (windows, config.context_length))
        for step in range(3):
            for batch in range(1 + accumulate):
                with record_function(f"passes {step}"):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                        loss = model.nll(ids, ids).mean()
                    if batch == 0:
                        optimizer.zero_grad()
                    loss.backward()
            with record_function(f"update {step}"):
                optimizer.step()
                del loss
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [event for event in events if event.name() == "[memory]"]
    totals = list(itertools.accumulate(event.nbytes() for event in memory))
    spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name()[-2:] == " 2"}
    return [
        max(n for event, n in zip(memory, totals, strict=True) if begin <= event.start_ns() <= end)
        for begin, end in (spans["passes 2"], spans["update 2"])
    ]


@pytest.mark.parametrize("windows", [1, 6])
@pytest.mark.parametrize("choices", MODELS.values(), ids=MODELS)
def test_the_bytes_of_both_peaks_are_those_that_torch_allocates(choices, windows):
    config = GPTConfig(**SHAPE | choices)
    found = step_memory(config, OptimConfig(), windows, CPU)
    assert [found.passes, found.update_peak] == pytest.approx(
        real_peaks(config, OptimConfig(), windows, "32-true", accumulate=False), rel=0.02
    )


@pytest.mark.parametrize(
    ("kind", "precision", "accumulate"),
    [("muon", "32-true", True), ("adamw", "32-true", True), ("muon", "bf16-mixed", False)],
)
def test_micro_batches_and_autocast_count(kind, precision, accumulate):
    config, optim = GPTConfig(**SHAPE | {"context_length": 16}), OptimConfig(kind=kind)
    found = step_memory(config, optim, 4, Hardware("cpu", precision, None, "", None), accumulate=accumulate)
    passes, _ = real_peaks(config, optim, 4, precision, accumulate)
    assert found.passes == pytest.approx(passes, rel=0.02)


def test_the_parts_have_the_sizes_of_their_tensors():
    config = GPTConfig(**SHAPE, pos="learned")
    matrices, table, positions, gains = 3 * 12 * 64 * 64, 300 * 64, 64 * 64, 3 * (2 * 64 + 2 * 16) + 64
    whole = 4 * (matrices + table + positions + gains)
    found = step_memory(config, OptimConfig(), 2, CPU)
    steps = 4 * len([p for name, p in GPT(config).named_parameters() if "blocks." not in name or p.ndim == 1])
    assert (found.weights, found.gradients) == (whole, whole)
    assert found.optimizer == 4 * matrices + 2 * (whole - 4 * matrices) + steps  # Muon has one, AdamW has two


def test_the_bytes_of_a_step_of_an_embedding_are_those_of_its_logits():
    """At the peak, logits and log-probabilities (B, T, V), and the gradient of one of them."""
    config = GPTConfig(vocab_size=1000, context_length=64, dim=4, **TABLE)
    found = step_bytes(config, OptimConfig(kind="adamw"), 16, CPU)
    assert found == pytest.approx(3 * 4 * 16 * 64 * 1000, rel=0.1)


@pytest.mark.parametrize(("budget", "windows"), [(165, 6), (180, 8), (189, 8), (1000, 90), (105, 0), (99, -1)])
def test_the_largest_batch_is_on_the_line_through_two(budget, windows):
    """100 bytes and 10 for each window."""
    assert largest_batch((180, 260), 8, budget) == windows


MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import OptimConfig, build_optimizer

def read(name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def train(fields, windows):
    config = GPTConfig(**fields)
    model = GPT(config)
    optimizer = build_optimizer(model, OptimConfig())
    ids = torch.randint(config.vocab_size, (windows, config.context_length))
    for _ in range(3):
        loss = model.nll(ids, ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

fields, windows = json.loads(sys.argv[1])
train(fields | {"n_layers": 1, "dim": 32, "mlp_hidden": 32, "context_length": 8, "vocab_size": 8}, 1)  # loads libraries
before = read("VmRSS")
train(fields, windows)
print(read("VmHWM") - before)
"""
LARGER = {"vocab_size": 2048, "n_layers": 4, "dim": 128, "n_heads": 4, "context_length": 256}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name, windows", [("default", 4), ("llama", 16), ("gpt2", 4)])
def test_the_memory_of_a_process_is_that_of_its_tensors(name, windows, tmp_path):
    """Each large tensor is mapped on its own, so that the heap is not fragmented (5 s each)."""
    fields = MODELS[name] | LARGER
    done = run_python("-c", MEASURE, json.dumps([fields, windows]), cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    assert step_bytes(GPTConfig(**fields), OptimConfig(), windows, CPU) == pytest.approx(int(done.stdout), rel=0.1)
