"""The codes of dense weights, and activation order: columns sorted so that each group is a run of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .coordinates import K_PANEL, code_fragment, round_up


def pack_codes(qweight: Tensor, in_features: int, num_bits: int, perm: Tensor | None) -> Tensor:
    """The canonical [N, K*bits/8] as fragments, columns in the order of ``perm``.

    Padding has the code that is zero in a symmetric scheme; in any scheme its scale, or the x it meets, is zero.
    """
    fragment = code_fragment(num_bits, qweight.device)
    return fragment.pack(qweight, in_features, round_up(in_features, K_PANEL), 1 << (num_bits - 1), perm)


def unpack_codes(weights: Tensor, out_features: int, in_features: int, num_bits: int, perm: Tensor | None) -> Tensor:
    """Undoes :func:`pack_codes`."""
    return code_fragment(num_bits, weights.device).unpack(weights, out_features, in_features, perm)


def perm_of(g_idx: Tensor) -> Tensor | None:
    """[K] int64, the columns sorted by group and otherwise in order; None where they are already."""
    return g_idx.argsort(stable=True) if bool((g_idx.diff() < 0).any()) else None


def g_idx_of(perm: Tensor, group_width: int) -> Tensor:
    """Undoes :func:`perm_of` for groups of ``group_width`` columns: [K] int32."""
    sorted_g_idx = runs(perm.numel(), group_width, perm.device)
    return torch.empty_like(sorted_g_idx).scatter_(0, perm, sorted_g_idx)


def runs(in_features: int, group_width: int, device: torch.device) -> Tensor:
    """[K] int32, the group of each column where groups are runs of columns."""
    return torch.arange(in_features, dtype=torch.int32, device=device) // group_width
