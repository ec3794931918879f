"""Pruning and quantization of one weight matrix.

All methods see a weight W [N, K] and the second moment H = X^T X [K, K] of its inputs, and look for integers that keep
``tr((W - W') H (W - W')^T)`` small, the squared error of the layer's output over the calibration inputs. The calibrated
ones walk through the columns in order; an error made in one column is compensated in the columns after it, along the
same inverse Hessian whether it comes from pruning (SparseGPT, arXiv 2301.00774) or from rounding (GPTQ, 2210.17323).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..packed import PackedWeight
from ..scheme import Scheme
from .hessian import inverse_factor

log = logging.getLogger("sparse_marlin")

METHODS_24 = ("two-pass", "one-loop", "wanda+rtn", "magnitude+rtn")
METHODS_DENSE = ("gptq", "rtn")
PRUNE_ONLY = ("sparsegpt", "wanda", "magnitude")
UNCALIBRATED = ("magnitude+rtn", "magnitude", "rtn")

_BLOCK = 128  # columns updated eagerly; the rest of the matrix follows once per block
_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
# Fractions of the largest weight that half the range may cover. The range is uneven (-8..7): above 1 nothing clips.
_CLIPS = tuple(1.08 - 0.02 * i for i in range(30))


@dataclass(frozen=True)
class Solution:
    """A compressed weight and how far it is from the original.

    Attributes:
        packed: the weight in canonical form; ``None`` after a prune-only method.
        weight: [N, K] float32, what the compressed weight stands for.
        method: the method that made it.
        damping: what was added to the Hessian's diagonal, in units of its mean; 0 where no inverse was taken.
    """

    packed: PackedWeight | None
    weight: Tensor
    method: str
    damping: float = 0.0


def default_method(sparsity: str | None, calibrated: bool) -> str:
    """What ``method="auto"`` stands for."""
    if sparsity is None:
        return "gptq" if calibrated else "rtn"
    return "two-pass" if calibrated else "magnitude+rtn"


def check_method(method: str, sparsity: str | None, allow_prune_only: bool) -> None:
    """Raises ValueError for a method that is unknown or does not go with the sparsity."""
    known = METHODS_DENSE if sparsity is None else METHODS_24 + (PRUNE_ONLY if allow_prune_only else ())
    if method not in known:
        raise ValueError(f"method must be one of auto, {', '.join(known)} for sparsity={sparsity!r}, got {method!r}")


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor | None) -> float:
    """Relative error of the layer's output in the 2-norm over the calibration inputs (of the weight itself without)."""
    delta = weight - approximation
    if hessian is None:
        return float(delta.norm() / weight.norm().clamp_min(1e-30))
    wrong = (delta @ hessian).mul_(delta).sum(dtype=torch.float64)
    total = (weight @ hessian).mul_(weight).sum(dtype=torch.float64)
    return float((wrong.clamp_min(0) / total.clamp_min(1e-30)).sqrt())


