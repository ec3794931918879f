"""The second moment of a layer's inputs, and its inverse in the form that the solver walks through."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger("sparse_marlin")

ROWS = 8192  # rows multiplied at a time: bounds the float32 copy of half-precision inputs
_LEAST_DAMPING = 1e-6  # of columns without inputs
_MAX_DAMPING = 1e3


class NonFiniteError(ValueError):
    """Calibration inputs held NaN or infinity."""


class Hessian:
    """Accumulates ``X^T X`` [K, K] in float32 over calibration inputs X [rows, K]."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(in_features, in_features, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Adds inputs [..., K] of any floating dtype; leading dimensions are rows.

        Raises:
            ValueError: if x is not floating point, or its last dimension is not K.
            NonFiniteError: if x holds NaN or infinity; nothing is added then.
        """
        k = self.matrix.shape[0]
        if not x.is_floating_point():
            raise ValueError(f"calibration inputs must be floating-point activations, got {x.dtype}")
        if x.shape[-1:] != (k,):
            raise ValueError(f"calibration inputs must end in a dimension of in_features = {k}, got {list(x.shape)}")
        x = x.detach().reshape(-1, k)
        if not torch.isfinite(x).all():
            raise NonFiniteError("calibration inputs hold NaN or infinite values")
        for part in x.split(ROWS):
            part = part.to(self.matrix)
            self.matrix.addmm_(part.T, part)
        self.rows += x.shape[0]

    def __add__(self, other: Hessian) -> Hessian:
        both = Hessian(0, self.matrix.device)
        both.matrix = self.matrix + other.matrix
        both.rows = self.rows + other.rows
        return both


@dataclass(frozen=True)
class InverseFactor:
    """``upper`` is U [K, K], the upper Cholesky factor of ``inv(H + damping * mean(diag H) * I) = U^T U``.

    Row j of U, divided by U[j, j], is how an error made in column j is best compensated in the columns after it
    (Frantar et al., GPTQ, section 3.3, "Cholesky reformulation").
    """

    upper: Tensor
    damping: float


def damped(matrix: Tensor, damping: float) -> Tensor:
    """A Hessian [K, K] with ``damping`` times its mean diagonal added to that.

    The mean is over the columns that any input has reached. The others (zero diagonal) get a little in any case: less
    than those, so that no weight there is kept for one that counts.
    """
    h = matrix.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].double().mean()) if not dead.all() else 1.0
    diagonal += damping * mean
    diagonal[dead] = max(damping, _LEAST_DAMPING) * mean
    return h


def inverse_factor(matrix: Tensor, damping: float, order: Tensor | None = None) -> InverseFactor:
    """Factors the inverse of a Hessian [K, K] float32, raising the damping until it is positive definite.

    With an ``order`` [K], rows and columns come in that.
    """
    dead = matrix.diagonal() == 0
    if dead.any():
        log.info("%d of %d input columns were always zero in calibration", int(dead.sum()), len(dead))
    attempt = damping
    while True:
        h = damped(matrix, attempt)
        if order is not None:
            h = h[order.unsqueeze(1), order]
        # float32 is enough for a well-damped matrix; where its factorization fails, float64 may still succeed.
        for dtype in (torch.float32, torch.float64):
            upper = _factor(h.to(dtype))
            if upper is not None:
                if attempt > damping:
                    log.warning("the Hessian is close to singular: damping was raised from %g to %g", damping, attempt)
                return InverseFactor(upper.float(), attempt)
        attempt = max(attempt, 1e-4) * 10
        if attempt > _MAX_DAMPING:
            raise ValueError("the Hessian cannot be inverted with any damping: is it symmetric and finite?")


def _factor(h: Tensor) -> Tensor | None:
    lower, info = torch.linalg.cholesky_ex(h)
    if info:
        return None
    upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if info or not torch.isfinite(upper).all() else upper
