"""Coordinate descent on a compressed weight: what was chosen early is chosen anew, now that all the rest is known.

The solver walks through the columns once, and each choice can only be answered by the columns that are still to come.
Here every weight is on its grid already. One coordinate after the other, a single weight or a quad whose mask may
change, takes the values that are best for the squared error of the layer's output with all others fixed (as QuantEase,
arXiv 2309.01885, does for quantization). No change makes the error larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scheme import Scheme

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # of a quad
_BLOCK = 128  # columns that hear of each other's changes at once; the rest of the matrix does once per block


def quads_of(matrix: Tensor) -> Tensor:
    """The quads' own blocks [K/4, 4, 4] of a matrix [K, K]."""
    return torch.stack([matrix[i : i + 4, i : i + 4] for i in range(0, len(matrix), 4)])


def pair_inverses(quads: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inverses [[pp, pq], [pq, qq]] of what quads [K/4, 4, 4] have of each pair: pp, qq and pq [K/4, 6] float32."""
    quads = quads.double()
    pp, qq, pq = quads[:, first, first], quads[:, second, second], quads[:, first, second]
    determinant = pp * qq - pq * pq
    return (qq / determinant).float(), (pp / determinant).float(), (-pq / determinant).float()


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
    grid = Grid(scheme, scales, order)
    h = hessian[order.unsqueeze(1), order] / hessian.diagonal().mean()  # whatever the inputs' unit, no overflow
    latents = latent.T.index_select(0, order)  # one column is one run of memory
    kept = None if mask is None else mask.T.index_select(0, order)
    quads = None if mask is None else _Quads(grid, h)
    values = grid.value(slice(None), latents)
    force = h @ (w.T.index_select(0, order) - values)  # [K, N]: half the error's slope, downwards
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
    del values, force
    back = order.argsort()
    return latents.T.index_select(1, back), None if kept is None else kept.T.index_select(1, back)


class Grid:
    """What columns can be, which come in some order: multiples of their groups' scales.

    Args:
        scheme: where the groups are, and the integers.
        scales: [N, G].
        order: [K] of the columns.
    """

    def __init__(self, scheme: Scheme, scales: Tensor, order: Tensor) -> None:
        self._groups = (torch.zeros_like(order) if scheme.group_size == -1 else order // scheme.group_size).tolist()
        self._scales = scales.float().T.contiguous()
        self._inverse = torch.where(self._scales == 0, 0.0, 1.0 / self._scales)
        self._low, self._high = -scheme.zero_code, scheme.max_code - scheme.zero_code

    def inverse(self, j: int) -> Tensor:
        """[N] one over the scales of the j-th column; zero for zero."""
        return self._inverse[self._groups[j]]

    def clamp(self, latent: Tensor) -> Tensor:
        return latent.clamp_(self._low, self._high)

    def value(self, j: int | slice, latent: Tensor) -> Tensor:
        """What latents in the j-th column, or in its quad, or in these columns, come back as."""
        return self.clamp(latent.round()).mul_(self._scales[self._groups[j]])


class _Quads:
    """Chooses which two weights of a quad are kept, and their values.

    Of each pair the first weight is rounded, and the second one makes the best of it.

    Args:
        grid: of the columns.
        h: [K, K], in the same order.
    """

    def __init__(self, grid: Grid, h: Tensor) -> None:
        self._grid = grid
        self._first, self._second = torch.tensor(PAIRS, device=h.device).T.contiguous()
        self._curvature = quads_of(h)
        self._pp, self._qq, self._pq = (
            self._curvature[:, a, b].unsqueeze(2)  # [K/4, 6, 1]
            for a, b in ((self._first,) * 2, (self._second,) * 2, (self._first, self._second))
        )
        inverse_pp, _, inverse_pq = pair_inverses(self._curvature, self._first, self._second)
        self._inverse_pp, self._inverse_pq = inverse_pp.unsqueeze(2), inverse_pq.unsqueeze(2)

    def choose(self, j: int, pull: Tensor, old: Tensor, latent: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """New latents and mask of the quad that begins with column j; the present ones where none is better.

        Args:
            j: a multiple of 4.
            pull: [4, N] half the error's slope, downwards, where all four weights are zero.
            old: [4, N] their values.
            latent, kept: [4, N], what is there.
        """
        first, second, costs = self.candidates(j, pull)
        cost, best = costs.min(0, keepdim=True)
        better = cost < (old * torch.addmm(pull, self._curvature[j // 4], old, beta=-2)).sum(0)
        at = torch.cat([self._first[best], self._second[best]])
        found = torch.zeros_like(latent).scatter_(0, at, torch.cat([first.gather(0, best), second.gather(0, best)]))
        chosen = torch.zeros_like(kept).scatter_(0, at, True)
        return torch.where(better, found, latent), torch.where(better, chosen, kept)

    def candidates(self, j: int, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each pair, the latents of its first and second weights [6, N], and the error with these [6, N]."""
        i, grid, units = j // 4, self._grid, self._grid.inverse(j)
        pp, qq, pq = self._pp[i], self._qq[i], self._pq[i]
        p, q = pull[self._first], pull[self._second]
        first = grid.clamp((self._inverse_pp[i] * p + self._inverse_pq[i] * q).mul_(units))
        first_value = grid.value(j, first)
        second = grid.clamp((q - pq * first_value).div_(qq).mul_(units))
        second_value = grid.value(j, second)
        error = (pp * first_value - 2 * p) * first_value + (
            qq * second_value - 2 * q + 2 * pq * first_value
        ) * second_value
        return first, second, error
