"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

q and k are rotated by an angle proportional to their position, so their product depends only on the distance between
them. Halves are paired (i with i + D/2), as in the published weights of the Llama family.
"""

import torch
from torch import Tensor

BASE = 10_000.0  # theta in the paper


def rope_table(
    length: int, head_dim: int, *, base: float = BASE, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/D), each (length, D/2) in float32; row p is position p.

    Raises:
        ValueError: an odd head size.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary position embeddings, which rotate pairs")
    device = torch.get_default_device() if device is None else device
    if torch.device(device).type == "meta":
        return torch.empty(length, head_dim // 2, device=device), torch.empty(length, head_dim // 2, device=device)
    # Computed on the CPU, because MPS has no float64.
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)  # (D/2,)
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequency  # (length, D/2)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, H, T, D) by the angles of its positions.

    Args:
        cos, sin: (T, D/2), or (B, 1, T, D/2) for positions per row.
    """
    first, second = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
