"""Pruning and quantization of one weight matrix.

All methods see a weight W [N, K] and the second moment H = X^T X [K, K] of its inputs, and look for integers that keep
``tr((W - W') H (W - W')^T)`` small, the squared error of the layer's output over the calibration inputs. The calibrated
ones walk through the columns in order; an error made in one column is compensated in the columns after it, along the
same inverse Hessian whether it comes from pruning (SparseGPT, arXiv 2301.00774) or from rounding (GPTQ, 2210.17323).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..packed import PackedWeight
from ..scheme import Scheme
from .descent import PAIRS, Grid, descend, pair_inverses, quads_of
from .hessian import damped, inverse_factor

METHODS_24 = ("one-shot", "two-pass", "one-loop", "wanda+rtn", "magnitude+rtn")
METHODS_DENSE = ("one-shot", "gptq", "rtn")
PRUNE_ONLY = ("sparsegpt", "wanda", "magnitude")
UNCALIBRATED = ("magnitude+rtn", "magnitude", "rtn")

_REFIT_BYTES = 256 << 20
_DESCENTS = 2  # times that integers and mask are fitted to the scales after the sweep
_BLOCK = 128  # columns updated eagerly; the rest of the matrix follows once per block
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
        latent: [N, K] float32, what was rounded to the integers: in units of the scales it was rounded with, zero where
            pruned.
    """

    packed: PackedWeight | None
    weight: Tensor
    method: str
    damping: float = 0.0
    latent: Tensor | None = None


def default_method(sparsity: str | None, calibrated: bool) -> str:
    """What ``method="auto"`` stands for."""
    if calibrated:
        return "one-shot"
    return "rtn" if sparsity is None else "magnitude+rtn"


def check_method(method: str, sparsity: str | None, allow_prune_only: bool) -> None:
    """Raises ValueError for a method that is unknown or does not go with the sparsity."""
    known = METHODS_DENSE if sparsity is None else METHODS_24 + (PRUNE_ONLY if allow_prune_only else ())
    if method not in known:
        raise ValueError(f"method must be one of auto, {', '.join(known)} for sparsity={sparsity!r}, got {method!r}")


def check_damping(damping: float) -> None:
    """Raises ValueError for a damping that is no finite number >= 0."""
    if not (math.isfinite(damping) and damping >= 0):
        raise ValueError(f"damping must be a finite number >= 0, got {damping!r}")


def why_no_weight(weight: Tensor) -> str | None:
    """Why a tensor cannot be compressed, whatever the scheme, or None."""
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the weight must be float16, bfloat16 or float32, got {weight.dtype}"
    if weight.device.type == "meta":
        return "the weight is on the meta device: load the model onto a CPU or GPU first"
    if not torch.isfinite(weight).all():
        return "the weight holds NaN or infinite values"
    return None


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor | None) -> float:
    """Relative error of the layer's output in the 2-norm over the calibration inputs (of the weight itself without)."""
    delta = weight - approximation
    if hessian is None:
        return float(delta.norm() / weight.norm().clamp_min(1e-30))
    wrong = (delta @ hessian).mul_(delta).sum(dtype=torch.float64)
    total = (weight @ hessian).mul_(weight).sum(dtype=torch.float64)
    return float((wrong.clamp_min(0) / total.clamp_min(1e-30)).sqrt())


