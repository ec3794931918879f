"""The operators ``torch.ops.sparse_marlin.*``: schemas, shapes for tracing, and the path that needs no extension.

``linear`` multiplies by a weight in canonical form. It runs on every device by dequantizing a few rows of the weight
at a time, so that at most :data:`TILE_BYTES` of dequantized weight exist at once. It is the CPU path, the fallback on a
GPU whose kernels are missing, and the reference that the kernels are compared with.

``gemm`` multiplies by a weight in kernel form on a GPU; the extension implements it. ``kernels`` and
``device_attributes`` tell :mod:`sparse_marlin.dispatch` what there is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import dequantize

TILE_BYTES = 16 << 20

_library = torch.library.Library("sparse_marlin", "DEF")
_library.define(
    "linear(Tensor x, Tensor qweight, Tensor scales, Tensor? meta, Tensor? zero_point, Tensor? g_idx, Tensor? bias, "
    "int num_bits, int group_size) -> Tensor"
)
_library.define(
    "gemm(Tensor x, Tensor weights, Tensor? meta, Tensor scales, Tensor row_scales, Tensor? perm, Tensor? bias, "
    "int out_features, int num_bits, int group_size, bool zero_points, str plan) -> Tensor"
)
_library.define("kernels(int num_bits, int group_size, bool sparse, bool zero_points, bool bfloat16) -> str")
_library.define("device_attributes(int device) -> int[]")


def _linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    meta: Tensor | None,
    zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    n, k = qweight.shape[0], x.shape[-1]
    x2d = x.reshape(-1, k)
    y = x.new_empty(*x.shape[:-1], n)  # returned as it is: a view could not be changed in place where gradients pass
    y2d = y.view(x2d.shape[0], n)
    # Half-precision GEMMs on a CPU are slow, and round more than a GPU's: multiply in float32 there.
    compute = torch.float32 if x.device.type == "cpu" and x.dtype.itemsize == 2 else x.dtype
    x2d = x2d.to(compute)
    rows = max(64, TILE_BYTES // (4 * k))
    for i in range(0, n, rows):
        tile = slice(i, i + rows)
        w = dequantize(
            qweight[tile],
            scales[tile],
            None if meta is None else meta[tile],
            None if zero_point is None else zero_point[tile],
            g_idx,
            num_bits,
            group_size,
            k,
            x.dtype,
        )
        b = None if bias is None else bias[tile].to(compute)
        y2d[:, tile] = torch.nn.functional.linear(x2d, w.to(compute), b)
    return y


def _linear_fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    meta: Tensor | None,
    zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], qweight.shape[0])


def _gemm_fake(
    x: Tensor,
    weights: Tensor,
    meta: Tensor | None,
    scales: Tensor,
    row_scales: Tensor,
    perm: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    num_bits: int,
    group_size: int,
    zero_points: bool,
    plan: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_marlin::linear", _linear_fake, lib=_library)
torch.library.register_fake("sparse_marlin::gemm", _gemm_fake, lib=_library)

# Named once: looking for an overload takes longer than calling it.
linear = torch.ops.sparse_marlin.linear.default
gemm = torch.ops.sparse_marlin.gemm.default
