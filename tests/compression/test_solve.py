"""The solver against brute force on small problems, and its guarantees on larger ones."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from sparse_marlin.compression.hessian import inverse_factor
from sparse_marlin.compression.solve import (
    METHODS_24,
    METHODS_DENSE,
    PRUNE_ONLY,
    Choose24,
    check_method,
    feed_forward,
    fit_scales,
    magnitude_mask,
    output_error,
    prune_24,
    solve,
)
from sparse_marlin.scheme import Scheme


def problem(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the second moment of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g) * torch.rand(k, generator=g)
    x = torch.randn(8 * k, k, generator=g) @ mix / k**0.5
    return torch.randn(n, k, generator=g) * 0.02, x.T @ x


def best_with_zeros(w: Tensor, h: Tensor, zero: list[int]) -> tuple[Tensor, float]:
    """Least squares for one row w with the given entries zero: the row, and its error."""
    free = [i for i in range(len(w)) if i not in zero]
    new = torch.zeros_like(w)
    new[free] = torch.linalg.solve(h[free][:, free], h[free] @ w)
    d = w - new
    return new, float(d @ h @ d)


def test_feeding_forward_is_the_best_compensation() -> None:
    # With only the first columns changed, the columns after them must be the least-squares answer.
    w, h = (t.double() for t in problem(3, 12))
    upper = inverse_factor(h.float(), 0.0).upper.double()
    out = feed_forward(w, upper, lambda j, block: torch.zeros_like(block[0]) if j < 2 else block[0])
    for row in range(3):
        expected, _ = best_with_zeros(w[row], h, [0, 1])
        torch.testing.assert_close(out[row], expected, rtol=1e-3, atol=1e-5)


def test_feed_forward_leaves_its_input_alone() -> None:
    w, h = problem(1, 8)
    before = w.clone()
    feed_forward(w, inverse_factor(h, 0.01).upper, lambda _j, block: block[0] * 0)
    assert torch.equal(w, before)


def test_blocks_change_nothing() -> None:
    w, h = problem(5, 300)  # two whole blocks of columns and a part
    upper = inverse_factor(h, 0.01).upper
    out = feed_forward(w, upper, lambda _j, block: (block[0] * 100).round() / 100)
    plain = w.clone()
    for j in range(300):
        rounded = (plain[:, j] * 100).round() / 100
        plain[:, j + 1 :] -= torch.outer((plain[:, j] - rounded) / upper[j, j], upper[j, j + 1 :])
        plain[:, j] = rounded
    assert (out - plain).abs().max() < 0.011  # a column may round the other way; nothing else may differ
    assert ((out - plain).abs() > 1e-5).float().mean() < 0.02


def test_the_pair_that_goes_is_the_cheapest() -> None:
    w, h = (t.double() for t in problem(20, 8))
    choose = Choose24(inverse_factor(h.float(), 0.0).upper)
    kept = choose(0, w[:, :4].T.float().contiguous()).T
    for row in range(20):
        costs = {p: best_with_zeros(w[row], h, list(p))[1] for p in combinations(range(4), 2)}
        gone = tuple(i for i in range(4) if not kept[row, i])
        assert costs[gone] <= min(costs.values()) * 1.001


@pytest.mark.parametrize("method", [m for m in METHODS_24 if m != "magnitude+rtn"])
def test_calibrated_24_beats_magnitude(method: str) -> None:
    w, h = problem(48, 256)
    scheme = Scheme(4, 64)
    plain = output_error(w, solve(w, h, scheme, "magnitude+rtn").weight, h)
    assert output_error(w, solve(w, h, scheme, method).weight, h) < 0.9 * plain


def test_order_of_methods() -> None:
    w, h = problem(48, 256)
    error = {m: output_error(w, solve(w, h, Scheme(4, 64), m).weight, h) for m in (*PRUNE_ONLY, "two-pass")}
    assert error["sparsegpt"] < error["wanda"] < error["magnitude"]
    assert error["sparsegpt"] < error["two-pass"] < 1.15 * error["sparsegpt"]
    dense = {m: output_error(w, solve(w, h, Scheme(4, 64, None), m).weight, h) for m in METHODS_DENSE}
    assert dense["gptq"] < 0.9 * dense["rtn"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("method", METHODS_24)
def test_result_is_24_and_what_it_says(method: str, group_size: int, bits: int) -> None:
    w, h = problem(24, 256)
    s = solve(w, h, Scheme(bits, group_size), method)
    assert s.packed is not None
    assert torch.equal(s.packed.dequantize(torch.float32), s.weight)
    assert ((s.weight.unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all()
    mask = s.packed.unpack()[1]
    assert mask is not None
    assert (s.weight[~mask] == 0).all()


def test_eight_bits_are_as_good_as_pruning_alone() -> None:
    w, h = problem(24, 256)
    pruned = output_error(w, solve(w, h, Scheme(8, 128), "sparsegpt").weight, h)
    assert output_error(w, solve(w, h, Scheme(8, 128), "two-pass").weight, h) < 1.01 * pruned


def test_rows_do_not_influence_each_other() -> None:
    w, h = problem(32, 128)
    whole = solve(w, h, Scheme(4, 32), "two-pass").weight
    parts = torch.cat([solve(part, h, Scheme(4, 32), "two-pass").weight for part in w.split(8)])
    assert ((whole - parts).abs() > 1e-6).float().mean() < 0.01  # summation order may differ, decisions hardly


def test_a_weight_that_is_24_already_keeps_its_mask() -> None:
    w, h = problem(16, 64)
    mask = magnitude_mask(w)
    found, pruned = prune_24(w * mask, inverse_factor(h, 0.01).upper)
    assert torch.equal(found, mask)
    torch.testing.assert_close(pruned, w * mask)


def test_scales_minimise_the_rounding_error() -> None:
    w, _ = problem(8, 128)
    w[:, ::16] *= 4  # outliers, so that clipping pays
    scheme = Scheme(4, 64, None)
    scales = fit_scales(w, None, scheme, None)
    groups = w.view(8, 2, 64)

    def error(s: Tensor) -> Tensor:
        s = s.to(torch.float16).float().unsqueeze(2)
        return ((groups / s).round().clamp(-8, 7) * s - groups).square().sum(2)

    found = error(scales)
    largest = groups.abs().amax(2)
    for clip in torch.linspace(0.4, 1.2, 81):
        assert (found <= error(largest * clip / 7.5) * 1.02).all()


def test_a_row_of_zeros_stays_zero() -> None:
    w, h = problem(4, 64)
    w[1] = 0
    for method, sparsity in (("two-pass", "2:4"), ("gptq", None), ("rtn", None)):
        s = solve(w, h, Scheme(4, 32, sparsity), method)  # type: ignore[arg-type]
        assert not s.weight[1].any()
        assert torch.isfinite(s.weight).all()


def test_magnitude_mask_breaks_ties_by_position() -> None:
    assert magnitude_mask(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


def test_methods_are_a_closed_set() -> None:
    for method, sparsity in (("gptq", "2:4"), ("two-pass", None), ("nothing", "2:4"), ("sparsegpt", "2:4")):
        with pytest.raises(ValueError, match="method must be one of"):
            check_method(method, sparsity, allow_prune_only=False)
    check_method("sparsegpt", "2:4", allow_prune_only=True)
