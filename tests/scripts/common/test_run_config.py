"""What check_config derives and refuses, also for CUDA, which torch is made to report."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.runs import composed
from tril.model.training import hardware
from tril.scripts.common import run_config
from tril.scripts.common.cli import CONFIGS
from tril.scripts.common.run_config import check_config, refuse_unused

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
    monkeypatch.setenv("CC", sys.executable)  # any existing program
    return check_config(composed(*overrides, base=[])).hardware.compile


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
def test_cuda_is_compiled_without_graphs_by_default(monkeypatch, overrides, expected):
    assert mode(monkeypatch, *overrides) == expected


def test_nothing_is_compiled_on_a_cpu_by_default(monkeypatch):
    assert mode(monkeypatch, *SMALL, cuda=False) is None
    assert mode(monkeypatch, *SMALL, "compile=true", cuda=False) == "default"


def test_graphs_and_accumulated_gradients_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="compile=reduce-overhead needs trainer.accumulate_grad_batches=1, not 2; use compile=default"
    ):
        mode(monkeypatch, *SMALL, "compile=reduce-overhead", "trainer.accumulate_grad_batches=2")


def test_flex_needs_a_minimum_head_size(monkeypatch):
    flex = ["model.backend=flex", "model.dim=64", "model.qk_norm=true"]
    with pytest.raises(
        ValueError, match="model.backend=flex needs a head size of at least 16, not 8 .*; use model.backend=fused"
    ):
        mode(monkeypatch, *flex, "model.n_heads=8")
    assert (
        mode(monkeypatch, *flex, "model.n_heads=4")
        == mode(monkeypatch, *flex, "model.n_heads=0", "model.qk_norm=false")
        == mode(monkeypatch, *flex, "model.pos=alibi")
        == "default"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=18446744073709551616", r"seed=18446744073709551616 must be less than 18446744073709551616"),
        (
            "optim.schedule=null",
            "optim.schedule=None must be a group of settings; change one, such as optim.schedule.KEY=VALUE",
        ),
        ("causality=true", "causality=True must be a group of settings"),
        ("+trainer.limit_val_batches=0", "trainer.limit_val_batches=0 skips the validation"),
        ("trainer.max_time=10", "trainer.max_time=10 must be DD:HH:MM:SS"),
    ],
)
def test_settings_that_would_fail_later_are_refused(monkeypatch, override, message):
    with pytest.raises(ValueError, match=message):
        mode(monkeypatch, override)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_compiled_code_is_cached_next_to_the_data(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="model.causal=false"):  # after the compiler was found
        mode(monkeypatch, "compile=regional", "trainer.accelerator=cpu", "model.causal=false", cuda=False)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (
            ["+trainer.limit_train_batches=7", "trainer.accumulate_grad_batches=2"],
            "=7 must be a multiple .*=2, .*; use 6",
        ),
        (
            ["+trainer.limit_train_batches=1", "trainer.accumulate_grad_batches=4"],
            "=1 must be a multiple .*=4, .*; use 4",
        ),
        (
            ["+trainer.limit_train_batches=0.5", "trainer.accumulate_grad_batches=4"],
            "=0.5 must be a multiple .*; use 4",
        ),
        (["+trainer.limit_train_batches=8", "trainer.accumulate_grad_batches=4"], None),
        (["+trainer.limit_train_batches=1.0", "trainer.accumulate_grad_batches=4"], None),
        (["+trainer.limit_train_batches=null", "trainer.accumulate_grad_batches=4"], None),
        (["+trainer.limit_train_batches=0.5"], None),
        (["+trainer.limit_train_batches=7"], None),
    ],
    ids=str,
)
def test_limited_passes_have_complete_steps(monkeypatch, overrides, remedy):
    if remedy is None:
        assert mode(monkeypatch, *overrides, cuda=False) is None
    else:
        with pytest.raises(ValueError, match=f"^trainer.limit_train_batches{remedy}$"):
            mode(monkeypatch, *overrides)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["optim=adamw", "optim.momentum=0.5"], True),
        (["optim=adamw", "optim.momentum=0.9"], False),  # the default
        (["optim=muon", "optim.momentum=0.5"], False),
        (["experiment=shakespeare", "optim=adamw"], False),  # the recipe has optim.muon_lr=0.02
    ],
    ids=str,
)
def test_muons_keys_on_the_command_line_are_refused_for_adamw(monkeypatch, overrides, refused):
    monkeypatch.setattr(run_config, "task_overrides", lambda: overrides)
    config = check_config(composed(*overrides, "trainer.accelerator=cpu", base=[]))
    if refused:
        message = "optim.momentum=0.5 has no effect with optim.kind=adamw; leave it out, or use optim=muon"
        with pytest.raises(ValueError, match=message):
            refuse_unused(config)
    else:
        refuse_unused(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.rope_base=500"], None),
        (["model.pos=alibi"], None),
        (
            ["model.pos=alibi", "model.rope_base=500"],
            "model.rope_base=500 has no effect with model.pos=alibi; leave it out, or use model.pos=rope",
        ),
        (["model.mlp_hidden=512"], None),
        (["model.mlp_ratio=2", "model.mlp_hidden=null"], None),
        (
            ["model.mlp_ratio=2", "model.mlp_hidden=512"],
            "model.mlp_ratio=2 has no effect with model.mlp_hidden=512, the hidden width itself; leave one of them out",
        ),
        (["optim.base_width=64", "optim.base_head_dim=16", "optim.scale_with_width=true"], None),
        (
            ["optim.base_head_dim=16"],
            "optim.base_head_dim=16 has no effect without optim.scale_with_width; set optim.scale_with_width=true, or "
            "leave it out",
        ),
    ],
    ids=str,
)
def test_keys_without_effect_are_refused_on_the_command_line(monkeypatch, overrides, message):
    monkeypatch.setattr(run_config, "task_overrides", lambda: overrides)
    config = check_config(composed(*overrides, "trainer.accelerator=cpu", base=[]))
    if message is None:
        refuse_unused(config)
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            refuse_unused(config)


COMPILES = """
import os, runpy, sys
sys.argv = ["train.py", "compile=regional", "trainer.accelerator=cpu", "model.causal=false"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit:  # model.causal=false is refused after the compiler was found
    print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles for a CPU with a C++ compiler")
def test_the_command_caches_compiled_code_next_to_the_data(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | {
        "TRIL_CACHE": str(tmp_path)
    }
    done = subprocess.run([sys.executable, "-c", COMPILES], cwd=CONFIGS.parent, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / "compiled")], done.stderr
