"""CompressedLinear as a drop-in for nn.Linear: values, strides, bias, dtypes, autocast, saving and copying."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from naive import Example, example
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, Scheme
from sparse_marlin.linear import Adapter, compressed_layers
from sparse_marlin.scheme import AdapterScheme

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = (FP16, BF16, FP32)

SCHEMES = [
    Scheme(4, 64, "2:4"),
    Scheme(8, 64, "2:4"),
    Scheme(4, 32, None),
    Scheme(8, -1, None),
    Scheme(4, 64, None, False),
    Scheme(8, 32, None, False),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def with_dtype(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    return Scheme.from_dict({**scheme.to_dict(), "dtype": str(dtype).removeprefix("torch.")})


def layer_of(e: Example, bias: Tensor | None = None) -> CompressedLinear:
    return CompressedLinear(e.packed(), bias)


def integers(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Small integers: their sums of products with exact examples are exact in float32."""
    return torch.randint(-4, 5, shape).to(dtype)


# --------------------------------------------------------------------------------------------- bitwise, exact numbers


@each_scheme
@pytest.mark.parametrize("m", [1, 17, 300])
def test_exact_products_are_exact(scheme: Scheme, m: int, poisoned: None) -> None:
    """Integer inputs, power-of-two scales: every sum is representable, so the result has one right value."""
    e = example(48, 128, with_dtype(scheme, FP32), seed=m, exact=True)
    x, bias = integers(m, 128), integers(48)
    expected = (x.double() @ e.weight().double().T + bias.double()).float()
    assert torch.equal(layer_of(e, bias)(x), expected)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_exact_products_round_once_in_half_precision(dtype: torch.dtype, m: int, poisoned: None) -> None:
    e = example(48, 128, Scheme(4, 32, "2:4", dtype=dtype), seed=m, exact=True)
    x, bias = integers(m, 128, dtype=dtype), integers(48, dtype=dtype)
    expected = (x.double() @ e.weight().double().T + bias.double()).to(dtype)
    assert torch.equal(layer_of(e, bias)(x), expected)


@each_scheme
@pytest.mark.parametrize("m", [1, 17, 300])
def test_bias_is_added_exactly_once(scheme: Scheme, m: int) -> None:
    e = example(48, 128, with_dtype(scheme, FP32), exact=True)
    x, bias = integers(m, 128), torch.arange(1, 49, dtype=FP32)
    assert torch.equal(layer_of(e, bias)(x) - layer_of(e)(x), bias.expand(m, 48))


def test_a_layer_without_bias_has_none() -> None:
    layer = layer_of(example(48, 128, SCHEMES[0]))
    assert layer.bias is None
    assert not any("bias" in name for name in layer.state_dict())
    assert not layer(torch.zeros(3, 128, dtype=FP16)).any()
    assert "bias=False" in repr(layer)


def test_group_order_is_honoured() -> None:
    """Activation order: the groups of the columns are a permutation, not runs."""
    for scheme in (Scheme(4, 32, None, dtype=FP32), Scheme(8, 64, None, False, FP32)):
        e = example(16, 128, scheme, g_idx=True, exact=True)
        x = integers(5, 128)
        assert torch.equal(layer_of(e)(x), (x.double() @ e.weight().double().T).float())


# ------------------------------------------------------------------------------------------------- shapes and strides


