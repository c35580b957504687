import sys

import pytest
import torch
import torch._inductor.config as inductor

from tril.model.training import hardware
from tril.model.training.hardware import has_bf16, mfu, peak_flops, pick


@pytest.fixture
def machine(monkeypatch):
    """Pretends a machine: no accelerator and no bf16 unless said otherwise."""

    def pretend(
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
        monkeypatch.setenv("CC", compiler)  # any program that is there will do

    return pretend


def choice(*args, **kwargs):
    picked = pick(*args, **kwargs)
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


def test_explicit_values_are_honoured(machine):
    machine(cuda="NVIDIA A100-SXM4-40GB", cuda_bf16=True, amx=True)
    assert choice("cpu") == ("cpu", "bf16-mixed", None)
    assert choice("cpu", "32-true", True) == ("cpu", "32-true", "default")
    assert choice(precision="16-mixed", compile=False) == ("cuda", "16-mixed", None)
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "regional"):
        assert choice(compile=mode) == ("cuda", "bf16-mixed", mode)


def test_name_and_peak_belong_to_the_device_that_is_used(machine):
    machine(cuda="NVIDIA A100-SXM4-40GB", cuda_bf16=True)
    assert (pick().device_name, pick().peak_flops) == ("NVIDIA A100-SXM4-40GB", 312e12)
    on_cpu = pick("cpu")
    assert on_cpu.peak_flops is None and "A100" not in on_cpu.device_name and on_cpu.device_name


def test_all_illegal_values_are_listed_with_the_legal_ones(machine):
    machine()
    with pytest.raises(ValueError) as error:
        pick("tpu", "fp8", "maybe")
    assert str(error.value) == (
        "accelerator='tpu' (legal: auto, cuda, mps, cpu); "
        "precision='fp8' (legal: auto, 32-true, bf16-mixed, bf16-true, 16-mixed); compile='maybe' (legal: auto, True, False, default, reduce-overhead, max-autotune-no-cudagraphs, regional)"
    )


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
def test_absent_accelerators_are_refused(machine, accelerator):
    machine()
    with pytest.raises(ValueError, match=f"accelerator={accelerator} is not available .* has cpu; use auto"):
        pick(accelerator)


def test_half_precision_needs_cuda(machine):
    machine(mps=True)
    with pytest.raises(ValueError, match="16-mixed needs accelerator=cuda, not mps"):
        pick(precision="16-mixed")


def test_graphs_need_cuda(machine):
    machine()
    with pytest.raises(
        ValueError,
        match="compile=reduce-overhead records CUDA graphs and needs accelerator=cuda, not cpu; use compile=default",
    ):
        pick(compile="reduce-overhead")


@pytest.mark.parametrize("compile", [True, "default", "regional"])
def test_compiling_for_a_cpu_needs_a_compiler(compile):
    """As torch would say only within the first step."""
    without = inductor.patch({"cpp.cxx": (None, "no-such-compiler")})
    with (
        without,
        pytest.raises(ValueError, match="needs a C.. compiler, which is not there; install g.. or name one in CXX"),
    ):
        pick("cpu", compile=compile)
    assert pick("cpu", compile=False).compile is None


@pytest.mark.parametrize(
    ("there", "named", "found"),
    [
        ("gcc", None, True),
        ("clang", None, True),
        ("cc", None, False),
        ("mine", "mine", True),
        ("gcc", "mine", False),
        ("gcc", "", False),
    ],
)
def test_triton_looks_for_a_c_compiler(machine, tmp_path, monkeypatch, there, named, found):
    machine(cuda="NVIDIA H200", cuda_bf16=True)
    (tmp_path / there).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC") if named is None else monkeypatch.setenv("CC", named)
    assert pick().compile == ("default" if found else None)


@pytest.mark.parametrize("compile", [True, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "regional"])
@pytest.mark.parametrize(("lacking", "message"), [
    ({"compiler": "no-such-compiler"}, "compiling for CUDA needs a C compiler, which is not there; install gcc or name one in CC, or use"),
    ({"triton": False}, "compiling for CUDA needs Triton, .*; use compile=false"),
], ids=["compiler", "triton"])  # fmt: skip
def test_compiling_for_cuda_is_refused_without_what_it_needs(machine, lacking, message, compile):
    machine(cuda="NVIDIA H200", cuda_bf16=True, **lacking)
    with pytest.raises(ValueError, match=message):
        pick(compile=compile)
    assert pick(compile=False).compile is None


@pytest.mark.parametrize(
    ("version", "asked", "trusted"),
    [("12.2.0", None, True), ("14", None, True), ("11.4.0", None, None), ("", None, None), ("14", False, False)],
)
def test_a_new_compiler_is_not_tried_out(version, asked, trusted, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho {version}\n")
    compiler.chmod(0o755)
    with inductor.patch({"cpp.cxx": (None, str(compiler)), "cpp.vec_isa_ok": asked}):
        assert pick("cpu", compile="regional").compile == "regional"
        assert inductor.cpp.vec_isa_ok is trusted


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
    # GPT-2 124M on one H200: 488 k tokens/s at 6 * 124 M parameters + 12 * 12 layers * 768 wide * 1024 long FLOPs per token
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
def test_a_cpu_is_called_by_its_name(content, name, monkeypatch):
    monkeypatch.setattr(hardware.platform, "processor", lambda: "arm")
    monkeypatch.setattr(hardware.Path, "is_file", lambda path: content is not None)
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: content)
    assert hardware.cpu_name() == name
