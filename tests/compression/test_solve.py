"""The solver against brute force on small problems, and its guarantees on larger ones."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from sparse_marlin.compression import solve
from sparse_marlin.compression.hessian import inverse_factor
from sparse_marlin.compression.solve import (
    METHODS_24,
    METHODS_DENSE,
    PRUNE_ONLY,
    Pairs,
    Rounder,
    check_method,
    compress_weight,
    fit_scales,
    magnitude_mask,
    output_error,
    solving_order,
    sweep,
)
from sparse_marlin.scheme import Scheme, Sparsity


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


def test_pruning_a_quad_is_the_best_compensation() -> None:
    # After the first quad, every column that is still free must hold the least-squares answer.
    w, h = problem(6, 12)
    upper = inverse_factor(h, 0.0).upper
    pairs = Pairs(upper)
    new, errors = pairs.remove(0, w[:, :4].T)
    rest = w[:, 4:].T - upper[:4, 4:].T @ errors
    kept = torch.stack([pairs.kept(j) for j in range(4)], 1)
    for row in range(6):
        gone = [i for i in range(4) if not kept[row, i]]
        expected, cost = best_with_zeros(w[row].double(), h.double(), gone)
        torch.testing.assert_close(torch.cat([new, rest])[:, row].double(), expected, rtol=1e-3, atol=1e-5)
        others = [best_with_zeros(w[row].double(), h.double(), list(p))[1] for p in combinations(range(4), 2)]
        assert cost <= min(others) * 1.001


def test_sweep_leaves_its_input_alone() -> None:
    w, h = problem(1, 8)
    before = w.clone()
    upper = inverse_factor(h, 0.01).upper
    sweep(w, upper, Pairs(upper), None)
    assert torch.equal(w, before)


def test_blocks_of_columns_change_nothing() -> None:
    w, h = problem(5, 320)  # two whole blocks of columns and a part
    upper = inverse_factor(h, 0.01).upper
    scheme = Scheme(4, 32, None)
    scales = fit_scales(w, None, scheme, None)
    out = sweep(w, upper, None, Rounder(scheme, scales, torch.arange(w.shape[1])))
    plain = w.clone()
    for j in range(320):
        s = scales[:, j // 32].float()
        rounded = (plain[:, j] / s).round().clamp(-8, 7) * s
        plain[:, j + 1 :] -= torch.outer((plain[:, j] - rounded) / upper[j, j], upper[j, j + 1 :])
        plain[:, j] = rounded
    # Once a column has rounded the other way a row goes its own way, so compare what the sweep minimises.
    assert output_error(w, out, h) == pytest.approx(output_error(w, plain, h), rel=0.05)
    assert torch.equal(out[:, :128], plain[:, :128])


@pytest.mark.parametrize("width", [1, 4])
def test_the_order_keeps_quads_whole_and_begins_with_the_largest_inputs(width: int) -> None:
    _, h = problem(1, 64)
    h[8, 8] = h[4, 4]  # equal ones stay in order
    order = solving_order(h, width).view(-1, width)
    assert torch.equal(order, order[:, :1] + torch.arange(width)) and len(order.unique()) == 64
    sums = h.diagonal()[order].sum(1)
    assert (sums[:-1] >= sums[1:]).all()


@pytest.mark.parametrize("sparsity", ["2:4", None])
@pytest.mark.parametrize("group_size", [32, -1])
def test_where_columns_lie_does_not_matter_to_one_shot(sparsity: Sparsity | None, group_size: int) -> None:
    """Whole groups may change places, and columns within a dense group, or quads: each keeps its integers and scale."""
    w, h = problem(24, 128)
    h.diagonal().add_(torch.linspace(0, 1, 128) * h.diagonal().mean())  # no two columns alike
    scheme = Scheme(4, group_size, sparsity)
    g = torch.Generator().manual_seed(3)
    quads = torch.cat([32 * i + 4 * torch.randperm(8, generator=g) for i in torch.randperm(4, generator=g).tolist()])
    order = (quads.unsqueeze(1) + torch.arange(4)).flatten()
    a = compress_weight(w, h, scheme, "one-shot")
    b = compress_weight(w[:, order], h[order][:, order], scheme, "one-shot")
    same = (a.weight[:, order] - b.weight).abs() <= 1e-3 * a.weight.abs().max()
    assert same.float().mean() > 0.99  # all but what float32 sums of another order round elsewhere


def test_the_order_helps_where_inputs_differ() -> None:
    w, h = problem(64, 256, seed=3)
    gain = torch.linspace(0.05, 3, 256)
    h = h * gain * gain[:, None]  # the stored order begins with the smallest
    for sparsity in ("2:4", None):
        scheme = Scheme(4, 64, sparsity)  # type: ignore[arg-type]
        ordered = output_error(w, compress_weight(w, h, scheme, "one-shot").weight, h)
        stored = output_error(w, compress_weight(w, h, scheme, "two-pass" if sparsity else "gptq").weight, h)
        assert ordered < 0.97 * stored


def test_twins_lose_nothing() -> None:
    # Columns 2i and 2i + 1 are the same input: dropping one of each costs nothing if the other takes over its weight.
    g = torch.Generator().manual_seed(3)
    x = torch.randn(400, 32, generator=g).repeat_interleave(2, 1)
    w, h = torch.randn(16, 64, generator=g), x.T @ x
    assert output_error(w, compress_weight(w, h, Scheme(8, -1), "sparsegpt").weight, h) < 0.02


@pytest.mark.parametrize("method", [m for m in METHODS_24 if m != "magnitude+rtn"])
def test_calibrated_24_beats_magnitude(method: str) -> None:
    w, h = problem(48, 256)
    scheme = Scheme(4, 64)
    plain = output_error(w, compress_weight(w, h, scheme, "magnitude+rtn").weight, h)
    assert output_error(w, compress_weight(w, h, scheme, method).weight, h) < 0.9 * plain


def test_order_of_methods() -> None:
    w, h = problem(48, 256)
    error = {m: output_error(w, compress_weight(w, h, Scheme(4, 64), m).weight, h) for m in (*PRUNE_ONLY, "two-pass")}
    assert error["sparsegpt"] < error["wanda"] < error["magnitude"]
    assert error["sparsegpt"] < error["two-pass"] < 1.15 * error["sparsegpt"]
    dense = {m: output_error(w, compress_weight(w, h, Scheme(4, 64, None), m).weight, h) for m in METHODS_DENSE}
    assert dense["gptq"] < 0.9 * dense["rtn"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("method", METHODS_24)
def test_result_is_24_and_what_it_says(method: str, group_size: int, bits: int) -> None:
    w, h = problem(24, 256)
    s = compress_weight(w, h, Scheme(bits, group_size), method)
    assert s.packed is not None
    assert torch.equal(s.packed.dequantize(torch.float32), s.weight)
    assert ((s.weight.unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all()
    mask = s.packed.unpack()[1]
    assert mask is not None
    assert (s.weight[~mask] == 0).all()


def test_eight_bits_are_as_good_as_pruning_alone() -> None:
    w, h = problem(24, 256)
    pruned = output_error(w, compress_weight(w, h, Scheme(8, 128), "sparsegpt").weight, h)
    assert output_error(w, compress_weight(w, h, Scheme(8, 128), "two-pass").weight, h) < 1.01 * pruned


def test_rows_do_not_influence_each_other() -> None:
    w, h = problem(32, 128)
    whole = compress_weight(w, h, Scheme(4, 32), "two-pass").weight
    parts = torch.cat([compress_weight(part, h, Scheme(4, 32), "two-pass").weight for part in w.split(8)])
    assert ((whole - parts).abs() > 1e-6).float().mean() < 0.01  # summation order may differ, decisions hardly


def test_a_weight_that_is_24_already_keeps_its_mask() -> None:
    w, h = problem(16, 64)
    mask = magnitude_mask(w)
    upper = inverse_factor(h, 0.01).upper
    pairs = Pairs(upper)
    pruned = sweep(w * mask, upper, pairs, None)
    assert torch.equal(pairs.mask(), mask)
    torch.testing.assert_close(pruned, w * mask)


@pytest.mark.parametrize("sparsity", ["2:4", None])
def test_refitted_scales_are_better(sparsity: Sparsity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = problem(48, 256)
    monkeypatch.setattr(solve, "solving_order", lambda hessian, width: torch.arange(len(hessian)))
    monkeypatch.setattr(solve, "descend", lambda w, latent, mask, *_: (latent, mask))
    before = compress_weight(w, h, Scheme(4, 64, sparsity), "two-pass" if sparsity else "gptq")
    after = compress_weight(w, h, Scheme(4, 64, sparsity), "one-shot")
    assert output_error(w, after.weight, h) < output_error(w, before.weight, h)
    assert before.packed is not None
    assert after.packed is not None
    assert torch.equal(before.packed.qweight, after.packed.qweight)


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
        s = compress_weight(w, h, Scheme(4, 32, sparsity), method)  # type: ignore[arg-type]
        assert not s.weight[1].any()
        assert torch.isfinite(s.weight).all()


def test_magnitude_mask_breaks_ties_by_position() -> None:
    assert magnitude_mask(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


def test_methods_are_a_closed_set() -> None:
    for method, sparsity in (("gptq", "2:4"), ("two-pass", None), ("nothing", "2:4"), ("sparsegpt", "2:4")):
        with pytest.raises(ValueError, match="method must be one of"):
            check_method(method, sparsity, allow_prune_only=False)
    check_method("sparsegpt", "2:4", allow_prune_only=True)
