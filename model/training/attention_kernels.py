"""Times torch's attention kernels on the shape of a run and prefers the fastest.

B batch, T length, H query heads, G key/value heads, D head size.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tril.model.attention import attention
from tril.model.autocast import AUTOCAST
from tril.model.config import GPTConfig
from tril.model.training.hardware import Hardware
from tril.model.training.run_estimate import seconds

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = AUTOCAST | {"bf16-true": torch.bfloat16, "32-true": torch.float32}  # of q, k and v by precision
CALLS = 10  # per repetition, so that one synchronization with the GPU is negligible


def measure(config: GPTConfig, batch_size: int, hardware: Hardware, *, documents: bool = False) -> dict[str, float]:
    """Milliseconds, forward and backward, of each kernel that supports the attention of one block, fastest first.

    Args:
        batch_size: windows B per call.
        documents: the run uses a document mask.

    Returns:
        Milliseconds by kernel. Empty if there is no choice: not on CUDA, not `backend="fused"`, or a mask, a bias or
        attention dropout that not all kernels support.
    """
    masked = documents or config.window is not None and config.window < config.context_length or config.pos == "alibi"
    has_choice = hardware.accelerator == "cuda" and config.backend == "fused" and config.n_heads > 0
    if not has_choice or masked or config.attn_dropout > 0:
        return {}
    n_heads = (config.n_heads, config.kv_heads, config.kv_heads)
    shapes = [(batch_size, config.context_length, n, config.head_size) for n in n_heads]
    return compare(shapes, hardware, causal=config.causal)


def compare(shapes: list[tuple[int, int, int, int]], hardware: Hardware, *, causal: bool = True) -> dict[str, float]:
    """As `measure`, for q (B, T, H, D) and k, v (B, T, G, D), the memory layout that the projections produce."""
    options = {"dtype": DTYPES[hardware.precision], "device": hardware.accelerator}
    with torch.random.fork_rng(), torch.enable_grad():
        q, k, v = (torch.randn(shape, **options).requires_grad_() for shape in shapes)
        grad_output = torch.randn(shapes[0], **options).transpose(1, 2)  # (B, H, T, D)

    def work() -> None:
        for _ in range(CALLS):
            out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, backend="fused")
            torch.autograd.grad(out, (q, k, v), grad_output)

    times = {}
    for name, kernel in KERNELS.items():
        with sdpa_kernel(kernel), contextlib.suppress(RuntimeError):  # this shape, dtype or GPU is not supported
            times[name] = 1e3 * seconds(work, hardware) / CALLS
    return dict(sorted(times.items(), key=lambda item: item[1]))


@contextlib.contextmanager
def prefer(times: dict[str, float]) -> Iterator[None]:
    """Context manager: torch uses the first of these kernels that supports a call, then any other.

    Compiled code keeps the kernel that was preferred at compilation, so the preference is part of the key of torch's
    compilation cache.

    Args:
        times: as `measure` returns them; empty: no preference.
    """
    if not times:
        yield
        return
    names = [*times, *(name for name in KERNELS if name not in times)]
    tag = " ".join([torch.compiler.config.cache_key_tag, *names])  # the cached program does not name its kernel
    order = [KERNELS[name] for name in names] + [SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True), torch.compiler.config.patch(cache_key_tag=tag):  # pyright: ignore[reportAttributeAccessIssue] installed at run time
        yield
