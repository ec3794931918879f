"""Coordinate descent on a compressed weight: what was chosen early is chosen anew, now that all the rest is known.

The solver walks through the columns once, and each choice can only be answered by the columns that are still to come.
Here every weight is on its grid already. One coordinate after the other, a single weight or a quad whose mask may
change, takes the values that are best for the squared error of the layer's output with all others fixed (as QuantEase,
arXiv 2309.01885, does for quantization). The error falls with every change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scheme import Scheme

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # of a quad
_BLOCK = 128  # columns that hear of each other's changes at once; the rest of the matrix does once per block
_LEAST_GAIN = 1e-6  # of a coordinate's part of the error, for a change: less may be rounding


def descend(
    w: Tensor, latent: Tensor, mask: Tensor | None, scales: Tensor, scheme: Scheme, hessian: Tensor, order: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Goes through all coordinates once.

    Args:
        w: [N, K] float32, the weight that is aimed at.
        latent: [N, K] float32, what was rounded, in units of the scales; zero where pruned.
        mask: [N, K] bool of kept weights, two of each quad, or None.
        scales: [N, G].
        scheme: where the groups are.
        hessian: [K, K] float32, damped.
        order: [K], the order in which columns are visited; quads stay together.

    Returns:
        The new latent and mask.
    """
    grid = _Grid(scheme, scales, order)
    h = hessian[order.unsqueeze(1), order]
    latents = latent.T[order].contiguous()  # one column is one run of memory
    kept = None if mask is None else mask.T[order].contiguous()
    quads = None if mask is None else _Quads(grid, h)
    values = grid.value(slice(None), latents)
    force = h @ (w.T[order] - values)  # [K, N]: half the error's slope, downwards
    width = 1 if quads is None else 4
    for start in range(0, len(h), _BLOCK):
        end = min(start + _BLOCK, len(h))
        own, block = h[start:end, start:end], force[start:end].clone()
        moved = torch.zeros_like(block)
        for i in range(0, end - start, width):
            here, there = slice(i, i + width), slice(start + i, start + i + width)
            curvature, old = own[here, here], values[there]
            pull = torch.addmm(block[here], curvature, old)  # the force if these weights were zero
            if quads is None or kept is None:
                latents[there] = grid.clamp(pull / curvature * grid.inverse(start + i))
            else:
                latents[there], kept[there] = quads.choose(start + i, pull, old, latents[there], kept[there])
            moved[here] = grid.value(start + i, latents[there]) - old
            block[i + width :].addmm_(own[here, i + width :].T, moved[here], alpha=-1)
        force[end:].addmm_(h[start:end, end:].T, moved, alpha=-1)
    back = order.argsort()
    return latents[back].T.contiguous(), None if kept is None else kept[back].T.contiguous()


class _Grid:
    """What the columns, in the order in which they are visited, can be."""

    def __init__(self, scheme: Scheme, scales: Tensor, order: Tensor) -> None:
        self._groups = (torch.zeros_like(order) if scheme.group_size == -1 else order // scheme.group_size).tolist()
        self._scales = scales.float().T.contiguous()
        self._inverse = torch.where(self._scales == 0, 0.0, 1.0 / self._scales)
        self._low, self._high = -scheme.zero_code, scheme.max_code - scheme.zero_code

    def inverse(self, j: int) -> Tensor:
        """[N] one over the scales of column j; zero for zero."""
        return self._inverse[self._groups[j]]

    def clamp(self, latent: Tensor) -> Tensor:
        return latent.clamp_(self._low, self._high)

    def value(self, j: int | slice, latent: Tensor) -> Tensor:
        """What latents in column j, or in its quad, or in these columns, come back as."""
        return self.clamp(latent.round()).mul_(self._scales[self._groups[j]])


class _Quads:
    """Chooses which two weights of a quad are kept, and their values.

    Of each pair one weight is rounded, and the other one makes the best of it: either way round, so that there are
    twelve candidates.

    Args:
        grid: of the columns.
        h: [K, K], in the same order.
    """

    def __init__(self, grid: _Grid, h: Tensor) -> None:
        self._grid = grid
        self._first, self._second = torch.tensor([*PAIRS, *(p[::-1] for p in PAIRS)], device=h.device).T.contiguous()
        self._curvature = torch.stack([h[i : i + 4, i : i + 4] for i in range(0, len(h), 4)])  # [K/4, 4, 4]
        self._pp, self._qq, self._pq = (
            self._curvature[:, a, b].unsqueeze(2)  # [K/4, 12, 1]
            for a, b in ((self._first,) * 2, (self._second,) * 2, (self._first, self._second))
        )
        self._determinant = self._pp * self._qq - self._pq.square()

    def choose(self, j: int, pull: Tensor, old: Tensor, latent: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """New latents and mask of the quad that begins with column j; the present ones where none is better.

        Args:
            j: a multiple of 4.
            pull: [4, N] half the error's slope, downwards, where all four weights are zero.
            old: [4, N] their values.
            latent, kept: [4, N], what is there.
        """
        x, y, costs = self.costs(j, pull)
        cost, best = costs.min(0, keepdim=True)
        now = (old * torch.addmm(pull, self._curvature[j // 4], old, beta=-2)).sum(0)
        better = cost < now - _LEAST_GAIN * now.abs()
        at = torch.cat([self._first[best], self._second[best]])
        found = torch.zeros_like(latent).scatter_(0, at, torch.cat([x.gather(0, best), y.gather(0, best)]))
        chosen = torch.zeros_like(kept).scatter_(0, at, True)
        return torch.where(better, found, latent), torch.where(better, chosen, kept)

    def costs(self, j: int, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The twelve candidates, latents of their first and second weights [12, N], and the error of each [12, N]."""
        i, grid, units = j // 4, self._grid, self._grid.inverse(j)
        pp, qq, pq = self._pp[i], self._qq[i], self._pq[i]
        p, q = pull[self._first], pull[self._second]
        x = grid.clamp((qq * p - pq * q).div_(self._determinant[i]).mul_(units))
        a = grid.value(j, x)
        y = grid.clamp((q - pq * a).div_(qq).mul_(units))
        b = grid.value(j, y)
        return x, y, (pp * a - 2 * p) * a + (qq * b - 2 * q + 2 * pq * a) * b
