"""A slow, obvious oracle for the canonical form, written from its specification with plain loops over numpy arrays.

It shares no code with the package: bits are laid down one at a time, and a weight is one formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparse_marlin.packed import PackedWeight
from sparse_marlin.scheme import Scheme


def pack_bits(row: list[int], width: int) -> list[int]:
    """Bytes of a stream of ``width``-bit integers, least significant bit first, padded with zero bits."""
    bits = [value >> i & 1 for value in row for i in range(width)]
    bits += [0] * (-len(bits) % 8)
    return [sum(bits[i + j] << j for j in range(8)) for i in range(0, len(bits), 8)]


def pack(codes: np.ndarray, mask: np.ndarray | None, num_bits: int) -> tuple[np.ndarray, np.ndarray | None]:
    """``qweight`` and ``meta`` of integers [N, K]; ``mask`` [N, K] says which weights 2:4 keeps."""
    qweight, meta = [], []
    for n in range(codes.shape[0]):
        stored, positions = [], []
        for k in range(codes.shape[1]):
            if mask is None or mask[n, k]:
                stored.append(int(codes[n, k]))
                positions.append(k % 4)
        qweight.append(pack_bits(stored, num_bits))
        meta.append(pack_bits(positions, 2))  # two 2-bit positions make the nibble of a quad
    return np.array(qweight, np.uint8), None if mask is None else np.array(meta, np.uint8)


def group_of(k: int, group_size: int, g_idx: np.ndarray | None) -> int:
    """The group of column ``k``."""
    if g_idx is not None:
        return int(g_idx[k])
    return 0 if group_size == -1 else k // group_size


def dequantize(
    codes: np.ndarray,
    mask: np.ndarray | None,
    scales: np.ndarray,
    zero_point: np.ndarray | None,
    g_idx: np.ndarray | None,
    num_bits: int,
    group_size: int,
) -> np.ndarray:
    """[N, K] float32: (integer - zero) * scale where a weight is kept, 0 where it is pruned."""
    n_rows, n_columns = codes.shape
    w = np.zeros((n_rows, n_columns), np.float32)
    for n in range(n_rows):
        for k in range(n_columns):
            if mask is None or mask[n, k]:
                g = group_of(k, group_size, g_idx)
                zero = 2 ** (num_bits - 1) if zero_point is None else int(zero_point[n, g])
                w[n, k] = np.float32(int(codes[n, k]) - zero) * np.float32(scales[n, g])
    return w


def max_nonzeros_per_quad(w: Tensor) -> int:
    """The most nonzeros that any four consecutive columns of a row have, for w [N, K], K a multiple of 4."""
    return int((w.reshape(w.shape[0], -1, 4) != 0).sum(-1).max())


@dataclass(frozen=True)
class Example:
    """The ingredients of a random compressed weight, unpacked."""

    scheme: Scheme
    codes: Tensor  # [N, K] uint8; also under pruned positions, where they must not matter
    scales: Tensor  # [N, G]
    mask: Tensor | None  # [N, K] bool
    zero_point: Tensor | None  # [N, G] uint8
    g_idx: Tensor | None  # [K] int32

    def packed(self) -> PackedWeight:
        return PackedWeight.pack(self.codes, self.scales, self.scheme, self.mask, self.zero_point, self.g_idx)

    def weight(self) -> Tensor:
        """The oracle's weight, [N, K] float32."""
        s = self.scheme
        arrays = [
            None if t is None else t.numpy() for t in (self.mask, self.scales.float(), self.zero_point, self.g_idx)
        ]
        return torch.from_numpy(dequantize(self.codes.numpy(), *arrays, s.num_bits, s.group_size))


def example(
    out_features: int, in_features: int, scheme: Scheme, seed: int = 0, g_idx: bool = False, exact: bool = False
) -> Example:
    """A random weight; with ``exact`` its scales are powers of two near 1, so that products with integers are exact."""
    rng = np.random.default_rng(seed)
    n, k = out_features, in_features
    groups = 1 if scheme.group_size == -1 else k // scheme.group_size
    codes = rng.integers(0, 2**scheme.num_bits, (n, k), dtype=np.uint8)
    if exact:
        scales = 2.0 ** rng.integers(-2, 3, (n, groups))
    else:
        scales = rng.uniform(0.5, 1.5, (n, groups)) * 2.0 ** (1 - scheme.num_bits)
    mask = None
    if scheme.sparsity:
        mask = np.zeros((n, k), bool)
        for row in range(n):
            for quad in range(0, k, 4):
                mask[row, quad + rng.choice(4, 2, replace=False)] = True
    zero_point = None if scheme.symmetric else rng.integers(0, 2**scheme.num_bits, (n, groups), dtype=np.uint8)
    columns = rng.permutation(np.arange(k) * groups // k).astype(np.int32) if g_idx else None
    return Example(
        scheme,
        torch.from_numpy(codes),
        torch.from_numpy(scales).to(scheme.dtype),
        *(None if a is None else torch.from_numpy(a) for a in (mask, zero_point, columns)),
    )
