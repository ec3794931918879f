"""The canonical form of a compressed weight: what is stored, sharded, imported and exported.

Everything is row-major by output channel, so that a slice of rows, or of columns at a group border, is again a
canonical weight. Nothing here depends on a GPU; the layouts that kernels want are made from this form at load time.

With N = out_features, K = in_features, G = groups per row:

=============  =====================  =========================================================================
tensor         shape, dtype           content
=============  =====================  =========================================================================
``qweight``    [N, K*bits/8] uint8    dense: the integers of a row in order, low nibble first
               [N, K/2*bits/8] uint8  2:4: the two kept integers of each quad, in order
``meta``       [N, ceil(K/8)] uint8   2:4 only. A nibble per quad, low nibble first: bits 0-1 hold the position of
                                      the first kept weight in its quad, bits 2-3 that of the second (increasing).
                                      The order is the one that mma.sp takes (PTX ISA, "Sparse matrix storage").
``scales``     [N, G] float           w = (integer - zero) * scale
``zero_point`` [N, G] uint8           asymmetric only; otherwise zero = 2 ** (bits - 1)
``g_idx``      [K] int32              group of each column, only where groups are not runs of columns (act-order)
=============  =====================  =========================================================================

A row that does not fill its last byte is padded with zero bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .scheme import SCALE_DTYPES, Scheme

TENSOR_NAMES = ("qweight", "scales", "meta", "zero_point", "g_idx")

_CHUNK = 1 << 24  # weights handled at a time, bounds the temporary memory to a few times 16 M int32


@dataclass(frozen=True)
class PackedWeight:
    """One compressed weight matrix in canonical form. See the module's text for the tensors."""

    scheme: Scheme
    in_features: int
    qweight: Tensor
    scales: Tensor
    meta: Tensor | None = None
    zero_point: Tensor | None = None
    g_idx: Tensor | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @classmethod
    def pack(
        cls,
        codes: Tensor,
        scales: Tensor,
        scheme: Scheme,
        mask: Tensor | None = None,
        zero_point: Tensor | None = None,
        g_idx: Tensor | None = None,
    ) -> PackedWeight:
        """Packs integers.

        Args:
            codes: [N, K] uint8, each in ``0 .. 2 ** num_bits - 1``. Values under a pruned position are ignored.
            scales: [N, G], cast to ``scheme.dtype``.
            scheme: how to store it.
            mask: [N, K] bool, true where a weight is kept; exactly two per quad. Required for 2:4, else not allowed.
            zero_point: [N, G] uint8, for asymmetric schemes.
            g_idx: [K] int32 group of each column, dense schemes only.

        Raises:
            ValueError: if shapes, dtypes or values contradict the scheme.
        """
        if codes.dtype != torch.uint8 or codes.dim() != 2:
            raise ValueError(f"codes must be uint8 [N, K], got {codes.dtype} {list(codes.shape)}")
        if reason := scheme.why_not(*codes.shape):
            raise ValueError(reason)
        for name, t in (("scales", scales), ("mask", mask), ("zero_point", zero_point), ("g_idx", g_idx)):
            if t is not None and t.device != codes.device:
                raise ValueError(f"{name} is on {t.device}, codes on {codes.device}")
        if scheme.num_bits < 8 and codes.numel() and int(codes.max()) > scheme.max_code:
            raise ValueError(
                f"codes must be at most {scheme.max_code} for {scheme.num_bits} bits, got {int(codes.max())}"
            )
        if (mask is not None) != (scheme.sparsity is not None):
            raise ValueError("a mask belongs to a 2:4 scheme, and only to one")
        meta = None
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != codes.shape:
                raise ValueError(f"mask must be bool {list(codes.shape)}, got {mask.dtype} {list(mask.shape)}")
            qweight, meta = _pack_24(codes, mask, scheme.num_bits)
        else:
            qweight = _pack_dense(codes, scheme.num_bits)
        return cls(scheme, codes.shape[1], qweight, scales.to(scheme.dtype), meta, zero_point, g_idx)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], scheme: Scheme, in_features: int) -> PackedWeight:
        """Builds a weight from its named tensors (:data:`TENSOR_NAMES`), and checks them."""
        unknown = set(tensors) - set(TENSOR_NAMES)
        missing = {"qweight", "scales"} - set(tensors)
        if unknown or missing:
            raise ValueError(f"tensors of a packed weight: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return cls(scheme, in_features, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The named tensors that are present."""
        return {n: t for n in TENSOR_NAMES if (t := getattr(self, n)) is not None}

    def to(self, device: torch.device | str) -> PackedWeight:
        moved = {n: t.to(device) for n, t in self.tensors().items()}
        return PackedWeight.from_tensors(moved, self.scheme, self.in_features)

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """The integers [N, K] uint8 (the zero code where pruned) and, for 2:4, the mask [N, K] of kept weights."""
        codes = unpack_codes(self.qweight, self.meta, self.scheme.num_bits, self.in_features)
        return codes, None if self.meta is None else unpack_mask(self.meta, self.in_features)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K]: float32 product of integer and scale, rounded once to ``dtype`` (that of the scales)."""
        s = self.scheme
        return dequantize(
            self.qweight,
            self.scales,
            self.meta,
            self.zero_point,
            self.g_idx,
            s.num_bits,
            s.group_size,
            self.in_features,
            dtype or self.scales.dtype,
        )

    def check_indices(self) -> None:
        """Reads the 2:4 metadata and the group indices.

        Raises:
            ValueError: if a quad's positions do not increase, or a group index does not exist.
        """
        if self.meta is not None:
            nibbles = unpack_nibbles(self.meta, self.in_features // 4)
            if not _look_up(_tables(self.meta.device).valid_nibble, nibbles.int()).all():
                raise ValueError("meta holds a quad whose two positions do not increase")
        if self.g_idx is not None and not bool(((self.g_idx >= 0) & (self.g_idx < self.scales.shape[1])).all()):
            raise ValueError(f"g_idx names a group outside 0..{self.scales.shape[1] - 1}")

    def shard(self, dim: int, index: int, count: int) -> PackedWeight:
        """Part ``index`` of ``count`` equal parts along ``dim`` (0: output channels, 1: input columns), copied.

        Raises:
            ValueError: if the parts would be unequal or, along K, a border would fall inside a group; the text names
                the counts that are possible. Act-order weights have no column shards.
        """
        if dim not in (0, 1):
            raise ValueError(f"dim must be 0 (output channels) or 1 (input columns), got {dim!r}")
        size = self.out_features if dim == 0 else self.in_features
        unit = 1 if dim == 0 else self._column_unit()
        if unit is None:
            raise ValueError(
                "a weight with g_idx cannot be split along in_features: its groups are not runs of columns"
            )
        legal = [1] + [c for c in range(2, 65) if size % (unit * c) == 0]
        if (count != 1 and (count < 1 or size % (unit * count))) or not 0 <= index < count:
            raise ValueError(
                f"cannot take part {index} of {count} along dim {dim} of size {size}: possible counts {legal}"
            )
        new = {}
        for name, t in self.tensors().items():
            whole = name == "g_idx" or t.shape[dim] == 1  # one scale per channel belongs to every column shard
            new[name] = (t if whole else t.chunk(count, dim)[index]).clone()
        return PackedWeight.from_tensors(new, self.scheme, self.in_features // (count if dim == 1 else 1))

    def _column_unit(self) -> int | None:
        """Smallest number of columns that a shard may have."""
        if self.g_idx is not None:
            return None
        byte = 8 if self.scheme.sparsity else 8 // self.scheme.num_bits
        return byte if self.scheme.group_size == -1 else self.scheme.group_size


def dequantize(
    qweight: Tensor,
    scales: Tensor,
    meta: Tensor | None,
    zero_point: Tensor | None,
    g_idx: Tensor | None,
    num_bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """[N, K] weights of canonical tensors: the float32 product of integer and scale, rounded once to ``dtype``."""
    codes = unpack_codes(qweight, meta, num_bits, in_features)
    w = codes.float()
    n, k, g = w.shape[0], in_features, scales.shape[1]
    if g_idx is not None:
        columns = g_idx.long()
        zero = float(1 << (num_bits - 1)) if zero_point is None else zero_point[:, columns].float()
        return w.sub_(zero).mul_(scales[:, columns].float()).to(dtype)
    grouped = w.view(n, g, k // g)
    grouped.sub_(float(1 << (num_bits - 1)) if zero_point is None else zero_point.float().unsqueeze(2))
    return grouped.mul_(scales.float().unsqueeze(2)).view(n, k).to(dtype)


def unpack_codes(qweight: Tensor, meta: Tensor | None, num_bits: int, in_features: int) -> Tensor:
    """[N, K] uint8 integers of canonical tensors; the zero code where 2:4 pruned."""
    if meta is None:
        return qweight[:, :in_features].clone() if num_bits == 8 else unpack_nibbles(qweight, in_features)
    nibbles = unpack_nibbles(meta, in_features // 4).int()
    tables = _tables(qweight.device)
    if num_bits == 4:  # one look-up turns (positions, two codes) into the four bytes of the quad
        return _look_up(tables.quads, nibbles.bitwise_left_shift_(8).bitwise_or_(qweight.int())).view(torch.uint8)
    first, second = _look_up(tables.first, nibbles), _look_up(tables.second, nibbles)
    pair = qweight.view(torch.int16).int()
    quad = torch.full_like(pair, -0x7F7F7F80)  # 0x80 in all four bytes
    # XOR with the zero code first, so that one more XOR puts the code in place of it.
    quad ^= ((pair & 0xFF) ^ 0x80) << first
    quad ^= (((pair >> 8) & 0xFF) ^ 0x80) << second
    return quad.view(torch.uint8)


def unpack_mask(meta: Tensor, in_features: int) -> Tensor:
    """[N, K] bool, true where 2:4 kept a weight."""
    nibbles = unpack_nibbles(meta, in_features // 4).int()
    return _look_up(_tables(meta.device).masks, nibbles).view(torch.bool)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    # Several times faster than table[index] on a CPU.
    return table.index_select(0, index.view(-1)).view(index.shape)


def _pack_dense(codes: Tensor, num_bits: int) -> Tensor:
    if num_bits == 8:
        return codes.clone()
    return pack_nibbles(codes)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[N, ceil(count / 2)] bytes, low nibble first, from [N, count] uint8 below 16."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = _plain(codes).view(torch.int16)  # first | second << 8
    return (pairs | pairs >> 4).to(torch.uint8)


def _plain(t: Tensor) -> Tensor:
    """Contiguous with the usual strides; a single row counts as contiguous with any, and could not be viewed."""
    return t.contiguous().view(-1).view(t.shape)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """[N, count] uint8 from two nibbles a byte."""
    b = packed.to(torch.int16)
    b = (b | b << 4) & 0x0F0F  # low nibble in the low byte, high nibble in the high byte
    out = b.view(torch.uint8)
    return out if out.shape[1] == count else out[:, :count].contiguous()


def _pack_24(codes: Tensor, mask: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    n, k = codes.shape
    quads = k // 4
    tables = _tables(codes.device)
    qweight = torch.empty(n, quads * num_bits // 4, dtype=torch.uint8, device=codes.device)
    meta = torch.empty(n, (quads + 1) // 2, dtype=torch.uint8, device=codes.device)
    rows = max(1, _CHUNK // k)
    codes, mask = _plain(codes), _plain(mask)
    bad = torch.zeros((), dtype=torch.bool, device=codes.device)
    for i in range(0, n, rows):
        kept = mask[i : i + rows].view(torch.int32)  # a byte of 0 or 1 per weight
        kept = (kept | kept >> 7 | kept >> 14 | kept >> 21) & 15
        nibble = _look_up(tables.nibbles, kept)
        bad |= (nibble == 0).any()
        value = codes[i : i + rows].view(torch.int32)
        first = value >> _look_up(tables.first, nibble)
        second = value >> _look_up(tables.second, nibble)
        if num_bits == 4:
            qweight[i : i + rows] = (first & 15) | (second & 15) << 4
        else:
            qweight[i : i + rows] = ((first & 0xFF) | (second & 0xFF) << 8).to(torch.int16).view(torch.uint8)
        meta[i : i + rows] = pack_nibbles(nibble.to(torch.uint8))
    if bad:
        raise ValueError("a 2:4 mask must keep exactly two weights of every four")
    return qweight, meta


@dataclass(frozen=True)
class _Tables:
    """Look-up tables over the sixteen values that two 2-bit positions, or a quad's mask, can have."""

    nibbles: Tensor  # [16] int32: mask bits -> metadata nibble, 0 where not two are kept
    valid_nibble: Tensor  # [16] bool
    first: Tensor  # [16] int32: metadata nibble -> bit at which the first kept byte starts
    second: Tensor  # [16] int32: that of the second
    masks: Tensor  # [16] int32: metadata nibble -> a byte of 0 or 1 per weight
    quads: Tensor  # [4096] int32: nibble << 8 | two 4-bit codes -> four bytes, 8 where pruned


