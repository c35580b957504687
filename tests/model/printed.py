"""Inputs and checks that the worked examples share."""

import torch
from torch import Tensor

# "Your journey starts with one step", each word in three numbers (Raschka 2024, section 3.3.1)
INPUTS = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]


def assert_prints_as(actual: Tensor, printed, *, tolerance: float = 0.5e-4) -> None:
    """Same shape and equal to the printed decimals: four by default. 1.5e-4 also allows another last digit."""
    expected = torch.tensor(printed, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert torch.equal(actual.isinf(), expected.isinf())
    error = (actual - expected).masked_fill(expected.isinf(), 0.0).abs().max().item()
    assert error <= tolerance, f"largest difference {error:.2g}, allowed {tolerance:.2g}"  # a NaN fails as well
