"""What select_hardware chooses and refuses on simulated machines, and the table of peaks."""

import sys

import pytest
import torch
import torch._inductor.config as inductor

from tril.model.autocast import has_bf16
from tril.model.training import hardware
from tril.model.training.hardware import mfu, peak_flops, select_hardware


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


def test_explicit_values_are_kept(machine):
    machine(cuda="NVIDIA A100-SXM4-40GB", cuda_bf16=True, amx=True)
    assert choice("cpu") == ("cpu", "bf16-mixed", None)
    assert choice("cpu", "32-true", True) == ("cpu", "32-true", "default")
    assert choice(precision="16-mixed", compile=False) == ("cuda", "16-mixed", None)
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "regional"):
        assert choice(compile=mode) == ("cuda", "bf16-mixed", mode)


def test_name_and_peak_are_those_of_the_selected_device(machine):
    machine(cuda="NVIDIA A100-SXM4-40GB", cuda_bf16=True)
    assert (select_hardware().device_name, select_hardware().peak_flops) == ("NVIDIA A100-SXM4-40GB", 312e12)
    on_cpu = select_hardware("cpu")
    assert on_cpu.peak_flops is None and "A100" not in on_cpu.device_name and on_cpu.device_name


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
def test_unavailable_accelerators_are_refused(machine, accelerator):
    machine()
    with pytest.raises(ValueError, match=f"trainer.accelerator={accelerator} is not available .* has cpu; use auto"):
        select_hardware(accelerator)


def test_half_precision_needs_cuda(machine):
    machine(mps=True)
    with pytest.raises(
        ValueError, match="trainer.precision=16-mixed needs trainer.accelerator=cuda, not mps; use auto"
    ):
        select_hardware(precision="16-mixed")


def test_graphs_need_cuda(machine):
    machine()
    with pytest.raises(
        ValueError, match="compile=reduce-overhead .* needs trainer.accelerator=cuda, not cpu; use compile=default"
    ):
        select_hardware(compile="reduce-overhead")


@pytest.mark.parametrize("compile", [True, "default", "regional"])
def test_compiling_for_a_cpu_needs_a_compiler(compile):
    """torch would report it in the first step only."""
    without = inductor.patch({"cpp.cxx": (None, "no-such-compiler")})
    with (
        without,
        pytest.raises(ValueError, match="needs a C.. compiler, which is not installed; install g.. or name one in CXX"),
    ):
        select_hardware("cpu", compile=compile)
    assert select_hardware("cpu", compile=False).compile is None


@pytest.mark.parametrize(
    ("installed", "chosen", "expected"),
    [
        ("gcc", None, True),
        ("clang", None, True),
        ("cc", None, False),
        ("my-cc", "my-cc", True),
        ("gcc", "my-cc", False),
        ("gcc", "", False),
    ],
)
def test_triton_needs_a_c_compiler(machine, tmp_path, monkeypatch, installed, chosen, expected):
    machine(cuda="NVIDIA H200", cuda_bf16=True)
    (tmp_path / installed).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC") if chosen is None else monkeypatch.setenv("CC", chosen)
    assert select_hardware().compile == ("default" if expected else None)


@pytest.mark.parametrize("compile", [True, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "regional"])
@pytest.mark.parametrize(("missing", "message"), [
    ({"compiler": "no-such-compiler"}, "needs a C compiler, .*; install gcc or name one in CC, or use"),
    ({"triton": False}, "compiling for CUDA needs Triton, .*; use compile=false"),
], ids=["compiler", "triton"])  # fmt: skip
def test_compiling_for_cuda_is_refused_without_its_tools(machine, missing, message, compile):
    machine(cuda="NVIDIA H200", cuda_bf16=True, **missing)
    with pytest.raises(ValueError, match=message):
        select_hardware(compile=compile)
    assert select_hardware(compile=False).compile is None


def test_emulated_bf16_does_not_count(machine):
    machine(cuda="Tesla V100-SXM2-16GB", mps=True)
    assert not has_bf16("cuda") and not has_bf16("mps") and not has_bf16("cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("Something New", None),
    ],
)
def test_peaks_by_device_name(name, tflops):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_mfu_of_a_measured_run():
    # GPT-2 124M on one H200: 488 k tokens/s at 6 * 124 M + 12 * 12 layers * 768 wide * 1024 long FLOPs per token
    assert mfu(488e3, 6 * 124e6 + 12 * 12 * 768 * 1024, 989e12) == pytest.approx(0.423, abs=1e-3)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor\t: 0\nmodel name\t: Foo(R) CPU @ 2 GHz\nflags\t: a b\n", "Foo(R) CPU @ 2 GHz"),
        ("processor\t: 0\n", "arm"),
        (None, "arm"),
    ],
    ids=["x86", "no name", "no file"],
)
def test_cpu_name(content, name, monkeypatch):
    monkeypatch.setattr(hardware.platform, "processor", lambda: "arm")
    monkeypatch.setattr(hardware.Path, "is_file", lambda path: content is not None)
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: content)
    assert hardware.cpu_name() == name
