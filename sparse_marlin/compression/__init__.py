"""Pruning and quantization: of one layer with :func:`compress`, of a model with :func:`patch_model`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from ..linear import CompressedLinear
from ..scheme import Scheme, Sparsity
from .adapters import adapter_scheme, check_adapter, compress_with_adapters
from .hessian import Hessian, NonFiniteError
from .pipeline import compressed_layer, patch_model
from .report import LayerReport, Report, Structure
from .solve import check_damping, check_method, default_method, why_no_weight
from .targets import scale_dtype

__all__ = ["Hessian", "LayerReport", "NonFiniteError", "Report", "Structure", "compress", "patch_model"]

log = logging.getLogger("sparse_marlin")


@torch.no_grad()
def compress(
    linear: nn.Linear,
    sparsity: Sparsity | None = "2:4",
    bits: int = 4,
    group_size: int = 128,
    *,
    calibration: Tensor | Iterable[Tensor] | Hessian | None = None,
    method: str = "auto",
    dtype: torch.dtype | None = None,
    damping: float = 0.01,
    adapter_rank: int | float = 0,
    adapter_bits: Literal[4, 16] = 16,
) -> CompressedLinear:
    """Prunes and quantizes one layer; the layer itself is left as it is.

    Args:
        linear: an ``nn.Linear`` with weight [N, K] in float16, bfloat16 or float32.
        sparsity: ``"2:4"`` or None for dense.
        bits: 4 or 8.
        group_size: input columns per scale: 32, 64, 128, or -1 for one scale per output channel. Where K is no multiple
            of it, the largest smaller size that fits is taken, and logged.
        calibration: inputs [..., K], an iterable of them, or a :class:`Hessian` accumulated over them. Without, 2:4
            weights are pruned by magnitude, and all are rounded to nearest with fitted scales; a log message says so.
        method: see :func:`patch_model`; ``auto`` takes ``one-shot`` with calibration.
        dtype: precision of the scales, float16 or bfloat16; default: the layer's dtype, float16 for a float32 layer.
        damping: fraction of the Hessian's mean diagonal added to it.
        adapter_rank, adapter_bits: a low-rank adapter for the layer, see :func:`patch_model`. Without calibration it
            corrects the weight rather than the output.

    Returns:
        A layer on the same device that computes in the same dtype.

    Raises:
        TypeError: if ``linear`` is no ``nn.Linear``.
        ValueError: for settings that do not go together, a K that 2:4 cannot have, an adapter larger than the weight,
            or calibration inputs that are empty or of another width.
        NonFiniteError: if the calibration inputs hold NaN or infinity.
    """
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"compress takes an nn.Linear, got {type(linear).__name__}")
    n, k = linear.weight.shape
    if reason := why_no_weight(linear.weight):
        raise ValueError(reason)
    check_damping(damping)
    scheme = Scheme(bits, group_size, sparsity, dtype=dtype or scale_dtype(linear.weight.dtype))
    fitted = scheme.fit(k)
    if reason := fitted.why_not(n, k):
        raise ValueError(reason)
    if fitted != scheme:
        log.info("in_features %d is no multiple of group_size %d: using %d", k, group_size, fitted.group_size)
    if method == "auto":
        method = default_method(sparsity, calibration is not None)
    check_method(method, sparsity, allow_prune_only=False)
    check_adapter(adapter_rank, adapter_bits, method)
    adapter = adapter_scheme(adapter_rank, adapter_bits, n, k)
    if adapter is not None and (reason := adapter.why_not(n, k)):
        raise ValueError(reason)
    hessian = None
    if calibration is None:
        if method != default_method(sparsity, calibrated=False):
            raise ValueError(f"method {method!r} needs calibration inputs")
        log.info("no calibration inputs: %srounding to nearest", "pruning by magnitude and " if sparsity else "")
    else:
        hessian = calibration if isinstance(calibration, Hessian) else _accumulate(calibration, k, linear.weight.device)
        if hessian.matrix.shape[0] != k:
            raise ValueError(f"the Hessian must be [{k}, {k}], got {list(hessian.matrix.shape)}")
        if hessian.rows == 0:
            raise ValueError("the calibration set is empty")
    matrix = None if hessian is None else hessian.matrix.to(linear.weight.device)
    target = linear.weight.detach().float()
    solution, adapters = compress_with_adapters(target, matrix, fitted, method, damping, [(n, adapter)])
    assert solution.packed is not None
    return compressed_layer(solution.packed, linear, adapters[0])


def _accumulate(calibration: Tensor | Iterable[Tensor], in_features: int, device: torch.device) -> Hessian:
    hessian = Hessian(in_features, device)
    for x in [calibration] if isinstance(calibration, Tensor) else calibration:
        if not isinstance(x, Tensor):
            raise TypeError(f"calibration must be tensors or a Hessian, got {type(x).__name__}")
        hessian.add(x.to(device))
    return hessian
