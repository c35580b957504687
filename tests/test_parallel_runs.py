"""Runs of 2 processes (DDP, FSDP2) follow a run of one process: losses, weights, files.

`A_to_B` stops at its first validation as A and continues as B.
"""

import json

import numpy as np
import pytest
import torch

from tests import rank_runs
from tests.ranks import run_ranks
from tests.runs import rows
from tril.model.checkpoint import load, read_state

pytestmark = pytest.mark.xdist_group("parallel_runs")  # one process of pytest-xdist has the costly fixture

# Rates of a small model: at those of the default model it is chaotic, and repeats of one process differ by 1e-4 when
# their sums have another order.
SETTINGS = ["optim.lr_scale=0.1", "data.val_batch_size=5", "trainer.log_every_n_steps=5"]
LONG = [*SETTINGS, "trainer.max_steps=200", "trainer.val_check_interval=100", "callbacks.causality=null"]
SHORT = [*SETTINGS, "trainer.max_steps=20", "trainer.val_check_interval=10", "trainer.gradient_clip_val=0.5"]
SHORT += ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]  # 4 windows per step, as LONG
DROPOUT = ["model.resid_dropout=0.1", "model.embd_dropout=0.1", "callbacks.causality=null"]  # others are certified
DDP = ["trainer.strategy=ddp"]
FSDP = ["trainer.strategy=model_parallel"]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), encoding="utf-8")
    return folder, [f"data.path={text}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture(scope="module")
def folder(base):
    """The runs of all tests. `one_*` have one process; the windows per step are those of the others."""
    folder, data = base

    def run(name: str, *settings: str) -> list[str]:
        return [*data, f"hydra.run.dir={folder / name}", *settings]

    def resumed(name: str, *settings: str) -> list[str]:
        return [f"resume={folder / name}", data[1], *settings]

    def ranks(n_ranks: int, *jobs: list[str], ends_early: bool = False) -> None:
        path = folder / "jobs.json"
        path.write_text(json.dumps([[job, ends_early] for job in jobs]))
        run_ranks(n_ranks, "tests.rank_runs", path)

    two = ["trainer.devices=2"]
    for job in (run("one_long", *LONG), run("one_short", *SHORT), run("one_dropout", *SHORT, *DROPOUT)):
        rank_runs.run(job, False)
    rank_runs.run(run("one_to_fsdp", *SHORT), True)
    ranks(
        2,
        run("fsdp_to_one", *SHORT, *FSDP, *two, "data.batch_size=1"),
        run("ddp_to_ddp", *SHORT, *DROPOUT, *DDP, *two, "data.batch_size=1"),
        ends_early=True,
    )
    rank_runs.run(resumed("fsdp_to_one", "trainer.strategy=auto", "trainer.devices=1", "data.batch_size=2"), False)
    ranks(
        2,
        run("ddp_long", *LONG, *DDP, *two, "data.batch_size=2"),
        run("ddp_short", *SHORT, *DDP, *two, "data.batch_size=1"),
        run("fsdp_short", *SHORT, *FSDP, *two, "data.batch_size=1", "model.checkpoint_activations=true"),
        resumed("one_to_fsdp", *FSDP, *two, "data.batch_size=1"),
        run("ddp_dropout", *SHORT, *DROPOUT, *DDP, *two, "data.batch_size=1"),
        resumed("ddp_to_ddp"),
    )
    return folder


PAIRS = {
    "ddp_long": "one_long",
    "ddp_short": "one_short",
    "fsdp_short": "one_short",
    "ddp_to_ddp": "ddp_dropout",
    "fsdp_to_one": "one_short",
    "one_to_fsdp": "one_short",
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_and_gradient_norms_follow_one_process(folder, name):
    actual, expected = (rows(folder / each) for each in (name, PAIRS[name]))
    columns = [key for key in expected[0] if key.startswith(("train/loss", "val/", "grad_norm", "lr", "heads"))]
    assert {"train/loss", "val/loss", "val/bpb", "heads/entropy/L0H0"} <= set(columns)
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        for key in columns:
            assert bool(mine[key]) == bool(theirs[key])
            if theirs[key]:
                assert float(mine[key]) == pytest.approx(float(theirs[key]), abs=LIMIT, rel=LIMIT), key


@pytest.mark.parametrize("name", PAIRS)
def test_checkpoints_hold_the_weights_and_optimizer_state_of_one_process(folder, name):
    actual, expected = (read_state(folder / each / "checkpoints" / "last.ckpt") for each in (name, PAIRS[name]))
    assert actual.keys() == expected.keys()
    [mine], [theirs] = actual["optimizer_states"], expected["optimizer_states"]
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    pairs = [(actual["state_dict"][key], value) for key, value in expected["state_dict"].items()]
    for number, state in theirs["state"].items():
        pairs += [(mine["state"][number][key], value) for key, value in state.items()]
    for one, other in pairs:
        assert one.shape == other.shape and type(one) is torch.Tensor
        assert (one - other).abs().max() <= LIMIT
    assert load(folder / name).generate("line 1", max_new_tokens=5) == load(folder / PAIRS[name]).generate(
        "line 1", max_new_tokens=5
    )


@pytest.mark.parametrize("name", PAIRS)
def test_validation_covers_every_window_once(folder, name):
    actual, expected = (np.load(folder / each / "windows_last.npz") for each in (name, PAIRS[name]))
    assert len(expected["targets"]) == 12  # in batches of 5: 2 ranks do not have equal shares
    for key in ("targets", "document_targets", "step"):
        assert np.array_equal(actual[key], expected[key])
    for key in ("nll", "document_nll"):
        assert np.allclose(actual[key], expected[key], rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_has_the_files_of_one_process(folder, name):
    files = [{path.relative_to(folder / each) for path in (folder / each).rglob("*")} for each in (name, PAIRS[name])]
    assert files[0] == files[1]
    summaries = [json.loads((folder / each / "summary.json").read_text()) for each in (name, PAIRS[name])]
    for key in ("steps", "tokens", "parameters", "causality", "flops_per_token"):
        assert summaries[0][key] == summaries[1][key]
    assert summaries[0]["final_val_loss"] == pytest.approx(summaries[1]["final_val_loss"], abs=1e-6)
    samples = [(folder / each / "samples.txt").read_text(encoding="utf-8") for each in (name, PAIRS[name])]
    assert samples[0] == samples[1]
