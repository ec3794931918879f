"""Which row and column each number of a prepared weight belongs to: the twin of ``csrc/common/layout.h``.

A *fragment* is 16 rows of a weight, and as many columns as fill 32 lanes x 16 bytes with codes: the registers that a
warp hands to mma as operand A (PTX ISA, "Matrix fragments for mma.m16n8k16"). Of an instruction, lane 4 g + t holds

    ================  ==================  ==================
    row               k = 2 t, 2 t + 1    2 t + 8, 2 t + 9
    ================  ==================  ==================
    g: logical 2 g    register 0          register 2
    g + 8: 2 g + 1    register 1          register 3
    ================  ==================  ==================

so that a lane owns two neighbouring output features, and stores them together. Of a 2:4 weight, k counts the stored
values, two per quad of columns; its metadata has fragments of its own, 16 rows x 16 quads, a 32-bit word per lane.

Both kinds of fragment are lists of places in a small matrix; rearranging a weight is one gather by such a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..packed import pack_nibbles, unpack_nibbles

PANEL_ROWS = 128  # a prepared weight has whole panels of rows
K_PANEL = 256  # and K rounded up to a multiple of this
FRAGMENT_ROWS = 16

_CHUNK = 1 << 24  # numbers that are rearranged at once, for about six bytes of temporary memory each


def code_coordinates(num_bits: int) -> tuple[Tensor, Tensor]:
    """Row and stored column, within a fragment, of each code.

    Returns:
        Two int64 tensors [32 lanes, 4 words, 32 / num_bits]. Code i of a word is in the bits from num_bits * i; the two
        of a 16-bit pair are half a word apart, so that one mask picks both.
    """
    lane, word, index = _axes(32, 4, 32 // num_bits)
    if num_bits == 4:
        instruction, register, half = word, index % 4, index // 4
    else:
        instruction, register, half = word // 2, 2 * (word % 2) + index % 2, index // 2
    g, t = lane // 4, lane % 4
    rows, columns = torch.broadcast_tensors(2 * g + register % 2, 16 * instruction + 8 * (register // 2) + 2 * t + half)
    return rows, columns


def meta_coordinates() -> tuple[Tensor, Tensor]:
    """Row and quad of columns, within a fragment of metadata, that each nibble describes.

    Lanes with t = 0, 1 serve the first 32 of the 64 columns, those with t = 2, 3 the others (PTX ISA, "Sparsity
    selector").

    Returns:
        Two int64 tensors [32 lanes, 1 word, 8]. Nibble i of a word is in the bits from 4 i.
    """
    lane, _, index = _axes(32, 1, 8)
    g, t = lane // 4, lane % 4
    rows, quads = torch.broadcast_tensors(2 * g + index // 4, 8 * (t // 2) + 4 * (t % 2) + index % 4)
    return rows, quads


def row_shift(num_bits: int, row: Tensor) -> Tensor:
    """By how many bits the codes of a row sit higher in the registers that the kernels mask them out of."""
    return row % 2 * (4 if num_bits == 4 else 0)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def num_panels(out_features: int) -> int:
    return round_up(out_features, PANEL_ROWS) // PANEL_ROWS


@dataclass(frozen=True)
class Fragment:
    """A tile of small integers, 16 rows x ``width``, that is stored in the order of registers.

    Attributes:
        num_bits: of an integer, 4 or 8; bytes hold nibbles low one first.
        order: int64 [16 * width]: for each integer in the order of memory, its place in the tile, row after row.
        inverse: the inverse permutation.
    """

    num_bits: int
    order: Tensor
    inverse: Tensor

    @property
    def width(self) -> int:
        return self.order.numel() // FRAGMENT_ROWS

    @property
    def nbytes(self) -> int:
        return self.order.numel() * self.num_bits // 8

    def pack(self, rows: Tensor, count: int, padded_count: int, padding: int, perm: Tensor | None = None) -> Tensor:
        """Rearranges rows of integers into fragments.

        Args:
            rows: [N, ceil(count * num_bits / 8)] uint8, ``count`` integers per row in order.
            padded_count: how many integers a row shall have, a multiple of ``width``.
            padding: the integer that fills up rows, and whole rows to a multiple of 128.
            perm: [count] int64, the order in which to take a row's integers, or None.

        Returns:
            [ceil(N / 128), padded_count / width, 8, nbytes] uint8: panels of rows, then runs of columns, then the eight
            fragments below each other.
        """
        panels = num_panels(rows.shape[0])
        shape = (panels, padded_count // self.width, PANEL_ROWS // FRAGMENT_ROWS, self.nbytes)
        out = torch.empty(shape, dtype=torch.uint8, device=rows.device)
        for chunk in _chunks(panels, padded_count):
            part = out[chunk]
            v = rows[chunk.start * PANEL_ROWS : chunk.stop * PANEL_ROWS]
            v = unpack_nibbles(v, count) if self.num_bits == 4 else v
            v = v if perm is None else _take(v, perm)
            missing = (0, padded_count - count, 0, part.shape[0] * PANEL_ROWS - v.shape[0])
            v = torch.nn.functional.pad(v, missing, value=padding) if any(missing) else v
            v = v.view(part.shape[0], -1, FRAGMENT_ROWS, shape[1], self.width).permute(0, 3, 1, 2, 4)
            v = _take(v.reshape(-1, self.order.numel()), self.order)
            part.copy_((pack_nibbles(v) if self.num_bits == 4 else v).view(part.shape))
        return out

    def unpack(self, fragments: Tensor, out_features: int, count: int, perm: Tensor | None = None) -> Tensor:
        """Undoes :meth:`pack`; padding is dropped.

        Returns:
            [out_features, ceil(count * num_bits / 8)] uint8, a last byte that is not full being padded with zero bits.
        """
        inverse = None if perm is None else perm.argsort()
        panels, runs = fragments.shape[:2]
        shape = (out_features, -(-count * self.num_bits // 8))
        out = torch.empty(shape, dtype=torch.uint8, device=fragments.device)
        for chunk in _chunks(panels, runs * self.width):
            part = out[chunk.start * PANEL_ROWS : chunk.stop * PANEL_ROWS]
            v = fragments[chunk].reshape(-1, self.nbytes)
            v = unpack_nibbles(v, self.order.numel()) if self.num_bits == 4 else v
            v = _take(v, self.inverse).view(-1, runs, PANEL_ROWS // FRAGMENT_ROWS, FRAGMENT_ROWS, self.width)
            v = v.permute(0, 2, 3, 1, 4).reshape(-1, runs * self.width)[: part.shape[0], :count]
            v = v if inverse is None else _take(v, inverse)
            part.copy_(pack_nibbles(v) if self.num_bits == 4 else v)
        return out


@cache
def code_fragment(num_bits: int, device: torch.device) -> Fragment:
    """The fragments of codes: 64 columns wide for 4 bits, 32 for 8; stored columns, where a weight is 2:4."""
    return _fragment(num_bits, code_coordinates(num_bits), device)


@cache
def meta_fragment(device: torch.device) -> Fragment:
    """The fragments of 2:4 metadata, 16 quads wide."""
    return _fragment(4, meta_coordinates(), device)


def _fragment(num_bits: int, coordinates: tuple[Tensor, Tensor], device: torch.device) -> Fragment:
    rows, columns = coordinates
    order = (rows * (rows.numel() // FRAGMENT_ROWS) + columns).flatten().to(device)
    return Fragment(num_bits, order, order.argsort())


def _axes(lanes: int, words: int, indices: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three indices of a number in a fragment, to broadcast with each other."""
    lane, word, index = (torch.arange(count, device="cpu") for count in (lanes, words, indices))
    return lane.view(-1, 1, 1), word.view(1, -1, 1), index.view(1, 1, -1)


def _take(v: Tensor, order: Tensor) -> Tensor:
    """v[:, order]; as a gather it is several times faster than that on a CPU."""
    return v.gather(1, order.expand(v.shape[0], -1))


def _chunks(panels: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK // (PANEL_ROWS * columns))
    return [slice(first, min(first + step, panels)) for first in range(0, panels, step)]
