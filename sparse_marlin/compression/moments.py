"""Second moments of a stage's inputs, in the compressed model and against the original one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .blocks import Call, Inputs, Recorded, run
from .hessian import ROWS, Hessian, NonFiniteError
from .solve import output_error
from .targets import Target

CORRECTION_RIDGE = 0.3  # in units of the Hessian's mean diagonal


@dataclass
class Moments:
    """Second moments [K, K] of what a set of Linears was fed.

    Attributes:
        hessian: ``X^T X`` of the inputs X in the compressed model.
        cross: ``Y^T X`` with the inputs Y that the original model has in the same places; None where the rows do not
            correspond (an expert may get other tokens), or where the original is not followed.
        original: ``Y^T Y``, None like ``cross``.
    """

    hessian: Hessian
    cross: Tensor | None = None
    original: Tensor | None = None

    def pair(self, x: Tensor, y: Tensor) -> None:
        """Adds rows x [..., K] and the original model's y [..., K] to cross and original."""
        assert self.cross is not None
        assert self.original is not None
        for xs, ys in zip(x.flatten(0, -2).split(ROWS), y.flatten(0, -2).split(ROWS), strict=True):
            ys = ys.to(self.cross)
            self.cross.addmm_(ys.T, xs.to(self.cross))
            self.original.addmm_(ys.T, ys)

    def __add__(self, other: Moments) -> Moments:
        hessian = self.hessian + other.hessian
        if self.cross is None or other.cross is None or self.original is None or other.original is None:
            return Moments(hessian)
        return Moments(hessian, self.cross + other.cross, self.original + other.original)

    def error(self, weight: Tensor, approximation: Tensor) -> float:
        """Relative error of the output with ``approximation``: against the original model's, where it is followed."""
        if self.cross is None or self.original is None:
            return output_error(weight, approximation, self.hessian.matrix)
        total = (weight @ self.original).mul_(weight).sum(dtype=torch.float64)
        mixed = (weight @ self.cross).mul_(approximation).sum(dtype=torch.float64)
        own = (approximation @ self.hessian.matrix).mul_(approximation).sum(dtype=torch.float64)
        return float(((total - 2 * mixed + own).clamp_min(0) / total.clamp_min(1e-30)).sqrt())


@dataclass(frozen=True)
class Collected:
    """Moments of a stage: one for each set of Linears that were fed the very same tensors."""

    moments: dict[tuple[str, ...], Moments]
    broken: dict[str, str]  # layer -> what was wrong with its inputs

    def keys(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The sets that a layer is in; layers in the same sets have the same moments."""
        return tuple(k for k in self.moments if name in k)

    def of(self, name: str) -> Moments | None:
        """The moments of a layer's inputs; None if it saw none, or bad ones."""
        parts = [self.moments[k] for k in self.keys(name)]
        if not parts or name in self.broken:
            return None
        total = sum(parts[1:], parts[0])
        return total if total.hessian.rows else None


def collect(
    model: nn.Module,
    block: nn.Module,
    targets: list[Target],
    hidden: list[Tensor],
    calls: list[Call],
    originals: Recorded | None,
    where: torch.device,
    on_nonfinite: str,
) -> Collected:
    collected = Collected({}, {})
    with closing(Inputs(model, targets)) as inputs:
        for i, (x, call) in enumerate(zip(hidden, calls, strict=True)):
            run(block, x, call, where)
            for tensor, names in inputs.take():
                moments = collected.moments.get(tuple(names))
                if moments is None:
                    moments = Moments(Hessian(tensor.shape[-1], where))
                    if originals is not None:
                        moments.cross = torch.zeros_like(moments.hessian.matrix)
                        moments.original = torch.zeros_like(moments.hessian.matrix)
                    collected.moments[tuple(names)] = moments
                try:
                    moments.hessian.add(tensor)
                except NonFiniteError as e:
                    if on_nonfinite == "raise":
                        raise NonFiniteError(
                            f"the inputs of {', '.join(names)} are not finite: {e}; layers before these "
                            "may be compressed already. on_nonfinite='fallback' rounds such layers to nearest"
                        ) from None
                    for name in names:
                        collected.broken[name] = "inputs not finite: rounded to nearest"
                    continue
                if originals is None or moments.cross is None:
                    continue
                before = [t for t, n in originals[i] if names[0] in n]
                # Rows correspond only where every token of the batch went through.
                if len(before) == 1 and before[0].shape == tensor.shape and _rows(tensor) == _rows(x):
                    moments.pair(tensor, before[0])
                else:
                    moments.cross = moments.original = None
    return collected


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def corrected_target(weight: Tensor, moments: Moments) -> Tensor:
    """The weight [N, K] float32 that, on the compressed model's inputs, comes closest to the original layer's output.

    Minimises ``|W' X - W X_original|^2 + ridge |W' - W|^2``, so that a layer also makes up for what the layers before
    it got wrong (the asymmetric calibration of GPTAQ, arXiv 2504.02692, in closed form).
    """
    h = moments.hessian.matrix
    if moments.cross is None:
        return weight
    regular = h.clone()
    ridge = CORRECTION_RIDGE * h.diagonal().mean()
    regular.diagonal().add_(ridge.clamp_min(torch.finfo(torch.float32).tiny))
    lower, info = torch.linalg.cholesky_ex(regular)
    if info:
        return weight
    # W' = W (cross + ridge) inv(H + ridge) = W + W (cross - H) inv(H + ridge)
    return weight + torch.cholesky_solve((weight @ (moments.cross - h)).T, lower).T
