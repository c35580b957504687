"""Accelerator, precision and compilation that suit this machine, and the peak speed that MFU is relative to."""

import ctypes
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._triton import has_triton

from tril.model.autocast import has_bf16
from tril.model.training.settings import Accelerator, Compile, Precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_KEPT_BYTES = 1 << 30

CUDA_GRAPHS = "reduce-overhead"  # torch.compile's name for them
REGIONAL = "regional"  # not a mode of torch.compile: one block is compiled and used for all blocks

# Dense 16-bit tensor-core peaks with float32 accumulation, in TFLOP/s. Data sheets print twice these, for 2:4 sparsity.
# bf16, except on V100 and T4, which have fp16 only. The first row whose words appear in the device name is used, so
# variants precede their family; None marks a variant that shares the name of a faster card.
PEAK_TFLOPS: tuple[tuple[str, float | None], ...] = (
    ("MIG", None),  # a slice of a card
    ("Laptop GPU", None),
    ("Max-Q", None),
    ("B200", 2250),  # NVIDIA DGX B200 data sheet: 72 PFLOP/s sparse fp8 on 8 GPUs, bf16 is half of fp8
    ("H200 NVL", 835),  # NVIDIA H200 data sheet: 1,671 sparse
    ("H200", 989),  # NVIDIA H200 data sheet: 1,979 sparse. Lightning's own table counts the sparse number
    ("GH200", 989),  # NVIDIA GH200 data sheet: 1,979 sparse
    ("H100 PCIe", 756),  # NVIDIA H100 data sheet: 1,513 sparse
    ("H100 NVL", 835),  # NVIDIA H100 data sheet: 1,671 sparse
    ("H100", 989),  # NVIDIA H100 data sheet, SXM: 1,979 sparse
    ("A100", 312),  # NVIDIA A100 data sheet, PCIe and SXM alike
    ("A40", 149.7),  # NVIDIA A40 data sheet
    ("A30", 165),  # NVIDIA A30 data sheet
    ("A10", 125),  # NVIDIA A10 data sheet
    ("L40S", 362),  # NVIDIA L40S data sheet
    ("L40", 181),  # NVIDIA L40 data sheet
    ("L4", 121),  # NVIDIA L4 data sheet: 242 sparse
    ("RTX A6000", 154.8),  # NVIDIA Ampere GA102 whitepaper
    ("RTX 3090 Ti", 80),  # the 3090's 512 FLOPs per SM and clock, 84 SMs, 1.86 GHz
    ("RTX 3090", 71),  # NVIDIA Ampere GA102 whitepaper
    ("RTX 4090 D", None),  # fewer SMs than the 4090
    ("RTX 4090", 165.2),  # NVIDIA Ada whitepaper
    ("V100-PCIE", 112),  # NVIDIA V100 data sheet, PCIe, fp16
    ("V100", 125),  # NVIDIA V100 data sheet, SXM2, fp16
    ("T4", 65),  # NVIDIA T4 data sheet, fp16
)


@dataclass(frozen=True)
class Hardware:
    """What a run uses, in Lightning's names.

    Args:
        compile: torch.compile's mode for the loss, or REGIONAL; None: nothing is compiled.
        peak_flops: dense 16-bit FLOP/s of one device; None: unknown.
    """

    accelerator: str
    precision: str
    compile: str | None
    device_name: str
    peak_flops: float | None


def cpu_name() -> str:
    """The processor's model name; on Linux, platform.processor() returns the architecture at best."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return match[1] if match else platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks for the next step on a CPU, instead of returning them to the kernel.

    The kernel clears new blocks page by page, a tenth of a small model's step. Other C libraries are left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def configure_torch(accelerator: str) -> None:
    """Sets the global options of torch for training on "cpu", "cuda" or "mps"."""
    if accelerator == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high" if accelerator == "cuda" else "highest")


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of one device by the name that torch reports; None if PEAK_TFLOPS lacks it."""
    for words, tflops in PEAK_TFLOPS:
        if re.search(rf"\b{words}\b", device_name):  # whole words: "A10" is neither an "A100" nor an "A10G"
            return tflops and tflops * 1e12
    return None


def compiles_by_default(accelerator: str) -> bool:
    """The meaning of compile=auto: true on CUDA with a complete toolchain. On a CPU compilation takes too long."""
    return accelerator == "cuda" and missing_for_cuda() is None


def check_compiler(accelerator: str) -> None:
    """Raises ValueError if torch.compile lacks a tool that it needs for "cpu" or "cuda"."""
    if accelerator == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            remedy = "install g++ or name one in CXX, or use compile=false"
            raise ValueError(f"compiling for a CPU needs a C++ compiler, which is not installed; {remedy}") from error
    elif accelerator == "cuda" and (missing := missing_for_cuda()):
        raise ValueError(f"compiling for CUDA needs {missing}")


def missing_for_cuda() -> str | None:
    """The tool that torch.compile needs for a GPU and does not find, with the remedy; None: complete."""
    if not has_triton():
        return "Triton, which this build of torch or this card does not support; use compile=false"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton, for its launchers
    if not any(map(shutil.which, compilers)):
        return "a C compiler, which is not installed; install gcc or name one in CC, or use compile=false"
    return None


def mfu(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilization (PaLM, https://arxiv.org/abs/2204.02311, appendix B): the share of `peak` FLOP/s.

    `flops_per_token` counts masked scores too, as PaLM does: `GPT.flops_per_token(masked=True)`.
    """
    return tokens_per_second * flops_per_token / peak


def select_hardware(
    accelerator: Accelerator = "auto", precision: Precision = "auto", compile: Compile = "auto"
) -> Hardware:
    """Replaces every "auto" by what suits the machine: CUDA before MPS before CPU, bf16 only if the hardware has it.

    Args:
        accelerator: trainer.accelerator.
        precision: trainer.precision.
        compile: torch.compile's mode; True means "default".

    Raises:
        ValueError: this machine lacks what the settings need.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [name for name, is_present in present.items() if is_present]
    device = available[0] if accelerator == "auto" else accelerator
    if device not in available:
        has = f"is not available to this torch build, which has {', '.join(available)}"
        raise ValueError(f"trainer.accelerator={device} {has}; use auto")
    if precision == "auto":
        precision = "bf16-mixed" if has_bf16(device) else "16-mixed" if device == "cuda" else "32-true"
    if precision == "16-mixed" and device != "cuda":  # its loss scaling is implemented for CUDA
        needs = f"needs trainer.accelerator=cuda, not {device}"
        raise ValueError(f"trainer.precision=16-mixed {needs}; use auto or 32-true")
    if compile == CUDA_GRAPHS and device != "cuda":
        needs = f"records CUDA graphs and needs trainer.accelerator=cuda, not {device}"
        raise ValueError(f"compile={CUDA_GRAPHS} {needs}; use compile=default")
    if compile == "auto":
        compile = compiles_by_default(device)
    mode = ("default" if compile else None) if isinstance(compile, bool) else compile
    if mode is not None:
        check_compiler(device)
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return Hardware(device, precision, mode, name, peak_flops(name) if device == "cuda" else None)
