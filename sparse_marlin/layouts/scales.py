"""Scales and zero points beside the codes, normalised row by row so that 16-bit arithmetic on them is exact.

The kernels read a code in place, as a subnormal 16-bit number: the integer v is v * 2 ** UNIT, or 16 times that in rows
whose codes sit four bits higher (``row_shift``). The scale that they multiply it with holds the inverse: 2 ** 24 times
the weight's scale in float16, which would often be infinite. Hence each row is multiplied by the largest power of two
that keeps its scales finite, and ``row_scales`` takes that back from the finished sum:

    stored = scale * 2 ** (e - UNIT - row_shift)        row_scales = 2 ** -e

A power of two costs a scale no bits, subnormal ones included, and :func:`unpack_scales` returns what
:func:`pack_scales` got. There are two exceptions. Scales with more bits than the kernel's dtype (float16 has 11,
bfloat16 has 8) are rounded to it, once. And a scale that is smaller than the largest of its row by more than the range
of the kernel's dtype loses bits, or all of them: of scales that came in float16 themselves, only those below 2 ** -10
in a row of INT4 codes with another of at least 2 ** 12.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .coordinates import PANEL_ROWS, num_panels, row_shift

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def scale_limit(dtype: torch.dtype) -> float:
    """Scales have to be below this, so that ``row_scales`` is a finite float32: 2 ** 119 or, in bfloat16, 2 ** 122."""
    return math.ldexp(1.0, 127 + _top(dtype) + _unit(dtype))


def pack_scales(
    scales: Tensor, zero_point: Tensor | None, num_bits: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Normalises and interleaves.

    Args:
        scales: [N, G], any floating-point type.
        zero_point: [N, G] uint8 or None.
        groups: number of groups with padding, at least G; padding has scale 0.
        dtype: float16 or bfloat16.

    Returns:
        ``scales``, [ceil(N / 128), groups, 64, 2 or 4] in ``dtype``: of each pair of rows two scales and, if there are
        any, the bits of two zero points, shifted as the codes are. And ``row_scales``, [N rounded up to 128] float32.
    """
    row = torch.arange(num_panels(scales.shape[0]) * PANEL_ROWS, device=scales.device)
    shift = row_shift(num_bits, row)

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, groups - t.shape[1], 0, row.numel() - t.shape[0]))

    exact = padded(scales.double())
    largest = exact.abs().amax(1)
    unit = _unit(dtype)
    exponent = _top(dtype) - torch.frexp(largest).exponent.long()
    exponent -= (largest * _power_of_two(exponent) > torch.finfo(dtype).max).long()  # more mantissa than dtype has
    exponent = exponent.where(largest > 0, -unit)  # row_scales is 1 in a row of zeros
    stored = (exact * _power_of_two(exponent - shift).unsqueeze(1)).to(dtype)
    row_scales = _power_of_two(-(exponent + unit)).float()
    parts = [_by_pairs(stored.view(torch.int16))]
    if zero_point is not None:
        parts.append(_by_pairs((padded(zero_point).long() << shift.unsqueeze(1)).to(torch.int16)))
    return torch.cat(parts, 3).contiguous().view(dtype), row_scales


def unpack_scales(
    stored: Tensor, row_scales: Tensor, out_features: int, groups: int, num_bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Undoes :func:`pack_scales`: [N, groups] scales in ``dtype``, and the zero points if there are any."""
    shift = row_shift(num_bits, torch.arange(row_scales.numel(), device=stored.device))
    # frexp gives 2 ** -e as 0.5 * 2 ** (1 - e).
    exponent = 1 - torch.frexp(row_scales.double()).exponent.long() - _unit(stored.dtype)
    bits = stored.view(torch.int16)
    scales = _by_rows(bits[..., :2]).view(stored.dtype).double() * _power_of_two(shift - exponent).unsqueeze(1)
    scales = scales[:out_features, :groups].to(dtype)
    if bits.shape[3] == 2:
        return scales, None
    zero_point = _by_rows(bits[..., 2:]) >> shift.unsqueeze(1)
    return scales, zero_point[:out_features, :groups].to(torch.uint8)


def _unit(dtype: torch.dtype) -> int:
    """Exponent of the smallest subnormal number."""
    info = torch.finfo(dtype)
    return math.frexp(info.smallest_normal * info.eps)[1] - 1


def _top(dtype: torch.dtype) -> int:
    """Exponent of the power of two above the largest number."""
    return math.frexp(torch.finfo(dtype).max)[1]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent as float64, by its bits: no library function is asked to be exact."""
    return (exponent + 1023 << 52).view(torch.float64)


def _by_pairs(t: Tensor) -> Tensor:
    """[rows, groups] as [panels, groups, 64 row pairs, 2]."""
    return t.view(-1, PANEL_ROWS // 2, 2, t.shape[1]).permute(0, 3, 1, 2)


def _by_rows(t: Tensor) -> Tensor:
    """[panels, groups, 64 row pairs, 2] as [rows, groups]."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])
