"""The rotary table and rotation against literal arrays, complex products and their defining properties."""

import math

import pytest
import torch

from tests.conftest import assert_close
from tril.model.rope import rope_table, rotate


def test_the_table_equals_a_literal_array():
    cos, sin = rope_table(3, 4, base=100.0)  # frequencies 1 and 0.1
    assert_close(cos, torch.tensor([[1.0, 1.0], [0.5403023, 0.9950042], [-0.4161468, 0.9800666]]), roundings=1)
    assert_close(sin, torch.tensor([[0.0, 0.0], [0.8414710, 0.0998334], [0.9092974, 0.1986693]]), roundings=1)


def test_far_positions_keep_full_precision():
    cos, sin = rope_table(100_001, 6)
    assert cos.dtype == sin.dtype == torch.float32
    angles = [100_000 * 10_000 ** (-i / 3) for i in range(3)]  # in float32 the cosine would be wrong by 0.0005
    assert_close(cos[-1], torch.tensor([math.cos(angle) for angle in angles]), roundings=1)
    assert_close(sin[-1], torch.tensor([math.sin(angle) for angle in angles]), roundings=1)


def test_rotation_equals_a_complex_product():
    x = torch.randn(2, 3, 5, 8)
    frequency = torch.tensor([10_000 ** -(i / 4) for i in range(4)])
    angle = torch.arange(5)[:, None] * frequency
    rotation = torch.polar(torch.ones_like(angle), angle)
    rotated = torch.complex(x[..., :4], x[..., 4:]) * rotation  # i is paired with i + D/2
    assert_close(rotate(x, *rope_table(5, 8)), torch.cat((rotated.real, rotated.imag), dim=-1), roundings=8)


def test_rotation_keeps_the_norm_and_position_0_unchanged():
    x = torch.randn(2, 3, 9, 8)
    y = rotate(x, *rope_table(9, 8))
    assert_close(y.norm(dim=-1), x.norm(dim=-1), roundings=8)
    assert torch.equal(y[:, :, 0], x[:, :, 0])
    assert (y[:, :, 1:] != x[:, :, 1:]).any(-1).all()


def test_the_product_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 1, 12, 16)  # the same vector at every position
    cos, sin = (t.double() for t in rope_table(12, 16))
    product = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-2, -1))[0, 0]  # (12, 12)
    for distance in range(-11, 12):
        diagonal = product.diagonal(distance)
        # the table is float32, so the distance is exact to float32 only
        assert (diagonal - diagonal[0]).abs().max() < 64 * torch.finfo(torch.float32).eps
    assert product.diagonal(1)[0] != product.diagonal(-1)[0]


def test_later_positions_use_a_slice_of_the_table():
    x = torch.randn(2, 3, 9, 8)
    cos, sin = rope_table(9, 8)
    assert torch.equal(rotate(x[:, :, 4:], cos[4:], sin[4:]), rotate(x, cos, sin)[:, :, 4:])


def test_rows_may_have_different_positions():
    x = torch.randn(2, 3, 4, 8)
    cos, sin = rope_table(9, 8)
    positions = torch.tensor([[0, 1, 2, 3], [5, 3, 8, 0]])
    rotated = rotate(x, cos[positions][:, None], sin[positions][:, None])
    for row in range(2):
        assert torch.equal(rotated[row], rotate(x, cos[positions[row]], sin[positions[row]])[row])


def test_result_has_the_dtype_of_the_input():
    assert rotate(torch.randn(1, 1, 3, 4, dtype=torch.bfloat16), *rope_table(3, 4)).dtype == torch.bfloat16


def test_the_table_is_on_the_given_or_default_device():
    assert {table.device.type for table in rope_table(3, 4, device="meta")} == {"meta"}
    with torch.device("meta"):
        assert {table.device.type for table in rope_table(3, 4)} == {"meta"}
        assert {table.device.type for table in rope_table(3, 4, device="cpu")} == {"cpu"}


def test_an_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        rope_table(3, 5)