def variants_of_x(k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    wider = integers(6, k + 24, dtype=dtype)
    return {
        "one dimension": integers(k, dtype=dtype),
        "three dimensions": integers(2, 3, k, dtype=dtype),
        "five dimensions": integers(2, 1, 3, 1, k, dtype=dtype),
        "columns of a wider tensor": wider[:, :k],
        "an odd offset": wider[:, 7 : 7 + k],
        "every second row": integers(9, k, dtype=dtype)[::2],
        "every second column": integers(5, 2 * k, dtype=dtype)[:, 1::2],
        "transposed": integers(k, 6, dtype=dtype).T,
        "permuted": integers(k, 2, 3, dtype=dtype).permute(2, 1, 0),
        "batch and sequence swapped": integers(4, 3, k, dtype=dtype).transpose(0, 1),
        "expanded": integers(k, dtype=dtype).expand(4, k),
        "expanded columns": integers(4, 1, dtype=dtype).expand(4, k),
        "no rows": integers(0, k, dtype=dtype),
        "no sequence": integers(2, 0, k, dtype=dtype),
        "no batch": integers(0, 3, k, dtype=dtype),
        "no rows of a wider tensor": wider[:0, :k],
    }


@each_scheme
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("what", variants_of_x(8, FP32))
def test_any_strides_give_the_contiguous_result(scheme: Scheme, dtype: torch.dtype, what: str) -> None:
    e = example(24, 128, with_dtype(scheme, dtype), exact=True)
    x, bias = variants_of_x(128, dtype)[what], integers(24, dtype=dtype)
    before = x.clone()
    y = layer_of(e, bias)(x)
    expected = (x.double() @ e.weight().double().T + bias.double()).to(dtype)
    assert y.shape == (*x.shape[:-1], 24)
    assert torch.equal(y, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(64,), (3, 127), (3, 129), (128, 3), (2, 128, 1), (0, 64), (3, 0)], ids=str)
def test_a_wrong_last_dimension_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"in_features = 128"):
        layer_of(example(24, 128, SCHEMES[0]))(torch.zeros(shape, dtype=FP16))


def test_a_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match="in_features = 128"):
        layer_of(example(24, 128, SCHEMES[0]))(torch.tensor(1.0, dtype=FP16))


@pytest.mark.parametrize("n", [1, 7, 48, 130])
@pytest.mark.parametrize("k", [96, 576, 7392])
def test_odd_sizes(n: int, k: int, poisoned: None) -> None:
    for sparsity in (None, "2:4"):
        scheme = Scheme(4, 128, sparsity, dtype=FP32).fit(k)
        e = example(n, k, scheme, seed=n, exact=True) if n * k < 60_000 else tiled(n, k, scheme)
        x = integers(3, k)
        assert torch.equal(layer_of(e)(x), (x.double() @ weight_of(e).double().T).float())


def tiled(n: int, k: int, scheme: Scheme) -> Example:
    """A large example whose rows repeat those of a small one: the oracle's loops are slow."""
    e = example(4, k, scheme, exact=True)
    rows = torch.arange(n) % 4
    return Example(scheme, e.codes[rows], e.scales[rows], None if e.mask is None else e.mask[rows], None, None)


def weight_of(e: Example) -> Tensor:
    rows = torch.arange(e.codes.shape[0]) % 4
    if e.codes.shape[0] <= 4 or not torch.equal(e.codes, e.codes[rows]):
        return e.weight()
    first = Example(e.scheme, e.codes[:4], e.scales[:4], None if e.mask is None else e.mask[:4], None, None)
    return first.weight()[rows]


def test_in_features_that_are_no_multiple_of_anything() -> None:
    for n, k, num_bits in ((3, 7, 4), (3, 7, 8), (1, 1, 4), (5, 33, 4)):
        e = example(n, k, Scheme(num_bits, -1, None, dtype=FP32), exact=True)
        x = integers(4, k)
        assert torch.equal(layer_of(e)(x), (x.double() @ e.weight().double().T).float())


def test_more_rows_than_one_tile_of_the_weight() -> None:
    """N * K beyond the memory that the reference path dequantizes at a time."""
    e = tiled(1200, 7424, Scheme(4, 128, dtype=FP32))
    x, bias = integers(2, 7424), integers(1200)
    assert torch.equal(layer_of(e, bias)(x), (x.double() @ weight_of(e).double().T + bias.double()).float())


# --------------------------------------------------------------------------------------------- errors of real numbers


@each_scheme
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 17, 300])
def test_errs_at_most_twice_as_much_as_torch(scheme: Scheme, dtype: torch.dtype, m: int) -> None:
    """Both against float64; torch multiplies the dequantized weight in the same dtype."""
    e = example(48, 576, with_dtype(scheme, dtype), seed=m)
    x, bias = torch.randn(m, 576).to(dtype), torch.randn(48).to(dtype)
    layer = layer_of(e, bias)
    truth = x.double() @ e.weight().double().T + bias.double()
    torch_error = nn.functional.linear(x, e.weight().to(dtype), bias).double() - truth
    error = layer(x).double() - truth
    assert error.abs().max() <= 2 * torch_error.abs().max()
    assert error.norm() <= 2 * torch_error.norm()