def compress_weight(
    weight: Tensor, hessian: Tensor | None, scheme: Scheme, method: str, damping: float = 0.01
) -> Solution:
    """Prunes and quantizes one weight.

    Args:
        weight: [N, K], any floating dtype; computed in float32 on its device.
        hessian: [K, K] float32 on the same device, or None for methods that need none.
        scheme: bits, groups and sparsity of the result; symmetric.
        method: one of METHODS_24, METHODS_DENSE, PRUNE_ONLY. ``one-loop`` chooses the mask while it rounds;
            ``two-pass`` prunes first and then rounds under the frozen mask; ``gptq`` only rounds; ``one-shot`` is the
            latter two, beginning with the columns that matter most; then the scales are fitted to the integers, and
            integers and mask to the scales (:mod:`.descent`), in turn.
        damping: fraction of the Hessian's mean diagonal added to it.

    Raises:
        ValueError: if the scales cannot be held in the scheme's dtype.
    """
    w = weight.detach().float()
    sparse = scheme.sparsity is not None
    if hessian is None or method in UNCALIBRATED or method.startswith("wanda"):
        score = w if hessian is None or method in UNCALIBRATED else w * hessian.diagonal().sqrt()
        mask = magnitude_mask(score) if sparse else None
        if method in PRUNE_ONLY:
            return Solution(None, w if mask is None else w * mask, method)
        kept = w if mask is None else w * mask
        scales = fit_scales(kept, mask, scheme, None)
        columns = scales.float().repeat_interleave(scheme.group_width(w.shape[1]), 1)
        return _finish(_in_units(kept, columns), scales, mask, scheme, method, 0.0)

    order = torch.arange(w.shape[1], device=w.device)
    if method == "one-shot":
        order = solving_order(hessian, 4 if sparse else 1)
    back = order.argsort()  # all that follows is in the solver's order, except for what is indexed with this
    factor = inverse_factor(hessian, damping, order)
    importance = factor.upper.diagonal().square().reciprocal()
    pairs = Pairs(factor.upper) if sparse else None
    target, mask = w[:, order], None
    if pairs is not None and method != "one-loop":
        target = sweep(target, factor.upper, pairs, None)
        mask = pairs.mask()[:, back]
        if method == "sparsegpt":
            return Solution(None, target[:, back], method, factor.damping)
    estimate = mask if pairs is None or mask is not None else magnitude_mask(w * importance[back].sqrt())
    scales = fit_scales(target[:, back], estimate, scheme, importance[back])
    rounder = Rounder(scheme, scales, order)
    # Starting from the pruned weight is as good as starting from the original one under the frozen mask: the errors of
    # pruning have been fed forward already, and those of rounding add up linearly.
    sweep(target, factor.upper, pairs, rounder)
    mask = None if pairs is None else pairs.mask()[:, back]
    latent, damping = rounder.latent()[:, back], factor.damping
    if method == "one-shot":
        del target, rounder, pairs, factor  # as large as the weight or the Hessian, each of them
        h = damped(hessian, damping)
        scales = refit_scales(w, _codes(latent, scheme), mask, scales, scheme, h)
        for _ in range(_DESCENTS):
            latent, mask = descend(w, latent, mask, scales, scheme, h, order)
            scales = refit_scales(w, _codes(latent, scheme), mask, scales, scheme, h)
    return _finish(latent, scales, mask, scheme, method, damping)


def solving_order(hessian: Tensor, width: int) -> Tensor:
    """[K] the columns, those with the largest inputs first: most columns are left then to make up for their errors.

    As GPTQ's activation order, but where the weights are stored, and in which group, stays what it was.

    Args:
        hessian: [K, K].
        width: columns that stay together: 4 for quads.
    """
    groups = hessian.diagonal().view(-1, width).sum(1).argsort(descending=True, stable=True)
    return (width * groups.unsqueeze(1) + torch.arange(width, device=groups.device)).flatten()


def _finish(
    latent: Tensor, scales: Tensor, mask: Tensor | None, scheme: Scheme, method: str, damping: float
) -> Solution:
    packed = PackedWeight.pack(_codes(latent, scheme), scales, scheme, mask)
    return Solution(packed, packed.dequantize(torch.float32), method, damping, latent)


def magnitude_mask(score: Tensor) -> Tensor:
    """[N, K] bool: the two largest of each quad by absolute value (the earlier one where equal)."""
    quads = score.abs().unflatten(1, (-1, 4))
    order = quads.argsort(dim=2, descending=True, stable=True)[..., :2]
    return torch.zeros_like(quads, dtype=torch.bool).scatter_(2, order, True).flatten(1)


def _in_units(w: Tensor, scales: Tensor) -> Tensor:
    """w in units of its scales; a zero scale gives zero."""
    return w * torch.where(scales == 0, 0.0, 1.0 / scales)


def _codes(latent: Tensor, scheme: Scheme) -> Tensor:
    """The nearest integers [N, K] uint8 that can be stored."""
    return latent.round().add_(scheme.zero_code).clamp_(0, scheme.max_code).to(torch.uint8)


