"""2:4 weights: the stored values as a dense matrix of half the columns, and metadata in a tensor of its own."""

from __future__ import annotations

from torch import Tensor

from .coordinates import K_PANEL, code_fragment, meta_fragment, round_up

_PADDING_META = 0b0100  # positions 0 and 1: mma.sp wants them to increase even where all weights are zero


def pack_values(qweight: Tensor, in_features: int, num_bits: int) -> Tensor:
    """The canonical [N, K/2*bits/8] as fragments; padding is zero."""
    stored, padded = in_features // 2, round_up(in_features, K_PANEL) // 2
    return code_fragment(num_bits, qweight.device).pack(qweight, stored, padded, 1 << (num_bits - 1))


def unpack_values(weights: Tensor, out_features: int, in_features: int, num_bits: int) -> Tensor:
    """Undoes :func:`pack_values`."""
    return code_fragment(num_bits, weights.device).unpack(weights, out_features, in_features // 2)


def pack_meta(meta: Tensor, in_features: int) -> Tensor:
    """The canonical [N, ceil(K/8)] nibbles as fragments."""
    quads, padded = in_features // 4, round_up(in_features, K_PANEL) // 4
    return meta_fragment(meta.device).pack(meta, quads, padded, _PADDING_META)


def unpack_meta(fragments: Tensor, out_features: int, in_features: int) -> Tensor:
    """Undoes :func:`pack_meta`."""
    return meta_fragment(fragments.device).unpack(fragments, out_features, in_features // 4)
