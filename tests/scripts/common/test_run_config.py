"""What a checked plan decides by itself, how a run on CUDA is compiled, for which torch only has to say that there is one; what it refuses."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from tril.model.training import hardware
from tril.scripts.common.cli import CONFIGS
from tril.scripts.common.run_config import check

SMALL = [
    "model.dim=384",
    "model.n_layers=6",
    "model.n_heads=6",
    "model.context_length=256",
    "data.batch_size=64",
]  # nanoGPT's GPU recipe
LARGE = ["model.dim=768", "model.n_layers=12", "model.n_heads=6", "model.context_length=1024", "data.batch_size=64"]


def mode(monkeypatch, *overrides, cuda=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(hardware, "has_triton", lambda: True)
    monkeypatch.setenv("CC", sys.executable)  # any program that is there will do
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return check(compose("train", [*overrides])).hardware.compile


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (SMALL, "default"),
        ([*SMALL, "compile=true"], "default"),
        ([*SMALL, "compile=false"], None),
        ([*LARGE, "compile=reduce-overhead"], "reduce-overhead"),
        ([*LARGE, "compile=max-autotune-no-cudagraphs"], "max-autotune-no-cudagraphs"),
    ],
    ids=str,
)
def test_cuda_is_compiled_as_asked_and_without_graphs_by_itself(monkeypatch, overrides, expected):
    assert mode(monkeypatch, *overrides) == expected


def test_nothing_is_compiled_on_a_cpu_unless_asked_for(monkeypatch):
    assert mode(monkeypatch, *SMALL, cuda=False) is None
    assert mode(monkeypatch, *SMALL, "compile=true", cuda=False) == "default"


def test_graphs_and_accumulated_gradients_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="compile=reduce-overhead needs trainer.accumulate_grad_batches=1, not 2; use compile=default"
    ):
        mode(monkeypatch, *SMALL, "compile=reduce-overhead", "trainer.accumulate_grad_batches=2")


def test_flex_needs_heads_that_its_kernels_can_compute(monkeypatch):
    flex = ["model.backend=flex", "model.dim=64", "model.qk_norm=true"]
    with pytest.raises(
        ValueError, match="model.backend=flex needs a head size of at least 16, not 8 .*; use model.backend=fused"
    ):
        mode(monkeypatch, *flex, "model.n_heads=8")
    assert (
        mode(monkeypatch, *flex, "model.n_heads=4")
        == mode(monkeypatch, *flex, "model.n_heads=0", "model.qk_norm=false")
        == "default"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=18446744073709551616", r"seed=18446744073709551616 must be a whole number from 0 to 2\*\*64 - 1"),
        (
            "optim.schedule=null",
            "optim.schedule=None must be a group of settings; change single ones, such as optim.schedule.KEY=VALUE",
        ),
        ("causality=true", "causality=True must be a group of settings"),
        ("+trainer.limit_val_batches=0", "trainer.limit_val_batches=0 leaves no validation"),
        ("trainer.max_time=10", "trainer.max_time=10 must be DD:HH:MM:SS"),
    ],
)
def test_what_lightning_or_the_first_validation_would_stumble_over_is_refused(monkeypatch, override, message):
    with pytest.raises(ValueError, match=message):
        mode(monkeypatch, override)


COMPILES = """
import os, runpy, sys
sys.argv = ["train.py", "compile=regional", "trainer.accelerator=cpu", "model.causal=false"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit:  # model.causal=false is refused after the compiler was looked for
    print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_compiled_code_is_kept_beside_the_data(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | {
        "TRIL_CACHE": str(tmp_path)
    }
    done = subprocess.run([sys.executable, "-c", COMPILES], cwd=CONFIGS.parent, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / "compiled")], done.stderr