def fit_scales(w: Tensor, mask: Tensor | None, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Scales [N, G] in ``scheme.dtype`` that minimise the weighted squared rounding error of each group.

    Candidates clip a growing part of the range; only kept weights count.

    Args:
        w: [N, K] float32, zero where pruned.
        mask: [N, K] bool of kept weights or None.
        scheme: where the groups are.
        importance: [K] weight of each column's error, or None for equal weights.

    Raises:
        ValueError: if the weights are too large or too small for scales of that dtype.
    """
    n, k = w.shape
    zero = scheme.zero_code
    groups = w.unflatten(1, (-1, scheme.group_width(k)))
    weights = torch.ones(k, device=w.device) if importance is None else importance
    weights = weights.view(1, *groups.shape[1:])
    if mask is not None:
        weights = weights * mask.view(groups.shape)
    largest = groups.abs().amax(2)
    limits = torch.finfo(scheme.dtype)
    peak = float(largest.max())
    if peak and not limits.tiny / 16 <= peak / (zero - 1) <= limits.max:
        raise ValueError(
            f"weights up to {peak:.3g} need scales around {peak / zero:.3g}, outside the range of {scheme.dtype}: "
            "pass dtype=torch.bfloat16"
        )
    best = torch.full((n, groups.shape[1]), torch.inf, device=w.device)
    scales = torch.zeros_like(best, dtype=scheme.dtype)
    # The first two make a weight that lies on such a grid already come back unchanged.
    for divisor in (zero - 1, zero, *((zero - 0.5) / clip for clip in _CLIPS)):
        candidate = (largest / divisor).to(scheme.dtype)
        s = candidate.float().unsqueeze(2)
        rounded = _in_units(groups, s).round_().clamp_(-zero, scheme.max_code - zero).mul_(s)
        error = rounded.sub_(groups).square_().mul_(weights).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, candidate, scales)
    return scales


def refit_scales(w: Tensor, codes: Tensor, mask: Tensor | None, scales: Tensor, scheme: Scheme, h: Tensor) -> Tensor:
    """Scales [N, G] that minimise the output's error with the integers fixed: one least-squares problem per row.

    With q_g the integers of group g, zero elsewhere, the error of a row is quadratic in its scales: the matrix is
    ``q_g H q_h^T``, the right side ``q_g H w^T``. A little of the present scales is mixed in where that is flat.
    ``h`` is the damped Hessian.
    """
    n, k = w.shape
    width = scheme.group_width(k)
    new = scales.float()
    rows = max(1, _REFIT_BYTES // (4 * (k // width) ** 2 + 16 * k))
    for part in (slice(i, i + rows) for i in range(0, n, rows)):
        q = codes[part].float() - scheme.zero_code
        if mask is not None:
            q *= mask[part]
        matrix = torch.stack(
            [
                ((q[:, g : g + width] @ h[g : g + width]) * q).unflatten(1, (-1, width)).sum(2)
                for g in range(0, k, width)
            ],
            1,
        )
        right = ((w[part] @ h) * q).unflatten(1, (-1, width)).sum(2)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        ridge = 1e-3 * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
        right += ridge * new[part]
        diagonal += ridge
        fitted = torch.linalg.solve(matrix, right)
        sane = (fitted > 0.5 * new[part]) & (fitted < 2 * new[part])
        new[part] = torch.where(sane, fitted, new[part])
    return new.clamp_max(torch.finfo(scheme.dtype).max).to(scheme.dtype)


def sweep(w: Tensor, upper: Tensor, pairs: Pairs | None, rounder: Rounder | None) -> Tensor:
    """Goes through the columns, prunes and rounds, and compensates every error in the columns that follow.

    Args:
        w: [N, K] float32.
        upper: factor of the inverse Hessian, see :class:`InverseFactor`.
        pairs: removes two weights of each quad (choosing them, unless they are chosen already), or None.
        rounder: rounds each column, or None.

    Returns:
        [N, K] the final values.
    """
    columns = w.T.clone(memory_format=torch.contiguous_format)  # one column is one run of memory
    k = columns.shape[0]
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        u = upper[start:end, start:end]
        inverse = u.diagonal().reciprocal().tolist()
        block = columns[start:end]
        errors = torch.zeros_like(block)  # in units of U: column j's error moves columns i > j by -U[j, i] times it
        for i in range(end - start):
            if pairs is not None and i % 4 == 0:
                quad = slice(i, i + 4)
                block[quad], errors[quad] = pairs.remove((start + i) // 4, block[quad])
                block[i + 4 :].addmm_(u[quad, i + 4 :].T, errors[quad], alpha=-1)
            if rounder is not None:
                final = rounder(start + i, block[i], None if pairs is None else pairs.kept(start + i))
                error = (block[i] - final) * inverse[i]
                block[i] = final
                errors[i] += error
                block[i + 1 :].addr_(u[i, i + 1 :], error, alpha=-1)
        if end < k:
            columns[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return columns.T.contiguous()


class Rounder:
    """Rounds columns, which come in some order, to the grid of their groups, and keeps what was rounded."""

    def __init__(self, scheme: Scheme, scales: Tensor, order: Tensor) -> None:
        self._grid = Grid(scheme, scales, order)
        self._columns: list[Tensor] = []

    def __call__(self, j: int, column: Tensor, kept: Tensor | None) -> Tensor:
        latent = column * self._grid.inverse(j)
        if kept is not None:
            latent *= kept
        self._columns.append(latent)
        return self._grid.value(j, latent)

    def latent(self) -> Tensor:
        """[N, K] float32, in the order in which the columns came."""
        return torch.stack(self._columns, 1)


class Pairs:
    """Removes two weights of each quad at the least cost, and compensates for both at once.

    Let A be the inverse Hessian of the columns that are still free, restricted to the quad: ``U^T U`` over the quad's
    block of U. Removing the pair P costs ``w_P^T inv(A_PP) w_P``, and the best the free columns can do about it is to
    move by ``-A[:, P] inv(A_PP) w_P`` (optimal brain surgeon for two weights at once). That includes the kept weights
    of the quad itself, on either side, which removing column after column would miss.
    """

    def __init__(self, upper: Tensor) -> None:
        self.u = quads_of(upper)
        pairs = torch.tensor(PAIRS, device=upper.device)
        self.first, self.second = pairs.T.contiguous()
        self.a = self.u.mT @ self.u
        self.inverse_pp, self.inverse_qq, self.inverse_pq = pair_inverses(self.a, self.first, self.second)
        keep = torch.ones(6, 4, dtype=torch.bool, device=upper.device)
        self.keep = keep.scatter_(1, pairs, False).T.contiguous()  # [4, 6]
        self._masks: list[Tensor] = []  # per quad, [4, N]
        self._chosen: list[Tensor] = []  # per quad, [N] index into PAIRS

    def remove(self, quad: int, w: Tensor) -> tuple[Tensor, Tensor]:
        """New values [4, N] of the quad's columns w [4, N], and their errors in units of U [4, N]."""
        if quad == len(self._chosen):
            p, q = w[self.first], w[self.second]
            cost = self.inverse_pp[quad].unsqueeze(1) * p.square() + self.inverse_qq[quad].unsqueeze(1) * q.square()
            cost += 2 * self.inverse_pq[quad].unsqueeze(1) * p * q
            chosen = cost.argmin(0)
            self._chosen.append(chosen)
            self._masks.append(self.keep[:, chosen])
        chosen, kept = self._chosen[quad], self._masks[quad]
        rows = torch.stack([self.first[chosen], self.second[chosen]])
        p, q = w.gather(0, rows)
        pp, qq, pq = self.inverse_pp[quad, chosen], self.inverse_qq[quad, chosen], self.inverse_pq[quad, chosen]
        force = torch.zeros_like(w).scatter_(0, rows, torch.stack([pp * p + pq * q, pq * p + qq * q]))
        return (w - self.a[quad] @ force) * kept, self.u[quad] @ force

    def kept(self, j: int) -> Tensor:
        """[N] bool: where column j is kept."""
        return self._masks[j // 4][j % 4]

    def mask(self) -> Tensor:
        """[N, K] bool of kept weights."""
        return torch.cat(self._masks).T.contiguous()
