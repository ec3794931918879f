"""compress(): one layer. What comes out is 2:4, multiplies as its dequantized weight, and errs less than rounding."""

from __future__ import annotations

import logging

import pytest
import torch
from naive import max_nonzeros_per_quad
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, compress
from sparse_marlin.compression import Hessian, NonFiniteError

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

SETTINGS = [
    {"sparsity": "2:4", "bits": 4, "group_size": 128},
    {"sparsity": "2:4", "bits": 4, "group_size": -1},
    {"sparsity": "2:4", "bits": 8, "group_size": 64},
    {"sparsity": None, "bits": 4, "group_size": 32},
    {"sparsity": None, "bits": 8, "group_size": -1},
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))

METHODS_24 = ("one-shot", "two-pass", "one-loop", "wanda+rtn", "magnitude+rtn")
METHODS_DENSE = ("one-shot", "gptq", "rtn")
METHODS = [*(("2:4", m) for m in METHODS_24), *((None, m) for m in METHODS_DENSE)]
SOLVERS = [m for m in METHODS if not m[1].endswith("rtn")]
each_method = pytest.mark.parametrize(("sparsity", "method"), METHODS, ids=str)


def linear(n: int = 64, k: int = 256, bias: bool = True, dtype: torch.dtype = FP32) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias)
    nn.init.normal_(layer.weight)
    return layer.to(dtype)


