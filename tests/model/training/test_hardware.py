"""What a run uses and reports: hardware on simulated machines, memory, wandb without an account."""

import pytest
import torch

from tril.model.training import hardware, loggers
from tril.model.training.hardware import Hardware, select_hardware
from tril.model.training.settings import UserError
from tril.model.training.summary import peak_memory_bytes


def simulate(monkeypatch, cuda=None, bf16=False, mps=False, cpu=(False, False), compiles=True):
    """A machine; by default without accelerator and bf16. `cpu`: whether it has AVX-512 BF16, and AMX."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu[0])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: cpu[1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", str)
    monkeypatch.setattr(hardware, "compile_error", lambda device: None if compiles else f"no compiler for {device}")


A10 = {"cuda": "NVIDIA A10", "bf16": True}
AUTO = [  # the machine, and what a run uses
    ({"cuda": "NVIDIA H200", "bf16": True, "mps": True}, ("cuda", "bf16-mixed", True, 989e12)),
    ({"cuda": "Tesla V100-SXM2-16GB"}, ("cuda", "16-mixed", True, None)),
    (A10 | {"compiles": False}, ("cuda", "bf16-mixed", False, None)),
    ({"mps": True, "cpu": (True, False)}, ("mps", "32-true", False, None)),
    ({"cpu": (True, False)}, ("cpu", "bf16-mixed", "auto", None)),
    ({"cpu": (False, True)}, ("cpu", "bf16-mixed", "auto", None)),
    ({}, ("cpu", "32-true", "auto", None)),
]
LACKING = [  # the machine, settings, and what the message names
    ({}, {"accelerator": "mps"}, "trainer.accelerator=mps .*cpu"),
    ({"mps": True}, {"precision": "16-mixed"}, "16-mixed .*trainer.accelerator=cuda.* mps"),
    (A10 | {"compiles": False}, {"compile": True}, "compile=true .*cuda.*compile=false"),
    ({}, {"compile": "reduce-overhead"}, "trainer.accelerator=cuda.*compile=true"),
    ({"compiles": False}, {"compile": "regional"}, "compile=regional .*cpu.*compile=false"),
]


@pytest.mark.parametrize(("machine", "expected"), AUTO)
def test_auto_follows_the_machine(machine, expected, monkeypatch):
    simulate(monkeypatch, **machine)
    picked = select_hardware()
    assert (picked.accelerator, picked.precision, picked.compile, picked.peak_flops) == expected
    assert picked.device_name == machine.get("cuda", picked.device_name) != ""


@pytest.mark.parametrize(("machine", "settings", "named"), LACKING)
def test_what_the_machine_lacks_is_an_error(machine, settings, named, monkeypatch):
    simulate(monkeypatch, **machine)
    with pytest.raises(ValueError, match=named):
        select_hardware(**settings)


@pytest.mark.parametrize(("works", "flops", "compiled"), [(1, 3.9e13, False), (1, 4e13, "regional"), (0, 4e13, False)])
def test_auto_compiles_long_runs_on_a_cpu_with_a_compiler_that_works(works, flops, compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function if works else 1 // 0)
    monkeypatch.setattr(hardware, "compile_error", hardware.compile_error.__wrapped__)
    assert Hardware("cpu", "32-true", "auto", "", None).for_flops(flops).compile == compiled


@pytest.mark.parametrize("first", ["certificate", "training"])
def test_a_compiler_that_fails_is_one_line_that_names_its_cache(train_tiny, monkeypatch, first):
    def broken(graph, _):
        raise ImportError("x.so: file too short")

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=broken))
    monkeypatch.setattr(hardware, "compile_error", lambda device: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/compiled")
    with pytest.raises(UserError, match="x.so: file too short.* /compiled.* compile=false"):
        train_tiny("compile=regional", *["~callbacks.causality"] * (first == "training"))


def test_the_memory_of_a_run_is_that_of_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**15)
    assert peak_memory_bytes("cuda") == 3 * 10**15 and 1e7 < peak_memory_bytes("cpu") < 3 * 10**15


@pytest.mark.parametrize(
    ("account", "chosen", "mode"), [(False, None, "offline"), (True, None, None), (False, "x", None)]
)
def test_wandb_is_offline_without_an_account_only(monkeypatch, tmp_path, account, chosen, mode):
    monkeypatch.setattr("wandb.login", lambda prompt: account)
    monkeypatch.setenv("WANDB_MODE", chosen) if chosen else monkeypatch.delenv("WANDB_MODE", raising=False)
    assert loggers.wandb_logger(str(tmp_path))._wandb_init.get("mode") == mode
