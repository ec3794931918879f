"""A weight in the form that the kernels read, made from the canonical form for the GPU at hand and never saved.

``csrc/common/layout.h`` draws the order of codes, metadata and scales. This module derives it from the same
coordinates: which row and column each bit of a lane's registers belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .packed import PackedWeight, pack_nibbles, unpack_nibbles
from .scheme import Scheme

FORM_NAMES = ("weights", "meta", "scales", "row_scales", "perm")

PANEL_ROWS = 128  # N is padded to a multiple of this, and K to one of K_PANEL
K_PANEL = 256
_FRAGMENT_ROWS = 16
_QUADS = 16  # columns of a metadata fragment, in quads
_PADDING_META = 0b0100  # positions 0 and 1: mma.sp wants them to increase even where all scales are zero
# A code in a 16-bit register is a subnormal number, this power of two times the integer; scales undo it.
_UNIT = {torch.float16: -24, torch.bfloat16: -133}
# The largest scale of a row is brought just below this power of two, a factor of two from infinity.
_TOP = {torch.float16: 15, torch.bfloat16: 127}
_CHUNK = 1 << 24  # integers that are unpacked at once


@dataclass(frozen=True)
class KernelWeight:
    """The tensors of one weight [N, K] in kernel form.

    Attributes:
        weights: uint8, fragments of codes.
        meta: uint8, fragments of 2:4 metadata, or None.
        scales: normalised scales in the dtype of the inputs, with the bits of zero points beside them if there are any.
        row_scales: [N, padded] float32, the power of two per row that undoes the normalisation.
        perm: [K] int32, the order in which the columns of the inputs are taken (activation order), or None.
    """

    scheme: Scheme
    out_features: int
    in_features: int
    weights: Tensor
    meta: Tensor | None
    scales: Tensor
    row_scales: Tensor
    perm: Tensor | None

    @staticmethod
    def why_not(packed: PackedWeight) -> str | None:
        """Why a weight has no kernel form, or None."""
        if packed.g_idx is None:
            return None
        columns = torch.bincount(packed.g_idx, minlength=packed.scales.shape[1])
        width = packed.scheme.group_width(packed.in_features)
        if bool((columns == width).all()):
            return None
        return f"its groups have {int(columns.min())} to {int(columns.max())} columns; the kernels need {width} in each"

    @classmethod
    def prepare(cls, packed: PackedWeight, dtype: torch.dtype) -> KernelWeight:
        """The kernel form of a weight, on its device, for inputs of ``dtype`` (float16 or bfloat16)."""
        s, n, k = packed.scheme, packed.out_features, packed.in_features
        perm = None
        if packed.g_idx is not None and bool((packed.g_idx.diff() < 0).any()):
            perm = packed.g_idx.argsort(stable=True).to(torch.int32)
        stored = k // 2 if s.sparsity else k

        def codes(rows: slice) -> Tensor:
            q = packed.qweight[rows]
            q = q if s.num_bits == 8 else unpack_nibbles(q, stored)
            return q if perm is None else q[:, perm]

        fragments = _code_order(s.num_bits, packed.device)
        weights = _to_fragments(codes, n, _round_up(k, K_PANEL) * stored // k, fragments, s.num_bits, 0)
        meta = None
        if (canonical := packed.meta) is not None:
            fragments = _meta_order(packed.device)
            quads = _round_up(k, K_PANEL) // 4
            meta = _to_fragments(
                lambda rows: unpack_nibbles(canonical[rows], k // 4), n, quads, fragments, 4, _PADDING_META
            )
        scales, row_scales = _scales(packed, dtype)
        return cls(s, n, k, weights, meta, scales, row_scales, perm)

    def restore(self) -> tuple[Tensor, Tensor | None]:
        """The canonical ``qweight`` and ``meta``, bit for bit."""
        s, n, k = self.scheme, self.out_features, self.in_features
        stored = k // 2 if s.sparsity else k
        inverse = None if self.perm is None else self.perm.argsort()
        device = self.weights.device

        def pack(codes: Tensor) -> Tensor:
            codes = codes[:, :stored] if inverse is None else codes[:, inverse]
            return codes if s.num_bits == 8 else pack_nibbles(codes)

        qweight = _from_fragments(self.weights, n, _code_order(s.num_bits, device), s.num_bits, pack)
        if self.meta is None:
            return qweight, None
        return qweight, _from_fragments(self.meta, n, _meta_order(device), 4, lambda q: pack_nibbles(q[:, : k // 4]))

    def multiply(self, x: Tensor, bias: Tensor | None, plan: str) -> Tensor:
        """``x @ w.T + bias`` on the GPU, by the kernels that ``plan`` names (see :func:`sparse_marlin.dispatch.plan`).

        Args:
            x: [..., K] in the dtype of the scales, any strides.
            bias: [N] in that dtype, or None.
        """
        s = self.scheme
        y: Tensor = torch.ops.sparse_marlin.gemm(
            x,
            self.weights,
            self.meta,
            self.scales,
            self.row_scales,
            self.perm,
            bias,
            self.out_features,
            s.num_bits,
            s.group_size,
            not s.symmetric,
            plan,
        )
        return y


def code_coordinate(num_bits: int, lane: int, word: int, index: int) -> tuple[int, int]:
    """Row and stored column, within a fragment, of code number ``index`` in a word of a lane's four."""
    g, t = divmod(lane, 4)
    step = word if num_bits == 4 else word // 2  # instruction
    reg = index % 4 if num_bits == 4 else 2 * (word % 2) + index % 2  # of the four that it takes
    half = index // 4 if num_bits == 4 else index // 2  # of that register
    return 2 * g + reg % 2, 16 * step + 8 * (reg // 2) + 2 * t + half


def meta_coordinate(lane: int, index: int) -> tuple[int, int]:
    """Row and quad, within a fragment, of nibble number ``index`` in a lane's word of metadata."""
    g, t = divmod(lane, 4)
    return 2 * g + index // 4, 8 * (t // 2) + 4 * (t % 2) + index % 4


@cache
def _code_order(num_bits: int, device: torch.device) -> Tensor:
    """For each code of a fragment, in the order of memory, its place in the fragment's rows one after the other."""
    per_word = 32 // num_bits
    columns = 32 * 4 * per_word // _FRAGMENT_ROWS
    places = [
        code_coordinate(num_bits, lane, word, i) for lane in range(32) for word in range(4) for i in range(per_word)
    ]
    return torch.tensor([row * columns + column for row, column in places], device=device)


@cache
def _meta_order(device: torch.device) -> Tensor:
    places = [meta_coordinate(lane, i) for lane in range(32) for i in range(8)]
    return torch.tensor([row * _QUADS + quad for row, quad in places], device=device)


def _to_fragments(
    values: Callable[[slice], Tensor], n: int, columns: int, order: Tensor, num_bits: int, padding: int
) -> Tensor:
    """Arranges a matrix, of which ``values`` gives the rows [r, <= columns] in uint8, to [panels, -1] bytes."""
    panels, width = -(-n // PANEL_ROWS), order.numel() // _FRAGMENT_ROWS
    out = torch.empty(panels, PANEL_ROWS * columns * num_bits // 8, dtype=torch.uint8, device=order.device)
    step = max(1, _CHUNK // (PANEL_ROWS * columns))
    for p in range(0, panels, step):
        v = values(slice(p * PANEL_ROWS, (p + step) * PANEL_ROWS))
        count = min(step, panels - p)
        v = torch.nn.functional.pad(v, (0, columns - v.shape[1], 0, count * PANEL_ROWS - v.shape[0]), value=padding)
        v = v.view(count, -1, _FRAGMENT_ROWS, columns // width, width).permute(0, 3, 1, 2, 4)
        v = v.reshape(-1, order.numel())[:, order]
        out[p : p + count] = (v if num_bits == 8 else pack_nibbles(v)).view(count, -1)
    return out


def _from_fragments(
    fragments: Tensor, n: int, order: Tensor, num_bits: int, pack: Callable[[Tensor], Tensor]
) -> Tensor:
    """Undoes :func:`_to_fragments`; ``pack`` turns rows of integers, still padded, into what is to be returned."""
    panels, size = fragments.shape
    columns, width = size * 8 // num_bits // PANEL_ROWS, order.numel() // _FRAGMENT_ROWS
    inverse = order.argsort()
    step = max(1, _CHUNK // (PANEL_ROWS * columns))
    parts = []
    for p in range(0, panels, step):
        v = fragments[p : p + step]
        count = v.shape[0]
        v = v if num_bits == 8 else unpack_nibbles(v, 2 * size)
        v = v.reshape(-1, order.numel())[:, inverse].view(count, columns // width, -1, _FRAGMENT_ROWS, width)
        parts.append(pack(v.permute(0, 2, 3, 1, 4).reshape(count * PANEL_ROWS, columns)[: n - p * PANEL_ROWS]))
    return torch.cat(parts)


def _scales(packed: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    s, n = packed.scheme, packed.out_features
    groups = 1 if s.group_size == -1 else _round_up(packed.in_features, K_PANEL) // s.group_size
    rows = _round_up(n, PANEL_ROWS)

    def pad(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, groups - t.shape[1], 0, rows - n))

    scales = pad(packed.scales.double())
    # INT4 codes of odd rows sit four bits higher in their register: they are sixteen times as large.
    shift = torch.arange(rows, device=scales.device) % 2 * (4 if s.num_bits == 4 else 0)
    exponent = _TOP[dtype] - torch.frexp(scales.abs().amax(1)).exponent
    scales = torch.ldexp(scales, exponent.unsqueeze(1)).to(dtype)
    row_scales = torch.ldexp(torch.ones_like(shift, dtype=torch.float64), -(exponent + _UNIT[dtype] + shift)).float()
    scales = scales.view(-1, PANEL_ROWS // 2, 2, groups).permute(0, 3, 1, 2)  # panel, group, row pair, row
    if packed.zero_point is not None:
        zero = pad(packed.zero_point.to(torch.int16)) << shift.unsqueeze(1)
        zero = zero.to(torch.int16).view(-1, PANEL_ROWS // 2, 2, groups).permute(0, 3, 1, 2)
        scales = torch.cat([scales.view(torch.int16), zero], 3).view(dtype)
    return scales.contiguous(), row_scales


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