def test_equal_every_time() -> None:
    layer = layer_of(example(48, 576, SCHEMES[0]), torch.randn(48))
    x = torch.randn(67, 576).half()
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(50))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """NaN or infinity in one token leaves the others alone; a pruned weight is zero, not skipped."""
    e = example(24, 128, Scheme(4, 32, dtype=FP32), exact=True)
    x = integers(5, 128)
    clean = layer_of(e)(x)
    x[2, 3] = float("nan")
    y = layer_of(e)(x)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert y[2].isnan().all()


# --------------------------------------------------------------------------------------------------- dtypes, autocast


@pytest.mark.parametrize("layer_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64, torch.int64, torch.bool], ids=str)
def test_another_dtype_is_refused_with_what_to_do(layer_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    layer = layer_of(example(24, 128, Scheme(4, 32, dtype=layer_dtype)))
    x = torch.ones(3, 128, dtype=x_dtype)
    if x_dtype == layer_dtype:
        assert layer(x).dtype == layer_dtype
        return
    with pytest.raises(ValueError, match=rf"{x_dtype}.*{layer_dtype}.*\.to\(dtype\).*autocast"):
        layer(x)


@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer_dtype", DTYPES, ids=str)
def test_autocast_casts_as_nn_linear(
    layer_dtype: torch.dtype, x_dtype: torch.dtype, autocast_dtype: torch.dtype
) -> None:
    e = example(24, 128, Scheme(4, 32, dtype=layer_dtype))
    bias = torch.randn(24).to(layer_dtype)
    layer = layer_of(e, bias)
    plain = nn.Linear(128, 24, dtype=layer_dtype)
    plain.load_state_dict({"weight": e.weight(), "bias": bias})
    x = torch.randn(33, 128).to(x_dtype)
    with torch.inference_mode(), torch.autocast("cpu", autocast_dtype):
        y, expected = layer(x), plain(x)
    assert y.dtype == expected.dtype == autocast_dtype
    truth = x.double() @ e.weight().double().T + bias.double()
    assert (y.double() - truth).norm() <= 2 * (expected.double() - truth).norm()


def test_autocast_keeps_the_range_of_its_dtype() -> None:
    """Activations that bfloat16 holds and float16 does not, into a float16 layer under bfloat16 autocast."""
    e = example(24, 128, Scheme(4, 32, dtype=FP16))
    plain = nn.Linear(128, 24, bias=False, dtype=FP16)
    plain.load_state_dict({"weight": e.weight()})
    x = 1e6 * torch.randn(3, 128)
    with torch.inference_mode(), torch.autocast("cpu", BF16):
        y, expected = layer_of(e)(x), plain(x)
    assert expected.isfinite().all()
    assert y.isfinite().all()
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * float(expected.float().norm()))


def test_autocast_of_another_device_changes_nothing() -> None:
    layer = layer_of(example(24, 128, Scheme(4, 32)))
    with torch.autocast("cpu", BF16, enabled=False), pytest.raises(ValueError, match="autocast"):
        layer(torch.ones(3, 128))


@each_scheme
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_dtype_casts_scales_and_bias_alone(scheme: Scheme, dtype: torch.dtype) -> None:
    e = example(24, 128, scheme, g_idx=scheme.sparsity is None)
    bias = torch.randn(24).half()
    layer = layer_of(e, bias)
    stored = {n: t.clone() for n, t in layer.state_dict().items() if n not in ("scales", "bias")}
    layer.to(dtype)
    assert layer.scales.dtype == dtype and layer.bias is not None and layer.bias.dtype == dtype
    for name, t in stored.items():
        now = layer.state_dict()[name]
        assert now.dtype == t.dtype and torch.equal(now, t)
    w = Example(e.scheme, e.codes, e.scales.to(dtype), e.mask, e.zero_point, e.g_idx).weight().to(dtype)
    assert torch.equal(layer.dequantize(), w)
    x = torch.randn(5, 128).to(dtype)
    y = layer(x)
    truth = x.double() @ w.double().T + bias.to(dtype).double()
    assert y.dtype == dtype
    tolerance = 2 * (nn.functional.linear(x, w, bias.to(dtype)).double() - truth).norm()
    assert (y.double() - truth).norm() <= tolerance


# ---------------------------------------------------------------------------------------- module life: save, copy, load


def layers() -> list[CompressedLinear]:
    found = []
    for i, scheme in enumerate(SCHEMES):
        e = example(24, 128, scheme, seed=i, g_idx=scheme.sparsity is None and i % 2 == 0)
        found.append(layer_of(e, torch.randn(24).half() if i % 3 else None))
    return found


def assert_same(a: CompressedLinear, b: CompressedLinear) -> None:
    x = torch.randn(5, a.in_features).to(a.scales.dtype)
    assert torch.equal(a(x), b(x))
    assert (a.scheme, a.in_features, a.out_features) == (b.scheme, b.in_features, b.out_features)
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, t in a.state_dict().items():
        assert t.dtype == b.state_dict()[name].dtype and torch.equal(t, b.state_dict()[name])


@pytest.mark.parametrize("i", range(len(SCHEMES)), ids=lambda i: str(SCHEMES[i]))
def test_state_dict_round_trip(i: int) -> None:
    layer = layers()[i]
    arguments = (128, 24, layer.scheme, layer.bias is not None, layer.g_idx is not None)
    empty = CompressedLinear.empty(*arguments)
    assert all(t.is_meta for t in empty.state_dict().values())
    empty.load_state_dict(layer.state_dict(), strict=True, assign=True)
    assert_same(empty, layer)

    on_cpu = CompressedLinear.empty(*arguments, device="cpu")
    on_cpu.load_state_dict(layer.state_dict(), strict=True)
    assert_same(on_cpu, layer)

    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    on_cpu.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same(on_cpu, layer)

    for name in layer.state_dict():
        less = {n: t for n, t in layer.state_dict().items() if n != name}
        with pytest.raises(RuntimeError, match=name):
            on_cpu.load_state_dict(less, strict=True)
    with pytest.raises(RuntimeError, match="weight"):
        on_cpu.load_state_dict({**layer.state_dict(), "weight": torch.zeros(24, 128)}, strict=True)


def test_empty_refuses_what_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        CompressedLinear.empty(130, 24, Scheme(4, -1), bias=False)
    with pytest.raises(ValueError, match="group_size"):
        CompressedLinear.empty(576, 24, Scheme(4, 128), bias=False)
    with pytest.raises(ValueError, match="g_idx"):
        CompressedLinear.empty(128, 24, Scheme(4, 128), bias=False, g_idx=True)


@pytest.mark.parametrize("i", range(len(SCHEMES)), ids=lambda i: str(SCHEMES[i]))
def test_copies_and_pickles(i: int) -> None:
    layer = layers()[i]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(other, layer)
        assert other.qweight.data_ptr() != layer.qweight.data_ptr()


def test_packed_is_a_view() -> None:
    for layer in layers():
        p = layer.packed
        assert p.qweight.data_ptr() == layer.qweight.data_ptr()
        p.check_indices()
        assert torch.equal(p.dequantize(), layer.dequantize())
        assert layer.dequantize(FP32).dtype == FP32


@pytest.mark.parametrize("shape", [(23,), (25,), (1,), (24, 1), (1, 24), ()], ids=str)
def test_a_bias_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"bias must be \[24\]"):
        layer_of(example(24, 128, SCHEMES[0]), torch.zeros(shape))


