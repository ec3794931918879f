"""What importers share: integers out of 32-bit words, groups of other sizes, 2:4 weights found in dense ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..packed import PackedWeight, unpack_nibbles
from ..scheme import GROUP_SIZES, NUM_BITS, SCALE_DTYPES, Scheme

WEIGHT_FLOATS = SCALE_DTYPES
_GROUPS = GROUP_SIZES[:0:-1]  # the largest first


def check_bits(bits: object) -> int:
    """Raises ValueError for a number of bits that the canonical form does not have."""
    if type(bits) is not int or bits not in NUM_BITS:
        raise ValueError(
            f"{bits!r}-bit weights cannot be held: this library has 4 and 8 bits. Quantize the original model anew, "
            "for example with: sparse-marlin compress MODEL OUT --bits 4"
        )
    return bits


def unpack_words(words: Tensor, num_bits: int) -> Tensor:
    """[R, C * 32 / num_bits] uint8 integers from [R, C] int32 words, those in the low bits first."""
    data = as_type(words, torch.uint8)
    return unpack_nibbles(data, 2 * data.shape[1]) if num_bits == 4 else data


def as_type(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of the rows of a matrix as another type."""
    # Through one dimension: the strides of a single row or column may be anything, and view would refuse them.
    return t.reshape(-1).view(dtype).view(t.shape[0], -1)


def canonical_group(in_features: int, group_size: int) -> int:
    """The group size of the canonical form in which groups of ``group_size`` columns can be held exactly.

    A group of 256 columns is two of 128 with the same scale, and so on. Groups start at column 0; the last one may be
    shorter.

    Raises:
        ValueError: if there is none.
    """
    if group_size == -1 or group_size >= in_features:
        return -1
    for size in _GROUPS:
        if group_size % size == 0 and in_features % size == 0:
            return size
    raise ValueError(
        f"groups of {group_size} columns in rows of {in_features} cannot be held: this library has groups of "
        f"{', '.join(map(str, sorted(_GROUPS)))}. Quantize the original model anew with one of these"
    )


def num_groups(in_features: int, group_size: int) -> int:
    """Scales per output channel of a tool that lets the last group be shorter."""
    return 1 if group_size == -1 else -(-in_features // group_size)


def canonical(
    qweight: Tensor,
    scales: Tensor,
    in_features: int,
    num_bits: int,
    group_size: int,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
) -> PackedWeight:
    """A dense canonical weight with the same values, whatever the groups.

    Args:
        qweight: [N, K * num_bits / 8] uint8, as in :mod:`sparse_marlin.packed`.
        scales: [N, G] of the groups that the source has.
        group_size: columns of a group of the source, -1 for all.
        zero_point: [N, G] uint8, or None where all are the zero code.
        g_idx: [K] integers, the group of each column in the source, or None where groups are runs of columns.

    Raises:
        ValueError: if the canonical form cannot hold it, or ``g_idx`` names groups that do not exist.
    """
    k, size = in_features, canonical_group(in_features, group_size)
    source_width = k if group_size == -1 else group_size
    if zero_point is not None and bool((zero_point == 1 << (num_bits - 1)).all()):
        zero_point = None
    scheme = Scheme(num_bits, size, None, zero_point is None, scales.dtype)
    columns = torch.arange(k)
    if g_idx is not None:
        g_idx = g_idx.long()
        if not bool(((g_idx >= 0) & (g_idx < scales.shape[1])).all()):
            raise ValueError(f"g_idx names a group outside 0..{scales.shape[1] - 1}")
        if torch.equal(g_idx, columns // source_width) or size == -1:
            g_idx = None
    if size != -1 and (size != source_width or k % source_width):
        parts = source_width // size
        if g_idx is None:
            source = torch.arange(k // size) * size // source_width
        else:
            counts = g_idx.bincount(minlength=scales.shape[1])
            if k % source_width or not bool((counts == source_width).all()):
                raise ValueError(
                    f"g_idx does not give each group {source_width} columns: groups of {size} cannot replace them"
                )
            order = g_idx.argsort(stable=True)
            g_idx = torch.empty_like(g_idx).scatter_(0, order, columns // size)
            source = torch.arange(k // size) // parts
        scales = scales[:, source]
        zero_point = None if zero_point is None else zero_point[:, source]
    return PackedWeight(
        scheme,
        k,
        qweight.contiguous(),
        scales.contiguous(),
        None,
        None if zero_point is None else zero_point.contiguous(),
        None if g_idx is None else g_idx.int(),
    )


def keep_24(packed: PackedWeight) -> PackedWeight:
    """The same weight stored as 2:4 where no four columns hold more than two integers other than zero's.

    It is then smaller and faster, and not one value differs.
    """
    s = packed.scheme
    if s.sparsity is not None or not s.symmetric or packed.g_idx is not None or packed.in_features % 4:
        return packed
    first = replace(packed, qweight=packed.qweight[:16], scales=packed.scales[:16])
    for part in (first, packed):  # most weights are recognised as dense by a few rows
        codes, _ = part.unpack()
        mask = mask_24(codes != s.zero_code)
        if mask is None:
            return packed
    return PackedWeight.pack(codes, packed.scales, replace(s, sparsity="2:4"), mask)


def mask_24(nonzero: Tensor) -> Tensor | None:
    """A mask that keeps exactly two of each four columns and all that are true; None if there is none.

    Args:
        nonzero: [N, K] bool.
    """
    quads = nonzero.reshape(-1, 4)
    if bool((quads.sum(1) > 2).any()):
        return None
    # Ties in a stable sort go to the first columns, so that the mask depends on the weights alone.
    kept = quads.byte().sort(dim=1, descending=True, stable=True).indices[:, :2]
    return torch.zeros_like(quads).scatter_(1, kept, True).view(nonzero.shape)
