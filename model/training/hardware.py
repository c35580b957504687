"""What the machine at hand should run: accelerator, precision, compilation, and its peak speed to measure against."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._triton import has_triton

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_KEPT = 1 << 30  # bytes
KNOWS_AMX = 12  # version of g++ (2022) and of clang (2021): AMX is the newest that torch writes for x86 without a trial of its own

ACCELERATORS = ("auto", "cuda", "mps", "cpu")
PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed")
CUDA_GRAPHS = "reduce-overhead"  # torch.compile's word for them
REGIONAL = "regional"  # not a mode of torch.compile but a use of it: one block is compiled, for all of them
COMPILE = ("auto", True, False, "default", CUDA_GRAPHS, "max-autotune-no-cudagraphs", REGIONAL)

# Dense 16-bit tensor-core peaks with float32 accumulation, in TFLOP/s. Data sheets print the number with 2:4 sparsity, twice these.
# bf16, except on V100 and T4, which have fp16 only. The first row whose words appear in the device name counts, so variants stand
# before their family; None marks a variant that shares the name of a faster card.
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

    compile     torch.compile's mode for the loss, or REGIONAL; None: nothing is compiled
    peak_flops  dense 16-bit FLOP/s of one device; None where it is not known
    """

    accelerator: str
    precision: str
    compile: str | None
    device_name: str
    peak_flops: float | None


def cpu_name() -> str:
    """As the processor calls itself; on Linux, platform.processor() knows the architecture at best."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed blocks instead of giving them back: a CPU step allocates the same ones again, and each new one
    would be cleared page by page (about a tenth of a small model's step). Does nothing on another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, LARGEST_KEPT)


def settle(accelerator: str) -> None:
    """What a process that trains on "cpu", "cuda" or "mps" sets for all of torch."""
    if accelerator == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision("high" if accelerator == "cuda" else "highest")


def has_bf16(accelerator: str) -> bool:
    """Whether "cuda", "mps" or "cpu" multiplies bf16 matrices in hardware.

    Emulation does not count: without AVX512-BF16 or AMX a CPU is 40 to 500 times slower in bf16 than in float32
    (https://github.com/pytorch/pytorch/issues/146508).
    """
    if accelerator == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # compute capability 8.0 and above
    return accelerator == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of one device by its name as torch reports it, None for a device that PEAK_TFLOPS does not know."""
    for words, tflops in PEAK_TFLOPS:
        if re.search(rf"\b{words}\b", device_name):  # whole words: "A10" is neither an "A100" nor an "A10G"
            return tflops and tflops * 1e12
    return None


def compile_seconds() -> float:
    """Spent by this process in torch.compile so far, which must have been used."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def compiles_by_itself(accelerator: str) -> bool:
    """What compile=auto means: on CUDA, where torch.compile has what it needs. For a CPU compiling takes too long to begin with."""
    return accelerator == "cuda" and lacking_for_cuda() is None


def check_compiler(accelerator: str) -> None:
    """Raises ValueError where torch.compile lacks what it makes code for "cpu" or "cuda" with."""
    if accelerator == "cpu":
        check_cpp_compiler()
    elif accelerator == "cuda" and (lacking := lacking_for_cuda()):
        raise ValueError(f"compiling for CUDA needs {lacking}")


def lacking_for_cuda() -> str | None:
    """What torch.compile needs for a GPU and does not find, with the remedy; None: it has all."""
    if not has_triton():
        return "Triton, which this build of torch or this card does without; use compile=false"
    compilers = (
        [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    )  # where Triton looks: it builds what starts its kernels
    if not any(map(shutil.which, compilers)):
        return "a C compiler, which is not there; install gcc or name one in CC, or use compile=false"
    return None


def check_cpp_compiler() -> None:
    """Raises ValueError where torch.compile lacks the C++ compiler that it makes a CPU's code with.

    Of a new one it need not find out by trial builds which instructions it knows, as it does for fear of old ones: 9 s of a first start.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except RuntimeError as error:
        remedy = "install g++ or name one in CXX, or use compile=false"
        raise ValueError(f"compiling for a CPU needs a C++ compiler, which is not there; {remedy}") from error
    version = re.match(r"\d+", subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout)
    if config.cpp.vec_isa_ok is None and version and int(version[0]) >= KNOWS_AMX:
        config.cpp.vec_isa_ok = True


def mfu(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation (PaLM, https://arxiv.org/abs/2204.02311, appendix B): the share of `peak` FLOP/s that training uses."""
    return tokens_per_second * flops_per_token / peak


def pick(accelerator: str = "auto", precision: str = "auto", compile: bool | str = "auto") -> Hardware:
    """Fills in every "auto" with what suits the machine: CUDA before MPS before CPU, bf16 only where the hardware has it.

    A compiled run has the mode "default" unless another is asked for. Raises ValueError naming every illegal value at once, or what
    this machine does not have.
    """
    asked = {
        "accelerator": (accelerator, ACCELERATORS),
        "precision": (precision, PRECISIONS),
        "compile": (compile, COMPILE),
    }
    wrong = [
        f"{name}={value!r} (legal: {', '.join(map(str, legal))})"
        for name, (value, legal) in asked.items()
        if value not in legal
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    present = [
        name
        for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
        if there
    ]
    present.append("cpu")
    if accelerator == "auto":
        accelerator = present[0]
    if accelerator not in present:
        raise ValueError(
            f"accelerator={accelerator} is not available to this torch build; it has {', '.join(present)}; use auto"
        )
    if precision == "auto":
        precision = "bf16-mixed" if has_bf16(accelerator) else "16-mixed" if accelerator == "cuda" else "32-true"
    if precision == "16-mixed" and accelerator != "cuda":  # the loss scaling that fp16 needs is CUDA's
        raise ValueError(f"precision=16-mixed needs accelerator=cuda, not {accelerator}; use auto or 32-true")
    if compile == CUDA_GRAPHS and accelerator != "cuda":
        raise ValueError(
            f"compile={CUDA_GRAPHS} records CUDA graphs and needs accelerator=cuda, not {accelerator}; use compile=default"
        )
    if compile == "auto":
        compile = compiles_by_itself(accelerator)
    mode = ("default" if compile else None) if isinstance(compile, bool) else compile
    if mode is not None:
        check_compiler(accelerator)
    name = torch.cuda.get_device_name() if accelerator == "cuda" else cpu_name()
    return Hardware(accelerator, precision, mode, name, peak_flops(name) if accelerator == "cuda" else None)