def test_a_bias_is_copied_to_the_dtype_of_the_scales() -> None:
    bias = nn.Parameter(torch.randn(24))
    layer = layer_of(example(24, 128, Scheme(4, 32, dtype=BF16)), bias)
    assert layer.bias is not None and torch.equal(layer.bias, bias.detach().to(BF16))
    assert not any(p.requires_grad for p in layer.parameters())


def test_it_lives_inside_a_model() -> None:
    """Moves, casts and freezes with its parent, under which its tensors are named."""
    model = nn.Sequential(nn.LayerNorm(128), layer_of(example(24, 128, SCHEMES[0]), torch.zeros(24)), nn.ReLU())
    model.to(BF16).eval().requires_grad_(False)
    assert model(torch.randn(2, 3, 128, dtype=BF16)).shape == (2, 3, 24)
    assert {"1.qweight", "1.scales", "1.meta", "1.bias"} <= set(model.state_dict())


def test_repr_tells_the_scheme() -> None:
    text = repr(layer_of(example(24, 128, Scheme(4, 32)), torch.zeros(24)))
    for part in ("in_features=128", "out_features=24", "bias=True", "2:4 INT4 group 32", "3.500 bits"):
        assert part in text


# ------------------------------------------------------------------------------------------------------------ adapters

both_bits = pytest.mark.parametrize("bits", [4, 16])


