"""`train.py plan=true`: the memory of a step is that of a real one, and the rows of GPUs follow the stated formulas."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.calls import call
from tril import train
from tril.model.gpt import GPT
from tril.model.training.optim import build_optimizer
from tril.model.training.run_estimate import Speed
from tril.scripts.cli.command_line import Typed
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.plan import gpu_rows, step_memory

TINY = ("model.n_layers=3", "model.dim=64", "model.n_heads=4", "model.context_length=64", "model.vocab_size=300")
TINY += ("model.embed_skip=false", "model.value_embed=false", "data.batch_size=4", "trainer.accelerator=cpu")
TINY += ("trainer.precision=32-true", "trainer.max_steps=10")
LLAMA = ("model.n_kv_heads=2", "model.mlp=swiglu", "model.tie_embeddings=false", "model.backend=explicit")
LLAMA += ("trainer.accumulate_grad_batches=2",)
GPT2 = ("model.pos=learned", "model.bias=true", "model.mlp=gelu", "model.resid_dropout=0.1", "optim=adamw")
GPT2 += ("model.checkpoint_activations=true",)
MATRICES, PARAMETERS = 3 * 12 * 64 * 64, 3 * 12 * 64 * 64 + 300 * 64 + 3 * (2 * 64 + 2 * 16) + 64


def config_of(*typed: str) -> RunConfig:
    return RunConfig.of(compose("train", Typed.of([*TINY, *typed])).settings)


def real_peak(config: RunConfig) -> int:
    """The most bytes that torch's allocator has handed out in the third of three steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model = GPT(config.model)
        optimizer = build_optimizer(model, config.optim)
        ids = torch.randint(300, (config.data.batch_size, 64))
        for step in range(3):
            with record_function(f"step {step}"):
                for batch in range(config.accumulate):
                    loss = model.nll(ids, ids).mean()
                    if batch == 0:
                        optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
                del loss
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [event for event in events if event.name() == "[memory]"]
    last = next(event for event in events if event.name() == "step 2")
    totals = itertools.accumulate(event.nbytes() for event in memory)
    in_last = [last.start_ns() <= event.start_ns() <= last.end_ns() for event in memory]
    return max(itertools.compress(totals, in_last))


@pytest.mark.parametrize("typed", [LLAMA, GPT2])
def test_the_memory_of_a_step_is_what_the_allocator_hands_out(typed):
    config = config_of(*typed)
    assert sum(step_memory(config, 4, "32-true").values()) == pytest.approx(real_peak(config), rel=0.02)


def test_the_parts_are_the_tensors_of_the_model_and_rows_of_gpus_follow_the_formulas():
    memory = step_memory(config_of(), 2, "32-true")
    assert memory["gradients"] == 4 * PARAMETERS
    assert memory["weights"] == pytest.approx(4 * PARAMETERS + 2 * 4 * 64 * 16, rel=0.02)  # and the rotary tables
    states = 4 * MATRICES + 8 * (PARAMETERS - MATRICES)
    assert memory["optimizer"] == pytest.approx(states, rel=0.01)  # and AdamW's counts of steps
    for strategy, sent in (
        ([], 2 * 7 / 8 * 4 * PARAMETERS),
        (["trainer=fsdp"], 7 / 8 * 4 * (7 * PARAMETERS + MATRICES)),
    ):
        config = config_of(*strategy, "trainer.accumulate_grad_batches=3")
        one, eight, _ = gpu_rows(config, GPT(config.model), step_memory(config, 4, "bf16-mixed"))
        assert one[2:4] == [f"{3 * 4 * 64}", "0B"]
        assert eight[2:4] == [f"{8 * 3 * 4 * 64:,}", f"{sent / 1e6:.3g} MB"]


def test_the_command_prints_the_plan_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tril.model.training.run_estimate.measure", lambda *_: [Speed(((1.0, 0.5 / 64),), 0.1, step=1.0)]
    )
    monkeypatch.setattr("tril.model.training.hardware.keep_freed_memory", lambda: None)  # of the whole process
    done = call(train.main, *TINY, "trainer.accumulate_grad_batches=2", "plan=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{PARAMETERS:,} parameters" in done.stdout and "10 steps of 2 x 4 windows of 64 tokens" in done.stdout
    assert "about 00:00:58 on" in done.stdout  # 10 steps of 8 windows and an update, and 8 s besides
    assert list(tmp_path.iterdir()) == []
