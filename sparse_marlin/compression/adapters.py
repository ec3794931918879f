"""Low-rank adapters: small dense factors beside a compressed weight that make up for most of what compression lost.

With the weight T [N, K] that a layer should have, its compressed stand-in W and the second moment H = X^T X of its
inputs, the factors a [R, K] and b [N, R] minimise ``tr((T - W - b a) H (T - W - b a)^T)``, the squared error of the
layer's output over the calibration inputs. The answer is a principal component analysis of the error's output: b holds
the R leading eigenvectors of ``(T - W) H (T - W)^T``, and ``a = b^T (T - W)``. (SLiM, arXiv 2410.09615, has a diagonal
in place of H.)

W is then solved once more, for what the adapter leaves, and the adapter fitted to the new error: alternating as in
HASSLE-free (arXiv 2502.00899). It starts from W, not from the adapter: one that held the largest components of T itself
would need all its digits, and could not be rounded to INT4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear import Adapter
from ..packed import PackedWeight
from ..scheme import AdapterScheme, Scheme
from .hessian import damped
from .solve import PRUNE_ONLY, Solution, compress_weight

_ROUNDS = 2  # how often the weight is solved; a third time takes a tenth off the squared error
_RANK_UNIT = 16  # what the kernels' tiles are made of
_RIDGE = 1e-6  # in units of the mean diagonal


def adapter_scheme(rank: int | float, num_bits: int, out_features: int, in_features: int) -> AdapterScheme | None:
    """The adapter that a weight [N, K] gets.

    Args:
        rank: 0 for none, a rank, or a fraction of min(N, K) between 0 and 1, rounded up to a multiple of 16.
        num_bits: 4 or 16.
    """
    if not rank:
        return None
    smaller = min(out_features, in_features)
    if isinstance(rank, float):
        rank = min(smaller, -(-math.ceil(rank * smaller) // _RANK_UNIT) * _RANK_UNIT)
    return AdapterScheme(rank, num_bits)


def check_adapter(rank: object, num_bits: int, method: str) -> None:
    """Raises ValueError for settings that no layer can have."""
    fine = (type(rank) is int and rank >= 0) or (type(rank) is float and 0 <= rank < 1)
    if not fine:
        raise ValueError(
            f"adapter_rank must be 0 for none, a positive integer, or a fraction between 0 and 1, got {rank!r}"
        )
    AdapterScheme(1, num_bits)
    if rank and method in PRUNE_ONLY:
        raise ValueError(f"method {method!r} leaves an nn.Linear, which cannot hold an adapter: use adapter_rank=0")


def compress_with_adapters(
    target: Tensor,
    hessian: Tensor | None,
    scheme: Scheme,
    method: str,
    damping: float,
    layers: Sequence[tuple[int, AdapterScheme | None]],
) -> tuple[Solution, list[Adapter | None]]:
    """Compresses a weight, or several that share inputs on top of each other, and fits an adapter to each of them.

    Args:
        target: [N, K] float32 weight that layer and adapter together should stand for.
        hessian: [K, K] float32, or None: then all inputs count alike, and the adapter is a truncated SVD.
        scheme, method, damping: see :func:`~.solve.compress_weight`.
        layers: rows and adapter of each weight.

    Returns:
        The compressed weights, and the adapters, which in floating point are in ``scheme.dtype``.
    """
    solution = compress_weight(target, hessian, scheme, method, damping)
    if not any(adapter for _, adapter in layers):
        return solution, [None] * len(layers)
    if hessian is None or not hessian.diagonal().any():
        metric = torch.eye(target.shape[1], device=target.device)
    else:
        metric = damped(hessian, damping)
    sizes = [rows for rows, _ in layers]
    for _ in range(_ROUNDS - 1):
        left = target.clone()
        for part, error, (_, adapter) in zip(
            left.split(sizes), (target - solution.weight).split(sizes), layers, strict=True
        ):
            if adapter is not None:
                a, b = low_rank(error, metric, adapter.rank)
                part.addmm_(b, a, alpha=-1)
        solution = compress_weight(left, hessian, scheme, method, damping)
    errors = (target - solution.weight).split(sizes)
    return solution, [
        None if adapter is None else _fit(error, metric, adapter, scheme.dtype, damping)
        for error, (_, adapter) in zip(errors, layers, strict=True)
    ]


def low_rank(error: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors a [R, K] and b [N, R] that minimise ``tr((E - b a) H (E - b a)^T)``.

    The columns of b are orthonormal, so that what is between the two matrices is no larger than the error's output.

    Args:
        error: E [N, K] float32.
        metric: H [K, K] float32, positive semidefinite.
        rank: R, at most min(N, K).
    """
    n, k = error.shape
    # The eigenvectors that count lie in the span of E's columns: where these are few, look for them there.
    basis, inner = torch.linalg.qr(error) if n > k else (None, error)
    vectors = _eigenvectors(inner @ metric @ inner.T)[:, -rank:]
    return vectors.T @ inner, vectors if basis is None else basis @ vectors


def _eigenvectors(matrix: Tensor) -> Tensor:
    """In ascending order of their eigenvalues; in float64 where the solver does not converge in float32."""
    try:
        vectors: Tensor = torch.linalg.eigh(matrix)[1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        vectors = torch.linalg.eigh(matrix.double())[1].to(matrix.dtype)
    return vectors


def _fit(error: Tensor, metric: Tensor, adapter: AdapterScheme, dtype: torch.dtype, damping: float) -> Adapter:
    """The best adapter for an error [N, K], as it is stored."""
    a, b = low_rank(error, metric, adapter.rank)
    if (largest := float(a.abs().max())) > 0:  # both factors about as large, so that neither leaves the dtype's range
        shift = 2.0 ** round(math.log2(float(b.abs().max()) / largest) / 2)
        a, b = a * shift, b / shift
    schemes = [adapter.factor(factor.shape[1], dtype) for factor in (a, b)]
    if schemes[0] is None or schemes[1] is None:
        return Adapter(a.to(dtype), b.to(dtype))
    packed_a = _packed(a, metric, schemes[0], damping)
    # b makes up for the rounding of a: least squares against the a that there is, whose output is what b is fed.
    a = packed_a.dequantize(torch.float32)
    moment = a @ metric @ a.T
    moment.diagonal().add_((_RIDGE * moment.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny))
    b = torch.linalg.solve(moment, a @ metric @ error.T).T
    return Adapter(packed_a, _packed(b, moment, schemes[1], damping))


def _packed(factor: Tensor, metric: Tensor, scheme: Scheme, damping: float) -> PackedWeight:
    if _negligible(factor, scheme.dtype):
        factor = torch.zeros_like(factor)
    packed = compress_weight(factor, metric, scheme, "one-shot", damping).packed
    assert packed is not None
    return packed


def _negligible(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether values are so small that no scale in ``dtype`` could hold them."""
    return float(values.abs().max()) < torch.finfo(dtype).tiny