def adapter_of(n: int, k: int, rank: int, bits: int, dtype: torch.dtype, exact: bool = True) -> Adapter:
    """Small powers of two and small integers where exact."""
    if bits == 4:
        schemes = (Scheme(4, 128, None, dtype=dtype).fit(k), Scheme(4, 128, None, dtype=dtype).fit(rank))
        shapes = zip((rank, n), (k, rank), schemes, strict=True)
        a, b = (example(rows, columns, s, seed=rows, exact=exact).packed() for rows, columns, s in shapes)
        return Adapter(a, b)
    factors = (integers(rank, k), integers(n, rank)) if exact else (torch.randn(rank, k), torch.randn(n, rank))
    return Adapter(*(f.to(dtype) for f in factors))


@both_bits
@pytest.mark.parametrize("scheme", SCHEMES[::2], ids=str)
def test_an_adapter_is_added_exactly_once(scheme: Scheme, bits: int, poisoned: None) -> None:
    e = example(24, 128, with_dtype(scheme, FP32), exact=True)
    adapter, bias = adapter_of(24, 128, 8, bits, FP32), integers(24)
    a, b = (f.double() for f in adapter.factors())
    layer = CompressedLinear(e.packed(), bias, adapter)
    for x in variants_of_x(128, FP32).values():
        before = x.clone()
        y = layer(x)
        expected = x.double() @ (e.weight().double() + b @ a).T + bias.double()
        assert y.shape == (*x.shape[:-1], 24)
        assert torch.equal(y, expected.float())
        assert torch.equal(x, before)


@both_bits
def test_dequantize_is_the_weight_that_is_multiplied_by(bits: int) -> None:
    """Adapter included, so that nobody who builds a dense layer from it loses that; packed is the weight alone."""
    e = example(24, 128, Scheme(4, 64, dtype=FP16), exact=True)
    adapter = adapter_of(24, 128, 8, bits, FP16)
    layer = CompressedLinear(e.packed(), None, adapter)
    assert torch.equal(layer.packed.dequantize(), e.weight().half())
    assert layer.dequantize().dtype == FP16 and layer.dequantize(FP32).dtype == FP32
    assert torch.equal(layer.dequantize(FP32), e.weight().float() + adapter.dequantize())
    assert torch.equal(layer.dequantize(), layer.dequantize(FP32).half())
    assert not torch.equal(layer.dequantize(), layer.packed.dequantize())


@both_bits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_adapter_errs_at_most_twice_as_much_as_torch(dtype: torch.dtype, bits: int) -> None:
    """Against a layer with the dense weight and a LoRA in the same dtype, both against float64."""
    e = example(48, 128, Scheme(4, 64, dtype=dtype))
    layer = CompressedLinear(e.packed(), torch.randn(48), adapter_of(48, 128, 16, bits, FP32, exact=False))
    assert layer.adapter is not None and layer.bias is not None
    assert {t.dtype for t in layer.parameters() if t.is_floating_point()} == {dtype}
    x, w = torch.randn(33, 128).to(dtype), e.weight().to(dtype)
    a, b = (f.to(dtype) for f in layer.adapter.factors())
    truth = x.double() @ (w.double() + b.double() @ a.double()).T + layer.bias.double()
    plain = nn.functional.linear(x, w, layer.bias) + nn.functional.linear(nn.functional.linear(x, a), b)
    assert (layer(x).double() - truth).norm() <= 2 * (plain.double() - truth).norm()


