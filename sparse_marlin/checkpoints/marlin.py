"""Weights in the order of the Marlin kernels: dense ones, and 2:4 ones as Sparse-Marlin's, which are called Marlin-24.

With N output channels, K input columns and G groups, symmetric:

==========  ==================  ================  ==================================================
Marlin      Marlin-24           shape, dtype      content
==========  ==================  ================  ==================================================
``B``       ``B_24``            [K / 16, 2 N]     int32, 4 bits. Marlin-24: [K / 32, N * bits / 2]
            ``B_meta``          [K / 32, 2 N]     int16, positions of the kept weights
``s``       ``s``               [G, N]            float16
==========  ==================  ================  ==================================================

compressed-tensors calls those of Marlin-24 ``weight_packed``, ``meta`` and ``scale_packed``. A row of words covers 16
columns (2:4: stored columns). In it, 64 output channels follow each other, and in these the 32 lanes of a warp, each
with the integers that mma.m16n8k16 wants from it (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane 4 * a + t takes
k = 2 * t, 2 * t + 1, and both plus 8. The functions below are that map, from the outermost index to the innermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..packed import PackedWeight, pack_nibbles
from ..scheme import Scheme
from . import fields
from .reading import Expected, Format, Layout, Slot, StoredLayer
from .words import canonical_group, num_groups, unpack_words


def recognise(config: Mapping[str, Any]) -> bool:
    q = config.get("quantization_config") or {}
    return q.get("quant_method") in ("marlin", "gptq_marlin_24") or (
        q.get("quant_method") == "gptq"
        and (q.get("checkpoint_format") in ("marlin", "marlin_24") or q.get("is_marlin_format") is True)
    )


def read_config(config: Mapping[str, Any]) -> Layout:
    q = config["quantization_config"]
    sparse = q.get("checkpoint_format") == "marlin_24" or q["quant_method"] == "gptq_marlin_24"
    num_bits = fields.bits(q, "bits", default=4)
    if not sparse and num_bits != 4:
        raise ValueError(f"Marlin's own weights have 4 bits, got {num_bits}")
    if not fields.flag(q, "sym", True):
        raise ValueError("sym is false, but Marlin stores no zero points")
    if fields.flag(q, "desc_act", False):
        raise ValueError("desc_act is true, but Marlin stores no order of the columns")
    group_size = fields.choice({"group_size": fields.group_size(q, "group_size")}, "group_size", (-1, 128))

    def layer(slot: Slot) -> StoredLayer | None:
        if sparse:
            return stored_24(slot, num_bits, group_size) if slot.has("B_24", "B_meta", "s") else None
        return _stored(slot, group_size) if slot.has("B", "s") else None

    return Layout(layer)


def _stored(slot: Slot, group_size: int) -> StoredLayer:
    n, k = slot.out_features, slot.in_features
    _check_tiles(n, k, 16)
    groups = num_groups(k, group_size)
    tensors = {
        "B": Expected((k // 16, 2 * n), (torch.int32,)),
        "s": Expected((groups, n), (torch.float16,)),
    }
    scheme = Scheme(4, canonical_group(k, group_size), None)

    def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
        return from_marlin(stored["B"], stored["s"], scheme)

    return StoredLayer(n, k, scheme, tensors, decode)


def stored_24(
    slot: Slot,
    num_bits: int,
    group_size: int,
    names: tuple[str, str, str] = ("B_24", "B_meta", "s"),
    ungrouped_below: int = 0,
) -> StoredLayer:
    """How a Linear is stored as Marlin-24.

    Args:
        names: of the weights, the metadata and the scales.
        ungrouped_below: scales of groups are in plain order where K is at most this.
    """
    n, k = slot.out_features, slot.in_features
    _check_tiles(n, k, 32)
    groups = num_groups(k, group_size)
    weights, meta, scales = names
    tensors = {
        weights: Expected((k // 32, n * num_bits // 2), (torch.int32,)),
        meta: Expected((k // 32, 2 * n), (torch.int16,)),
        scales: Expected((groups, n), (torch.float16,)),
    }
    scheme = Scheme(num_bits, canonical_group(k, group_size), "2:4")

    def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
        in_order = scheme.group_size == -1 or k <= ungrouped_below
        rows = stored[scales].t() if in_order else scales_24(stored[scales])
        return from_marlin_24(stored[weights], stored[meta], rows, scheme)

    return StoredLayer(n, k, scheme, tensors, decode)


def _check_tiles(n: int, k: int, width: int) -> None:
    if n % 64 or k % width:
        raise ValueError(f"Marlin needs multiples of 64 output channels and {width} columns, got [{n}, {k}]")


def from_marlin(words: Tensor, scales: Tensor, scheme: Scheme) -> PackedWeight:
    """The canonical weight of Marlin's tensors.

    Args:
        words: ``B`` [K / 16, 2 N] int32.
        scales: ``s`` [G, N]. Of 64 channels, those of groups are stored as the transpose of a matrix of 8 x 8; scales
            per channel as the lanes of an accumulator need them: pairs of channels, 8 apart.
        scheme: dense, 4 bits.
    """
    tiles, n = words.shape[0], words.shape[1] // 2
    # k tile, 64 channels, a = channel % 8, t, 16 channels each, k % 2, channels 8 each, k // 8
    codes = unpack_words(words, 4).view(tiles, n // 64, 8, 4, 4, 2, 2, 2)
    codes = codes.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(n, tiles * 16)
    if scheme.group_size == -1:
        rows = scales.view(-1, n // 32, 4, 4, 2).transpose(2, 3)
    else:
        rows = scales.view(-1, n // 64, 8, 8).transpose(2, 3)
    return PackedWeight(scheme, tiles * 16, pack_nibbles(codes), rows.reshape(-1, n).t().contiguous())


def from_marlin_24(words: Tensor, meta: Tensor, scales: Tensor, scheme: Scheme) -> PackedWeight:
    """The canonical weight of Marlin-24's tensors.

    Args:
        words: ``B_24`` [K / 32, N * bits / 2] int32: as in Marlin, but of 64 channels, lane 4 * a + t has those with
            the numbers 8 * a + 4 * b + j: j is a word, b a pair of nibbles in it or, of 8 bits, a word of its own.
        meta: ``B_meta`` [K / 32, 2 N] int16: the bytes of a matrix [N, K / 16] with four quads per element, from the
            low bits up, in the order that CUTLASS gives to the metadata of sparse mma.
        scales: [N, G].
        scheme: 2:4.
    """
    tiles, n, bits = words.shape[0], words.shape[1] * 2 // scheme.num_bits, scheme.num_bits
    codes = unpack_words(words, bits)
    if bits == 4:  # k tile, 64 channels, a, t, j, k % 2, b, k // 8
        codes = codes.view(tiles, n // 64, 8, 4, 4, 2, 2, 2).permute(1, 2, 6, 4, 0, 7, 3, 5)
    else:  # k tile, 64 channels, a, t, j, b, k % 2, k // 8
        codes = codes.view(tiles, n // 64, 8, 4, 4, 2, 2, 2).permute(1, 2, 5, 4, 0, 7, 3, 6)
    codes = codes.reshape(n, tiles * 16)
    # pair of columns, 64 channels, then bits 1, 3-5 and 0 of the channel, the column of the pair, bit 2 of the channel
    quads = meta.view(tiles, n // 64, 2, 8, 2, 2, 2).permute(1, 3, 6, 2, 4, 0, 5).reshape(n, tiles * 2)
    qweight = pack_nibbles(codes) if bits == 4 else codes
    packed = PackedWeight(scheme, tiles * 32, qweight, scales.contiguous(), quads.contiguous().view(torch.uint8))
    packed.check_indices()
    return packed


def scales_24(scales: Tensor) -> Tensor:
    """[N, G] from ``s`` [G, N] of Marlin-24 with groups: of 8 channels, those that are 4 apart are stored as pairs."""
    g, n = scales.shape
    return scales.view(g, n // 8, 4, 2).transpose(2, 3).reshape(g, n).t()


FORMAT = Format("marlin", recognise, read_config)
