"""Accelerator, precision and compilation that suit this machine, and the peak speed that MFU is relative to."""

import ctypes
import functools
import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tril.data.settings import one_line, typed
from tril.model.training.settings import Accelerator, Compile, Precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_KEPT_BYTES = 1 << 30
REGIONAL = "regional"  # one block is compiled, which takes a fraction of the time, and used for all blocks
COMPILED_FLOPS = 4e13  # of a run on a CPU, from which compilation pays
GRAPHS = "reduce-overhead"  # the whole loss is compiled, and its kernels are started as one CUDA graph

# Dense bf16 FLOP/s by the names that torch reports, of NVIDIA's data sheets, which print twice these for 2:4 sparsity.
# Cards with similar names, such as laptop GPUs, are slower.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989e12),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
}


@dataclass(frozen=True)
class Hardware:
    """What a run uses, in Lightning's names.

    Args:
        compile: the setting; "auto" until `for_flops` decides it.
        peak_flops: dense 16-bit FLOP/s of one device; None: unknown.
    """

    accelerator: str
    precision: str
    compile: Compile
    device_name: str
    peak_flops: float | None

    def for_flops(self, flops: float) -> "Hardware":
        """The same with compilation decided for a run of so many FLOPs.

        On two cores, a run of COMPILED_FLOPS takes three to four minutes. Compilation takes up to a minute of them, and
        saves as much or more (docs/log.md). The rule knows no times, so that equal commands make equal runs.
        """
        if self.compile != "auto":
            return self
        return replace(self, compile=REGIONAL if flops >= COMPILED_FLOPS and not compile_error("cpu") else False)


def cpu_name() -> str:
    """The processor's model name; on Linux, platform.processor() returns the architecture at best."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return match[1] if match else platform.processor() or platform.machine()


@functools.cache
def compile_error(device: str) -> str | None:
    """Why torch.compile does not work for "cuda", "mps" or "cpu", from a trial; None: it works."""
    try:
        torch.compile(torch.neg)(torch.ones(1, device=device))
    except Exception as error:  # of any step: a compiler may be missing, or there without its headers or OpenMP
        return one_line(error)
    return None


def compiler_failure(error: Exception) -> str | None:
    """What torch.compile says if it raised `error` or its cause, with a remedy; None: it raised neither.

    A process that is killed while it compiles can leave an incomplete file in the cache, which no later one replaces
    (https://github.com/pytorch/pytorch/issues/102539).
    """
    from torch._dynamo.exc import BackendCompilerFailed  # a second to import, where nothing is compiled

    failed = next((each for each in (error, error.__cause__) if isinstance(each, BackendCompilerFailed)), None)
    if failed is None:
        return None
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torch's cache")  # torch sets it
    remedy = f"remove {folder}, in which a killed process may have left half a file, or use compile=false"
    return f"torch.compile fails ({one_line(failed.inner_exception)}); {remedy}"


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks for the next step on a CPU, instead of returning them to the kernel.

    The kernel clears new blocks page by page, a tenth of a small model's step. Other C libraries are left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def use_device(name: str, key: str = "device") -> str:
    """`name`, or the fastest available kind of device for "auto"; on a CPU, see `keep_freed_memory`.

    Raises:
        ValueError: this machine does not have what the setting `key` names.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [kind for kind in available if available[kind]]
    if name not in ("auto", *usable):
        has = f"is not available to this torch build, which has {', '.join(usable)}"
        raise ValueError(f"{key}={name} {has}; use auto")
    device = usable[0] if name == "auto" else name
    if device == "cpu":
        keep_freed_memory()
    return device


def has_bf16(accelerator: str) -> bool:
    """Whether "cuda", "mps" or "cpu" multiplies bf16 matrices in hardware.

    Emulation does not count: a CPU without AVX512-BF16 or AMX is 40 to 500 times slower in bf16 than in float32
    (https://github.com/pytorch/pytorch/issues/146508).
    """
    if accelerator == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # compute capability 8.0 and above
    return accelerator == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_compile(compile: Compile, device: str) -> Compile:
    """What compile=auto means: true on CUDA if torch.compile works, "auto" on a CPU; else false.

    Raises:
        ValueError: torch.compile does not work; it would fail in the first step.
    """
    if compile == "auto":
        return "auto" if device == "cpu" else device == "cuda" and compile_error(device) is None
    if compile and (cause := compile_error(device)):
        remedy = "install a C++ compiler (CUDA: a C compiler and Triton), or use compile=false"
        raise ValueError(f"compile={typed(compile)} does not work for {device} ({cause}); {remedy}")
    return compile


def select_hardware(
    accelerator: Accelerator = "auto", precision: Precision = "auto", compile: Compile = "auto"
) -> Hardware:
    """Replaces every "auto" by what suits the machine: CUDA before MPS before CPU, bf16 only if the hardware has it.

    Training on CUDA then multiplies float32 matrices in TF32.

    Args:
        accelerator: trainer.accelerator.
        precision: trainer.precision.
        compile: the setting.

    Raises:
        ValueError: this machine lacks what the settings need.
    """
    device = use_device(accelerator, "trainer.accelerator")
    if precision == "auto":
        precision = "bf16-mixed" if has_bf16(device) else "16-mixed" if device == "cuda" else "32-true"
    if precision == "16-mixed" and device != "cuda":  # its loss scaling is implemented for CUDA
        needs = f"needs trainer.accelerator=cuda, not {device}"
        raise ValueError(f"trainer.precision=16-mixed {needs}; use auto or 32-true")
    if compile == GRAPHS and device != "cuda":
        raise ValueError(f"compile={GRAPHS} needs trainer.accelerator=cuda, not {device}; use compile=true or regional")
    compile = choose_compile(compile, device)
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
    return Hardware(device, precision, compile, name, PEAK_FLOPS.get(name))
