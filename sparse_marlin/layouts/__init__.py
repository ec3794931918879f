"""The form of a weight that the kernels read: made from the canonical form for the GPU at hand, and never saved.

``csrc/common/layout.h`` draws the order of codes, metadata and scales; :mod:`.coordinates` is its twin, and the only
place here that knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..packed import PackedWeight
from ..scheme import Scheme
from . import dense, sparse24
from .coordinates import K_PANEL, round_up
from .scales import KERNEL_DTYPES, pack_scales, scale_limit, unpack_scales

KERNEL_TENSOR_NAMES = ("weights", "meta", "scales", "row_scales", "perm")


@dataclass(frozen=True)
class KernelWeight:
    """One weight [N, K] in kernel form: what the operator ``gemm`` of ``csrc/bindings.cpp`` takes.

    N is padded to a multiple of 128 and K to one of 256; P = padded N / 128 is the number of panels. Scales and what x
    must be have the same dtype.

    Attributes:
        weights: uint8 [P, padded K / fragment columns, 8, 512], fragments of codes.
        meta: uint8 [P, padded K / 64, 8, 128], fragments of 2:4 metadata, or None.
        scales: [P, groups, 64, 2 or 4], see :func:`.scales.pack_scales`.
        row_scales: float32 [padded N], the power of two per row that undoes the normalisation of its scales.
        perm: int32 [K], the order in which to take the columns of x (activation order), or None.
    """

    scheme: Scheme
    out_features: int
    in_features: int
    weights: Tensor
    meta: Tensor | None
    scales: Tensor
    row_scales: Tensor
    perm: Tensor | None


def why_not(packed: PackedWeight, activation_dtype: torch.dtype) -> str | None:
    """Why a weight has no kernel form, or None. Waits for the GPU, if the weight is there."""
    if activation_dtype not in KERNEL_DTYPES:
        return f"the kernels compute in float16 and bfloat16, not {str(activation_dtype).removeprefix('torch.')}"
    largest, limit = float(packed.scales.abs().max()), scale_limit(activation_dtype)
    if not largest < limit:  # neither is a NaN
        return f"its scales reach {largest:g}; the kernels need them finite and below {limit:g}"
    if packed.zero_point is not None and int(packed.zero_point.max()) > 1 << packed.scheme.num_bits:
        return f"its zero points reach {int(packed.zero_point.max())}; the kernels take {1 << packed.scheme.num_bits}"
    if packed.g_idx is not None:
        width = packed.scheme.group_width(packed.in_features)
        if not torch.equal(packed.g_idx.sort().values, dense.runs(packed.in_features, width, packed.device)):
            return f"its g_idx does not give each group {width} columns, as the kernels need"
    return None


def to_kernel(packed: PackedWeight, activation_dtype: torch.dtype) -> KernelWeight:
    """Rearranges a weight for the kernels, on its device, and on a GPU waits until that is done.

    A kernel for sm_90 may read its weight while the launch before it still runs, which must not be what writes it.

    Args:
        activation_dtype: dtype of x and y, float16 or bfloat16. Scales of another dtype are rounded to it once, after
            normalisation: their range always fits.

    Raises:
        ValueError: if the weight has no kernel form; :func:`why_not` says in advance.
    """
    if reason := why_not(packed, activation_dtype):
        raise ValueError(f"a {packed.scheme} weight [{packed.out_features}, {packed.in_features}]: {reason}")
    s, k = packed.scheme, packed.in_features
    perm = None if packed.g_idx is None else dense.perm_of(packed.g_idx)
    if packed.meta is None:
        weights, meta = dense.pack_codes(packed.qweight, k, s.num_bits, perm), None
    else:
        weights = sparse24.pack_values(packed.qweight, k, s.num_bits)
        meta = sparse24.pack_meta(packed.meta, k)
    groups = s.num_groups(round_up(k, K_PANEL))
    scales, row_scales = pack_scales(packed.scales, packed.zero_point, s.num_bits, groups, activation_dtype)
    perm = None if perm is None else perm.int()
    if packed.device.type == "cuda":
        torch.cuda.current_stream(packed.device).synchronize()
    return KernelWeight(s, packed.out_features, k, weights, meta, scales, row_scales, perm)


def from_kernel(kernel: KernelWeight) -> PackedWeight:
    """Undoes :func:`to_kernel`, bit for bit.

    Where ``scheme.dtype`` has more bits than the dtype of the kernel, the scales come back as they were rounded (see
    :mod:`.scales`); keep the canonical ones where that matters, they are small. A ``g_idx`` that says only that groups
    are runs of columns does not come back.
    """
    s, n, k = kernel.scheme, kernel.out_features, kernel.in_features
    qweight, meta = canonical_codes(kernel)
    scales, zero_point = unpack_scales(kernel.scales, kernel.row_scales, n, s.num_groups(k), s.num_bits, s.dtype)
    g_idx = None if kernel.perm is None else dense.g_idx_of(kernel.perm.long(), s.group_width(k))
    return PackedWeight(s, k, qweight, scales, meta, zero_point, g_idx)


def canonical_codes(kernel: KernelWeight) -> tuple[Tensor, Tensor | None]:
    """The large tensors of :func:`from_kernel` alone: ``qweight`` and ``meta``, always bit for bit."""
    n, k, num_bits = kernel.out_features, kernel.in_features, kernel.scheme.num_bits
    if kernel.meta is None:
        perm = None if kernel.perm is None else kernel.perm.long()
        return dense.unpack_codes(kernel.weights, n, k, num_bits, perm), None
    qweight = sparse24.unpack_values(kernel.weights, n, k, num_bits)
    return qweight, sparse24.unpack_meta(kernel.meta, n, k)