@cache
def _tables(device: torch.device) -> _Tables:
    nibbles, shifts, masks = [0] * 16, [[0] * 16, [0] * 16], [0] * 16
    quads = [0x08080808] * 4096
    for i in range(4):
        for j in range(i + 1, 4):
            nibble = i | j << 2
            nibbles[1 << i | 1 << j] = nibble
            shifts[0][nibble], shifts[1][nibble] = 8 * i, 8 * j
            masks[nibble] = 1 << 8 * i | 1 << 8 * j
            for a in range(16):
                for b in range(16):
                    quads[nibble << 8 | b << 4 | a] ^= (a ^ 8) << 8 * i | (b ^ 8) << 8 * j

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return _Tables(ints(nibbles), ints(masks) != 0, ints(shifts[0]), ints(shifts[1]), ints(masks), ints(quads))


def _validate(p: PackedWeight) -> None:
    s, k = p.scheme, p.in_features
    if p.qweight.dim() != 2:
        raise ValueError(f"qweight must have two dimensions, got {list(p.qweight.shape)}")
    n = p.qweight.shape[0]
    if reason := s.why_not(n, k):
        raise ValueError(reason)
    stored = k // 2 if s.sparsity else k
    groups = s.num_groups(k)
    expected: dict[str, tuple[list[int], tuple[torch.dtype, ...]] | None] = {
        "qweight": ([n, -(-stored * s.num_bits // 8)], (torch.uint8,)),
        "scales": ([n, groups], SCALE_DTYPES),
        "meta": ([n, -(-k // 8)], (torch.uint8,)) if s.sparsity else None,
        "zero_point": None if s.symmetric else ([n, groups], (torch.uint8,)),
        "g_idx": ([k], (torch.int32,)) if p.g_idx is not None and not s.sparsity else None,
    }
    for name, want in expected.items():
        t: Tensor | None = getattr(p, name)
        if want is None:
            if t is not None:
                raise ValueError(f"{name} does not belong to a {s} weight")
            continue
        shape, dtypes = want
        if t is None:
            raise ValueError(f"{name} is missing from a {s} weight")
        if list(t.shape) != shape or t.dtype not in dtypes:
            raise ValueError(
                f"{name} must be {dtypes[0]} {shape} for a {s} weight [{n}, {k}], got {t.dtype} {list(t.shape)}"
            )
        if t.device != p.qweight.device:
            raise ValueError(f"{name} is on {t.device}, qweight on {p.qweight.device}")