@both_bits
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layer_dtype", DTYPES, ids=str)
def test_an_adapter_under_autocast(layer_dtype: torch.dtype, autocast_dtype: torch.dtype, bits: int) -> None:
    e = example(24, 128, Scheme(4, 64, dtype=layer_dtype))
    layer = CompressedLinear(e.packed(), None, adapter_of(24, 128, 8, bits, FP32, exact=False))
    x = torch.randn(33, 128)
    with torch.inference_mode(), torch.autocast("cpu", autocast_dtype):
        y = layer(x)
    truth = x.double() @ layer.dequantize(FP32).double().T
    assert y.dtype == autocast_dtype
    assert (y.double() - truth).norm() <= 0.01 * truth.norm()


@both_bits
def test_an_adapter_moves_and_is_saved_with_its_layer(bits: int) -> None:
    e = example(24, 128, Scheme(4, 64))
    adapter = adapter_of(24, 128, 8, bits, FP16, exact=False)
    layer = CompressedLinear(e.packed(), torch.randn(24), adapter)
    names = {n for n in layer.state_dict() if n.startswith("adapter.")}
    assert names == ({"adapter.a", "adapter.b"} if bits == 16 else {f"adapter.{f}.{t}" for f in "ab" for t in PACKED})
    assert not any(p.requires_grad for p in layer.parameters())

    empty = CompressedLinear.empty(128, 24, layer.scheme, bias=True, adapter=AdapterScheme(8, bits))
    assert all(t.is_meta for t in empty.state_dict().values())
    empty.load_state_dict(layer.state_dict(), strict=True, assign=True)
    on_cpu = CompressedLinear.empty(128, 24, layer.scheme, bias=True, adapter=AdapterScheme(8, bits), device="cpu")
    on_cpu.load_state_dict(layer.state_dict(), strict=True)
    for other in (empty, on_cpu, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(other, layer)
        assert other.adapter is not None and other.adapter.scheme == AdapterScheme(8, bits)
    for name in names:
        with pytest.raises(RuntimeError, match=name):
            on_cpu.load_state_dict({n: t for n, t in layer.state_dict().items() if n != name}, strict=True)
    with pytest.raises(RuntimeError, match="adapter"):
        CompressedLinear(e.packed(), torch.randn(24)).load_state_dict(layer.state_dict(), strict=True)

    layer.to(BF16)
    assert {t.dtype for t in layer.parameters() if t.is_floating_point()} == {BF16}
    assert adapter.factors()[0].equal(on_cpu.adapter.factors()[0])  # the layer has its own copy
    assert layer(torch.randn(3, 128, dtype=BF16)).dtype == BF16


PACKED = ("qweight", "scales")


def test_the_factors_of_adapters_are_no_layers_of_a_model() -> None:
    e = example(24, 128, Scheme(4, 64))
    layers = [CompressedLinear(e.packed(), None, adapter_of(24, 128, 8, bits, FP16)) for bits in (4, 16)]
    model = nn.Sequential(nn.Linear(4, 4), *layers, layer_of(e))
    assert list(compressed_layers(model)) == ["1", "2", "3"]


def test_repr_tells_the_adapter_and_its_bits() -> None:
    e = example(24, 128, Scheme(4, 64))
    text = repr(CompressedLinear(e.packed(), None, adapter_of(24, 128, 8, 16, FP16)))
    bits = 3 + 16 / 64 + 16 * 8 * (24 + 128) / (24 * 128)
    assert f"{bits:.3f} bits" in text and "rank 8" in text
    assert "rank 8 INT4" in repr(CompressedLinear(e.packed(), None, adapter_of(24, 128, 8, 4, FP16)))
    assert "dapter" not in repr(layer_of(e))


def test_adapters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be for a weight \[24, 128\], got one for \[24, 64\]"):
        CompressedLinear(example(24, 128, SCHEMES[0]).packed(), None, adapter_of(24, 64, 8, 16, FP16))
    with pytest.raises(ValueError, match=r"\[R, K\] and \[N, R\].*\[8, 64\] and \[24, 9\]"):
        Adapter(torch.zeros(8, 64), torch.zeros(24, 9))
    with pytest.raises(ValueError, match="both packed or neither"):
        Adapter(example(8, 64, Scheme(4, 64, None)).packed(), torch.zeros(24, 8))
    with pytest.raises(ValueError, match="rank 65 is larger"):
        CompressedLinear.empty(64, 96, Scheme(4, 64), bias=False, adapter=AdapterScheme(65))
    for rank in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match="rank of an adapter must be a positive integer"):
            AdapterScheme(rank)