def correlated(rows: int, k: int) -> Tensor:
    """Inputs of a few strong directions, as activations have them, and of very different column sizes."""
    mixed = torch.randn(rows, k // 4) @ torch.randn(k // 4, k) + 0.3 * torch.randn(rows, k)
    return mixed * torch.logspace(-1, 1, k)[torch.randperm(k)]


def output_error(layer: CompressedLinear, original: nn.Linear, x: Tensor) -> float:
    """Relative error of the outputs, without the bias, in float64."""
    x, w = x.double(), original.weight.detach().double()
    return float((x @ (layer.dequantize().double() - w).T).norm() / (x @ w.T).norm())


def check_layer(layer: CompressedLinear, original: nn.Linear, sparsity: str | None) -> None:
    """What holds for every compressed layer, whatever made it."""
    layer.packed.check_indices()
    w = layer.dequantize()
    assert w.isfinite().all() and layer.scales.isfinite().all()
    if sparsity == "2:4":
        assert max_nonzeros_per_quad(w) <= 2
        mask = layer.packed.unpack()[1]
        assert mask is not None and not w[~mask].any()
        assert (mask.view(w.shape[0], -1, 4).sum(-1) == 2).all()
    assert (layer.in_features, layer.out_features) == (original.in_features, original.out_features)
    assert layer.qweight.device == original.weight.device
    x = torch.randn(17, layer.in_features).to(original.weight.dtype)
    bias = original.bias
    truth = x.double() @ w.double().T + (0 if bias is None else bias.detach().double())
    plain = nn.functional.linear(x, w.to(x.dtype), bias).detach()
    y = layer(x)
    assert y.dtype == plain.dtype
    # The smallest step of the dtype, for layers small enough that torch's own result happens to be exact.
    step = torch.finfo(x.dtype).eps * truth.norm()
    assert (y.double() - truth).norm() <= 2 * (plain.double() - truth).norm() + step


# ------------------------------------------------------------------------------------------------------ the contract


@each_setting
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_layer_of_any_dtype(setting: dict, dtype: torch.dtype, calibrated: bool) -> None:
    original = linear(dtype=dtype)
    before = {n: t.clone() for n, t in original.state_dict().items()}
    x = correlated(200, 256).to(dtype)
    layer = compress(original, **setting, calibration=x if calibrated else None)
    check_layer(layer, original, setting["sparsity"])
    assert layer.scheme.num_bits == setting["bits"] and layer.scheme.group_size == setting["group_size"]
    assert layer.scheme.sparsity == setting["sparsity"]
    assert layer.scales.dtype == dtype
    assert layer.bias is not None and torch.equal(layer.bias, original.bias)
    assert all(torch.equal(t, before[n]) for n, t in original.state_dict().items())
    # On other inputs than those it is calibrated on, which are fewer than its columns: one scale per channel fits them.
    assert output_error(layer, original, torch.randn(64, 256)) < {("2:4", 4): 0.65, ("2:4", 8): 0.6}.get(
        (setting["sparsity"], setting["bits"]), 0.2 if setting["bits"] == 4 else 0.02
    )


@each_method
def test_every_method_keeps_the_contract(sparsity: str | None, method: str) -> None:
    original = linear(48, 192)
    layer = compress(original, sparsity, group_size=64, calibration=correlated(500, 192), method=method)
    check_layer(layer, original, sparsity)


def test_a_layer_without_bias_stays_without() -> None:
    assert compress(linear(bias=False)).bias is None


def test_a_bias_is_not_shared() -> None:
    original = linear()
    layer = compress(original)
    with torch.no_grad():
        original.bias.add_(1)
    assert layer.bias is not None and not torch.equal(layer.bias, original.bias)


def test_training_mode_is_kept() -> None:
    assert compress(linear().train()).training
    assert not compress(linear().eval()).training


def test_a_subclass_of_linear_is_taken() -> None:
    assert isinstance(compress(nn.modules.linear.NonDynamicallyQuantizableLinear(64, 8)), CompressedLinear)


# ----------------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["auto", "one-shot", "two-pass", "one-loop"])
def test_calibration_beats_magnitude_and_rounding(bits: int, method: str) -> None:
    original, x = linear(), correlated(2048, 256)
    baseline = compress(original, bits=bits)
    calibrated = compress(original, bits=bits, calibration=x, method=method)
    held_out = x[1024:]
    assert output_error(calibrated, original, held_out) < 0.8 * output_error(baseline, original, held_out)


def test_dense_calibration_beats_rounding() -> None:
    original, x = linear(), correlated(2048, 256)
    errors = {m: output_error(compress(original, None, calibration=x, method=m), original, x) for m in METHODS_DENSE}
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["one-shot"] <= errors["gptq"]


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(("sparsity", "other"), [("2:4", "two-pass"), (None, "gptq")])
def test_refitted_scales_do_not_hurt(sparsity: str | None, other: str, group_size: int) -> None:
    """one-shot fits the scales once more, to the integers that were chosen."""
    original, x = linear(), correlated(2048, 256)
    refitted, plain = (
        output_error(compress(original, sparsity, group_size=group_size, calibration=x, method=m), original, x)
        for m in ("one-shot", other)
    )
    assert refitted <= 1.001 * plain


def test_pruning_and_rounding_errors_are_both_fed_forward() -> None:
    """With every input there twice, a solver that compensates in all columns left makes almost no error."""
    half = torch.randn(512, 64)
    x = torch.stack([half, half], -1).flatten(1)  # columns 2i and 2i + 1 are the same input
    original = linear(32, 128)
    solved = compress(original, bits=8, group_size=-1, calibration=x)
    # Keeping one of each equal pair loses nothing, magnitude pruning often drops both.
    assert output_error(solved, original, x) < 0.1
    assert output_error(compress(original, bits=8, group_size=-1), original, x) > 0.2


def test_important_columns_are_kept() -> None:
    """Two columns of each quad carry a hundred times the signal: they are the ones to keep."""
    size = torch.tensor([0.01, 1.0, 0.01, 1.0]).repeat(32)
    x = torch.randn(1000, 128) * size
    original = linear(32, 128)
    original.weight.data = original.weight.data.sign() * (1 + torch.rand(32, 128))  # no weight is negligible
    mask = compress(original, calibration=x).packed.unpack()[1]
    assert mask is not None and (mask == (size == 1)).all()


def test_magnitude_pruning_keeps_the_largest() -> None:
    original = linear(32, 128)
    mask = compress(original).packed.unpack()[1]
    magnitudes = original.weight.detach().abs().view(32, 32, 4)
    assert mask is not None
    kept = magnitudes.masked_fill(~mask.view(32, 32, 4), torch.inf).min(-1).values
    dropped = magnitudes.masked_fill(mask.view(32, 32, 4), 0).max(-1).values
    assert (kept >= dropped).all()


def test_a_representable_weight_comes_back_unchanged() -> None:
    """A weight that is already 2:4 on a 4-bit grid loses nothing."""
    codes = torch.randint(-7, 8, (32, 128)).float()
    codes[:, 0] = 7  # the grid's largest value is there, so that the scale can be found
    codes.view(32, 32, 4)[..., 2:] = 0
    scale = 2.0 ** torch.randint(-3, 3, (32, 1))
    original = nn.Linear(128, 32, bias=False)
    original.weight.data = codes * scale
    for calibration in (None, torch.randn(600, 128)):
        w = compress(original, calibration=calibration).dequantize(FP32)
        torch.testing.assert_close(w, original.weight.detach(), rtol=2e-3, atol=0)


# ------------------------------------------------------------------------------------------------ forms of calibration


def test_every_form_of_calibration_is_the_same() -> None:
    original, x = linear(32, 128), correlated(240, 128)
    hessian = Hessian(128)
    hessian.add(x)
    expected = compress(original, calibration=x)
    forms = [x.view(4, 60, 128), x.view(2, 2, 60, 128), hessian, [x], iter([x]), (x for _ in range(1))]
    for form in forms:
        assert same_bits(compress(original, calibration=form), expected)
    parts = compress(original, calibration=[x[:100], x[100:101], x[101:].view(1, -1, 128)])
    assert output_error(parts, original, x) == pytest.approx(output_error(expected, original, x), rel=0.02)
    strided = torch.nn.functional.pad(x, (3, 5))[:, 3:131]
    assert same_bits(compress(original, calibration=strided), expected)
    assert same_bits(compress(original, calibration=x[0]), compress(original, calibration=x[:1]))


def test_calibration_of_another_dtype() -> None:
    original, x = linear(32, 128), correlated(400, 128)
    expected = output_error(compress(original, calibration=x), original, x)
    for dtype in (BF16, torch.float64):
        layer = compress(original, calibration=x.to(dtype))
        assert output_error(layer, original, x) == pytest.approx(expected, rel=0.05)


def test_half_precision_inputs_do_not_overflow() -> None:
    """Their squares exceed float16 by far."""
    x = (1000 * correlated(512, 128)).clamp(-60000, 60000).half()
    original = linear(32, 128, dtype=FP16)
    layer = compress(original, calibration=x)
    check_layer(layer, original, "2:4")
    assert output_error(layer, original, x) < output_error(compress(original), original, x)


def same_bits(a: CompressedLinear, b: CompressedLinear) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


@each_method
def test_the_same_call_gives_the_same_bits(sparsity: str | None, method: str) -> None:
    original, x = linear(48, 128), correlated(300, 128)
    first = compress(original, sparsity, calibration=x, method=method)
    torch.manual_seed(99)  # nothing may depend on it
    assert same_bits(compress(original, sparsity, calibration=x, method=method), first)


def test_the_random_state_is_left_alone() -> None:
    original, x = linear(48, 128), correlated(300, 128)
    state = torch.get_rng_state()
    compress(original, calibration=x)
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------- degenerate calibration


def degenerate(k: int) -> dict[str, Tensor]:
    x = torch.randn(400, k)
    dead = x.clone()
    dead[:, ::3] = 0
    dead_quad = x.clone()
    dead_quad[:, 8:16] = 0
    tiny, huge = x * 1e-12, x * 1e12
    return {
        "rank 1": torch.randn(400, 1) @ torch.randn(1, k),
        "one row": torch.randn(1, k),
        "all rows equal": torch.randn(1, k).expand(400, k),
        "duplicated columns": x[:, torch.arange(k) // 2],
        "all columns equal": x[:, :1].expand(400, k),
        "constant": torch.ones(400, k),
        "dead columns": dead,
        "dead quads": dead_quad,
        "one live column": torch.nn.functional.pad(x[:, :1], (5, k - 6)),
        "all zero": torch.zeros(400, k),
        "fewer rows than columns": x[: k // 8],
        "one outlier column": x * torch.where(torch.arange(k) == 7, 1e4, 1.0),
        "one outlier row": x * torch.where(torch.arange(400) == 7, 1e4, 1.0).unsqueeze(1),
        "tiny": tiny,
        "huge": huge,
    }


@pytest.mark.parametrize(("sparsity", "method"), SOLVERS, ids=str)
@pytest.mark.parametrize("what", degenerate(8))
def test_degenerate_calibration_finishes(sparsity: str | None, method: str, what: str) -> None:
    original, x = linear(16, 128), degenerate(128)[what]
    for damping in (0.01, 0.0):
        layer = compress(original, sparsity, calibration=x, method=method, damping=damping)
        check_layer(layer, original, sparsity)
        # Nothing may blow up: never much worse than leaving the layer out altogether.
        w = original.weight.detach()
        assert (layer.dequantize() - w).norm() <= 3 * w.norm() * (1 if damping else 10)
        assert output_error(layer, original, x + 0.0) <= 1.0 or not x.any()


@pytest.mark.parametrize("what", ["rank 1", "duplicated columns", "all columns equal"])
def test_raised_damping_is_logged(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_marlin"):
        compress(linear(16, 128), calibration=degenerate(128)[what], damping=0.0)
    assert any("damping" in r.getMessage() and r.levelno >= logging.WARNING for r in caplog.records)


def test_dead_columns_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_marlin"):
        compress(linear(16, 128), calibration=degenerate(128)["dead columns"])
    assert any("43 of 128" in r.getMessage() for r in caplog.records)


def test_no_calibration_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_marlin"):
        compress(linear(16, 128))
    assert any("no calibration" in r.getMessage() for r in caplog.records)


def test_columns_that_never_fire_do_not_spoil_the_others() -> None:
    x = correlated(1000, 128)
    x[:, 64:] = 0
    original = linear(32, 128)
    solved = compress(original, calibration=x)
    assert output_error(solved, original, x) < output_error(compress(original), original, x)


# ------------------------------------------------------------------------------------------------- unusual weights


@pytest.mark.parametrize(
    ("k", "requested", "taken"),
    [(576, 128, 64), (96, 128, 32), (100, 64, -1), (1568, 128, 32), (64, 128, 64), (12, 32, -1)],
)
def test_a_group_size_that_does_not_divide_gets_smaller_and_is_logged(
    k: int, requested: int, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    original = linear(8, k)
    with caplog.at_level(logging.INFO, "sparse_marlin"):
        layer = compress(original, group_size=requested)
    assert layer.scheme.group_size == taken
    assert any(str(k) in r.getMessage() and str(taken) in r.getMessage() for r in caplog.records)
    check_layer(layer, original, "2:4")


@pytest.mark.parametrize(("n", "k"), [(1, 4), (1, 128), (3, 132), (7, 36), (130, 64), (1, 8)])
@pytest.mark.parametrize("calibrated", [True, False])
def test_small_and_odd_sizes(n: int, k: int, calibrated: bool) -> None:
    original = linear(n, k)
    check_layer(compress(original, calibration=torch.randn(50, k) if calibrated else None), original, "2:4")


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (5, 33), (4, 126)])
@pytest.mark.parametrize("bits", [4, 8])
def test_dense_layers_of_any_width(n: int, k: int, bits: int) -> None:
    original = linear(n, k)
    check_layer(compress(original, None, bits, calibration=torch.randn(50, k)), original, None)


def unusual_weights() -> dict[str, Tensor]:
    w = torch.randn(16, 128)
    zero_rows, zero_groups, outlier = w.clone(), w.clone(), w.clone()
    zero_rows[::2] = 0
    zero_groups[:, 32:64] = 0
    outlier[3, 5] = 1e4
    return {
        "zero": torch.zeros(16, 128),
        "zero rows": zero_rows,
        "zero groups": zero_groups,
        "constant": torch.full((16, 128), 0.5),
        "an outlier": outlier,
        "one row repeated": w[:1].repeat(16, 1),
        "small": w * 1e-4,
        "large": w * 1e3,
        "positive": w.abs(),
    }


@each_method
@pytest.mark.parametrize("what", unusual_weights())
def test_unusual_weights(sparsity: str | None, method: str, what: str) -> None:
    original = linear(16, 128)
    original.weight.data = unusual_weights()[what]
    x = correlated(300, 128)
    layer = compress(original, sparsity, group_size=32, calibration=x, method=method)
    check_layer(layer, original, sparsity)
    if what == "zero":
        assert not layer.dequantize().any()
    else:
        assert output_error(layer, original, x) < 0.9


@pytest.mark.parametrize("factor", [1e-12, 1e-9, 1e-3, 1e3, 1e7, 1e12])
def test_weights_beyond_float16_are_refused_and_right_in_bfloat16(factor: float) -> None:
    """A float32 layer may hold what float16 scales cannot: never silently zeros or infinities."""
    original = linear(16, 128)
    original.weight.data.mul_(factor)
    x = torch.randn(300, 128)
    if not 1e-5 <= factor <= 1e5:
        with pytest.raises(ValueError, match=r"float16.*dtype=torch\.bfloat16"):
            compress(original, calibration=x)
    layer = compress(original, calibration=x, dtype=BF16 if not 1e-5 <= factor <= 1e5 else None)
    check_layer(layer, original, "2:4")
    assert output_error(layer, original, x) < 0.9


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_scales_have_the_precision_asked_for(dtype: torch.dtype) -> None:
    layer = compress(linear(16, 128), dtype=dtype)
    assert layer.scheme.dtype == dtype
    assert layer.scales.dtype == FP32  # the layer computes in its own dtype
    assert torch.equal(layer.scales.to(dtype).float(), layer.scales)


def test_the_default_precision_of_scales_is_the_layers() -> None:
    for dtype, scale in ((FP16, FP16), (BF16, BF16), (FP32, FP16)):
        assert compress(linear(16, 128, dtype=dtype)).scheme.dtype == scale


# --------------------------------------------------------------------------------------------------- bad activations


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_activations_that_are_not_finite_are_refused(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(5, 128).to(dtype)
    x[4, 127] = bad
    for form in (x, [torch.randn(3, 128), x]):
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            compress(linear(16, 128), calibration=form)


def test_a_hessian_refuses_and_keeps_what_it_had() -> None:
    hessian = Hessian(8)
    hessian.add(torch.ones(2, 8))
    before = hessian.matrix.clone()
    with pytest.raises(NonFiniteError):
        hessian.add(torch.full((2, 8), float("nan")))
    assert torch.equal(hessian.matrix, before) and hessian.rows == 2


def test_a_hessian_is_the_second_moment() -> None:
    parts = [torch.randn(3, 5, 8), torch.randn(8), torch.randn(0, 8), torch.randn(9000, 8).half()]
    hessian = Hessian(8)
    for x in parts:
        hessian.add(x)
    rows = torch.cat([x.double().reshape(-1, 8) for x in parts])
    assert hessian.rows == len(rows)
    torch.testing.assert_close(hessian.matrix.double(), rows.T @ rows, rtol=1e-5, atol=1e-2)
