"""What select_hardware chooses and refuses on simulated machines, and the table of peaks."""

import sys

import pytest
import torch

from tril.model.training import hardware
from tril.model.training.hardware import peak_flops, select_hardware


@pytest.fixture
def machine(monkeypatch):
    """Simulates a machine; by default without accelerator and bf16."""

    def simulate(
        cuda=None, cuda_bf16=False, mps=False, avx512_bf16=False, amx=False, triton=True, compiler=sys.executable
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: cuda)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: cuda_bf16 or including_emulation
        )
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(hardware, "has_triton", lambda: triton)
        monkeypatch.setenv("CC", compiler)  # any existing program

    return simulate


def choice(*args, **kwargs):
    picked = select_hardware(*args, **kwargs)
    return picked.accelerator, picked.precision, picked.compile


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cuda": "NVIDIA H200", "cuda_bf16": True, "mps": True}, ("cuda", "bf16-mixed", "default")),
        ({"cuda": "Tesla V100-SXM2-16GB"}, ("cuda", "16-mixed", "default")),
        ({"cuda": "NVIDIA A10", "cuda_bf16": True, "triton": False}, ("cuda", "bf16-mixed", None)),
        ({"cuda": "NVIDIA A10", "cuda_bf16": True, "compiler": "no-such-compiler"}, ("cuda", "bf16-mixed", None)),
        ({"mps": True, "avx512_bf16": True}, ("mps", "32-true", None)),
        ({"avx512_bf16": True}, ("cpu", "bf16-mixed", None)),
        ({"amx": True}, ("cpu", "bf16-mixed", None)),
        ({}, ("cpu", "32-true", None)),
    ],
)
def test_auto_follows_the_machine(machine, given, expected):
    machine(**given)
    assert choice() == expected


def test_name_and_peak_are_those_of_the_selected_device(machine):
    machine(cuda="NVIDIA A100-SXM4-40GB", cuda_bf16=True)
    assert (select_hardware().device_name, select_hardware().peak_flops) == ("NVIDIA A100-SXM4-40GB", 312e12)
    on_cpu = select_hardware("cpu")
    assert on_cpu.peak_flops is None and "A100" not in on_cpu.device_name and on_cpu.device_name


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({}, {"accelerator": "mps"}, "trainer.accelerator=mps is not available .* has cpu; use auto"),
        ({"mps": True}, {"precision": "16-mixed"}, "16-mixed needs trainer.accelerator=cuda, not mps; use auto"),
        ({"cuda": "A10", "compiler": "none"}, {"compile": True}, "needs a compiler; .* name one in CC, or use"),
        ({"cuda": "A10", "triton": False}, {"compile": True}, "for cuda needs Triton; .* or use compile=false"),
        ({}, {"compile": "regional"}, "needs a compiler; install g.. or name one in CXX, or use compile=false"),
    ],
)
def test_what_the_machine_lacks_is_refused(machine, given, settings, message, monkeypatch):
    machine(**given)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=message):
        select_hardware(**settings)


@pytest.mark.parametrize(
    ("installed", "chosen", "expected"),
    [("clang", None, True), ("cc", None, False), ("my-cc", "my-cc", True), ("gcc", "my-cc", False)],
)
def test_triton_needs_a_c_compiler(machine, tmp_path, monkeypatch, installed, chosen, expected):
    machine(cuda="NVIDIA H200", cuda_bf16=True)
    (tmp_path / installed).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC") if chosen is None else monkeypatch.setenv("CC", chosen)
    assert select_hardware().compile == ("default" if expected else None)


def test_peaks_by_device_name():
    peaks = {
        "NVIDIA H200": 989,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA GeForce RTX 4090": 165.2,
    }
    slower = "NVIDIA H100 PCIe; NVIDIA H200 NVL; NVIDIA H100 80GB HBM3 MIG 1g.10gb; NVIDIA GeForce RTX 4090 Laptop GPU"
    unknown = [*slower.split("; "), "NVIDIA L40S", "NVIDIA GeForce RTX 4090 D"]
    assert {name: peak_flops(name) for name in peaks} == {name: peak * 1e12 for name, peak in peaks.items()}
    assert [peak_flops(name) for name in unknown] == [None] * len(unknown)