def solve(weight: Tensor, hessian: Tensor | None, scheme: Scheme, method: str, damping: float = 0.01) -> Solution:
    """Prunes and quantizes one weight.

    Args:
        weight: [N, K], any floating dtype; computed in float32 on its device.
        hessian: [K, K] float32 on the same device, or None for methods that need none.
        scheme: bits, groups and sparsity of the result; symmetric.
        method: one of METHODS_24, METHODS_DENSE, PRUNE_ONLY.
        damping: fraction of the Hessian's mean diagonal added to it.
    """
    w = weight.detach().float()
    if hessian is None or method in UNCALIBRATED:
        mask = None if scheme.sparsity is None else magnitude_mask(w)
        if method == "magnitude":
            assert mask is not None
            return Solution(None, w * mask, method)
        return _finish(w, *round_to_nearest(w, mask, scheme), mask, scheme, method, 0.0)
    if method.startswith("wanda"):
        mask = magnitude_mask(w * hessian.diagonal().sqrt())
        if method == "wanda":
            return Solution(None, w * mask, method)
        return _finish(w, *round_to_nearest(w, mask, scheme), mask, scheme, method, 0.0)

    factor = inverse_factor(hessian, damping)
    importance = factor.upper.diagonal().square().reciprocal()
    mask, target = None, w
    if method in ("two-pass", "sparsegpt"):
        mask, target = prune_24(w, factor.upper)
        if method == "sparsegpt":
            return Solution(None, target, method, factor.damping)
    elif method == "one-loop":
        mask = magnitude_mask(w * importance.sqrt())  # an estimate for the scales; the sweep chooses anew
    scales = fit_scales(target, mask, scheme, importance)
    # Starting from the pruned weight is the same as starting from the original one under a frozen mask: the errors of
    # pruning have been fed forward already, and those of rounding add up linearly.
    choose = Choose24(factor.upper) if method == "one-loop" else None
    rounder = Rounder(scheme, scales)
    mask_columns = None if mask is None else mask.T.contiguous()

    def project(j: int, block: Tensor) -> Tensor:
        if choose is not None and mask_columns is not None and j % 4 == 0:
            mask_columns[j : j + 4] = choose(j // 4, block[:4])
        return rounder(j, block[0], None if mask_columns is None else mask_columns[j])

    feed_forward(w if choose is not None else target, factor.upper, project)
    mask = None if mask_columns is None else mask_columns.T.contiguous()
    return _finish(w, rounder.finish(), scales, mask, scheme, method, factor.damping)


def _finish(
    w: Tensor, codes: Tensor, scales: Tensor, mask: Tensor | None, scheme: Scheme, method: str, damping: float
) -> Solution:
    packed = PackedWeight.pack(codes, scales, scheme, mask)
    return Solution(packed, packed.dequantize(torch.float32), method, damping)


def magnitude_mask(score: Tensor) -> Tensor:
    """[N, K] bool: the two largest of each quad by absolute value (the earlier one where equal)."""
    quads = score.abs().unflatten(1, (-1, 4))
    order = quads.argsort(dim=2, descending=True, stable=True)[..., :2]
    return torch.zeros_like(quads, dtype=torch.bool).scatter_(2, order, True).flatten(1)


def round_to_nearest(w: Tensor, mask: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes [N, K] uint8 and fitted scales [N, G], every weight on its own."""
    scales = fit_scales(w if mask is None else w * mask, mask, scheme, None)
    columns = scales.float().repeat_interleave(scheme.group_width(w.shape[1]), 1)
    return _quantize(w, columns, scheme).to(torch.uint8), scales


def _quantize(w: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Codes (as floats) of w; a zero scale gives the zero code."""
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    return (w * inverse).round_().add_(scheme.zero_code).clamp_(0, scheme.max_code)


def fit_scales(w: Tensor, mask: Tensor | None, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Scales [N, G] in ``scheme.dtype`` that minimise the weighted squared rounding error of each group.

    Candidates clip a growing part of the range; only kept weights count.

    Args:
        w: [N, K] float32, zero where pruned.
        mask: [N, K] bool of kept weights or None.
        scheme: where the groups are.
        importance: [K] weight of each column's error, or None for equal weights.
    """
    n, k = w.shape
    groups = w.unflatten(1, (-1, scheme.group_width(k)))
    weights = torch.ones(k, device=w.device) if importance is None else importance
    weights = weights.view(1, *groups.shape[1:])
    if mask is not None:
        weights = weights * mask.view(groups.shape)
    largest = groups.abs().amax(2)
    limit = torch.finfo(scheme.dtype).max
    best = torch.full((n, groups.shape[1]), torch.inf, device=w.device)
    scales = torch.zeros_like(best, dtype=scheme.dtype)
    for clip in _CLIPS:
        candidate = (largest * (clip / (scheme.zero_code - 0.5))).clamp_max(limit).to(scheme.dtype)
        s = candidate.float().unsqueeze(2)
        rounded = _quantize(groups, s, scheme).sub_(scheme.zero_code).mul_(s)
        error = rounded.sub_(groups).square_().mul_(weights).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, candidate, scales)
    return scales


def feed_forward(w: Tensor, upper: Tensor, project: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Replaces column after column, each error compensated in the columns that follow.

    Args:
        w: [N, K] float32.
        upper: factor of the inverse Hessian, see :class:`InverseFactor`.
        project: ``project(j, block)`` gives the final values [N] of column j, where ``block[i]`` [N] is column j + i
            as compensated so far, to the end of a block of columns (at least to the end of the quad).

    Returns:
        [N, K] the final values.
    """
    columns = w.T.clone(memory_format=torch.contiguous_format)  # one column is one run of memory
    k = columns.shape[0]
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        u = upper[start:end, start:end]
        normalised = u / u.diagonal().unsqueeze(1)
        inverse = u.diagonal().reciprocal()
        block = columns[start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            final = project(start + i, block[i:])
            torch.sub(block[i], final, out=errors[i])
            block[i] = final
            block[i + 1 :].addr_(normalised[i, i + 1 :], errors[i], alpha=-1)
        if end < k:
            columns[end:].addmm_(upper[start:end, end:].T, errors * inverse.unsqueeze(1), alpha=-1)
    return columns.T


class Rounder:
    """Rounds columns to the grid of their groups and keeps the integers."""

    def __init__(self, scheme: Scheme, scales: Tensor) -> None:
        self.scheme = scheme
        self.scales = scales.float().T.contiguous()
        self.inverse = torch.where(self.scales == 0, 0.0, 1.0 / self.scales)
        self._columns: list[Tensor] = []

    def __call__(self, j: int, column: Tensor, mask: Tensor | None) -> Tensor:
        width = self.scheme.group_size
        group = 0 if width == -1 else j // width
        zero = self.scheme.zero_code
        code = (column * self.inverse[group]).round_().clamp_(-zero, self.scheme.max_code - zero)
        if mask is not None:
            code *= mask
        self._columns.append((code + zero).to(torch.uint8))
        return code * self.scales[group]

    def finish(self) -> Tensor:
        """[N, K] uint8."""
        return torch.stack(self._columns, 1)


class Choose24:
    """Chooses which two weights of a quad go, by the exact error of removing the pair.

    Removing the pair P from the columns that are still free costs ``w_P^T inv(A_PP) w_P``, where A is the inverse
    Hessian of those columns: the quad's block of ``U^T U`` over the rows from the quad on (optimal brain surgeon for two
    weights at once, instead of two scores taken one by one).
    """

    def __init__(self, upper: Tensor) -> None:
        k = upper.shape[0]
        quads = torch.stack([upper[i : i + 4, i : i + 4] for i in range(0, k, 4)])
        a = (quads.mT @ quads).double()
        first = torch.tensor([p for p, _ in _PAIRS], device=upper.device)
        second = torch.tensor([q for _, q in _PAIRS], device=upper.device)
        pp, qq, pq = a[:, first, first], a[:, second, second], a[:, first, second]
        determinant = pp * qq - pq * pq
        self.first, self.second = first, second
        self.square_p = (qq / determinant).float().unsqueeze(2)  # [K/4, 6, 1]
        self.square_q = (pp / determinant).float().unsqueeze(2)
        self.product = (-2 * pq / determinant).float().unsqueeze(2)
        keep = torch.ones(6, 4, dtype=torch.bool, device=upper.device)
        keep.scatter_(1, torch.stack([first, second], 1), False)
        self.keep = keep

    def __call__(self, quad: int, w: Tensor) -> Tensor:
        """[4, N] bool mask of kept weights for the quad's values w [4, N]."""
        p, q = w[self.first], w[self.second]
        cost = self.square_p[quad] * p.square() + self.square_q[quad] * q.square() + self.product[quad] * p * q
        return self.keep[cost.argmin(0)].T


def prune_24(w: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """SparseGPT: mask [N, K] bool and the pruned, compensated weight [N, K]."""
    choose = Choose24(upper)
    mask = torch.empty(w.shape[1], w.shape[0], dtype=torch.bool, device=w.device)

    def project(j: int, block: Tensor) -> Tensor:
        if j % 4 == 0:
            mask[j : j + 4] = choose(j // 4, block[:4])
        return block[0] * mask[j]

    pruned = feed_forward(w, upper, project)
    return mask.T.contiguous(), pruned.contiguous()
