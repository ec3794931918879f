"""The life of a layer's kernel form: when it is made and undone, and that nobody outside sees it.

The kernels are replaced by a CPU implementation of the same operator, and the layout by one that is told apart easily.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparse_marlin import CompressedLinear, Scheme, linear, runtime
from sparse_marlin.layouts import KernelWeight
from sparse_marlin.linear import Adapter
from sparse_marlin.packed import PackedWeight, dequantize

N, K = 40, 256
PLAN = "*:fake@1"
SCHEMES = [Scheme(4, 128, "2:4"), Scheme(8, 64, "2:4"), Scheme(4, 32, None), Scheme(8, -1, None, symmetric=False)]


def fake_form(packed: PackedWeight, dtype: torch.dtype) -> KernelWeight:
    """Keeps every bit of the canonical integers inverted."""
    meta = None if packed.meta is None else ~packed.meta
    row_scales = torch.ones(packed.out_features)
    weights, scales = ~packed.qweight, packed.scales.to(dtype)
    return KernelWeight(packed.scheme, packed.out_features, packed.in_features, weights, meta, scales, row_scales, None)


def fake_codes(form: KernelWeight) -> tuple[Tensor, Tensor | None]:
    return ~form.weights, None if form.meta is None else ~form.meta


def fake_gemm(
    x: Tensor,
    weights: Tensor,
    meta: Tensor | None,
    scales: Tensor,
    row_scales: Tensor,
    perm: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    num_bits: int,
    group_size: int,
    zero_points: bool,
    plan: str,
) -> Tensor:
    assert plan == PLAN
    assert x.dtype == scales.dtype
    assert bias is None or bias.dtype == x.dtype
    zero = torch.full(scales.shape, 3, dtype=torch.uint8) if zero_points else None
    meta = None if meta is None else ~meta
    w = dequantize(~weights, scales, meta, zero, None, num_bits, group_size, x.shape[-1], x.dtype).float()
    return torch.nn.functional.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Makes the CPU count as a GPU with kernels; the value lists for which dtypes a weight was prepared."""
    prepared: list[torch.dtype] = []

    def plan_for(_: PackedWeight, dtype: torch.dtype) -> str | None:
        prepared.append(dtype)
        return None if dtype == torch.float32 else PLAN

    monkeypatch.setattr(runtime, "plan_for", plan_for)
    monkeypatch.setattr(linear, "to_kernel", fake_form)
    monkeypatch.setattr(linear, "canonical_codes", fake_codes)
    library = torch.library.Library("sparse_marlin", "IMPL")
    library.impl("gemm", fake_gemm, "CPU")
    yield prepared
    library._destroy()


@pytest.fixture(params=SCHEMES, ids=str)
def layer(request: pytest.FixtureRequest) -> CompressedLinear:
    scheme: Scheme = request.param
    torch.manual_seed(0)
    codes = torch.randint(1 << scheme.num_bits, (N, K), dtype=torch.uint8)
    mask = torch.tensor([True, False, True, False]).repeat(N, K // 4) if scheme.sparsity else None
    scales = torch.rand(N, scheme.num_groups(K)) + 0.5
    zero = None if scheme.symmetric else torch.full(scales.shape, 3, dtype=torch.uint8)
    return CompressedLinear(PackedWeight.pack(codes, scales, scheme, mask, zero), torch.randn(N))


def test_result_and_state_dict_stay(layer: CompressedLinear) -> None:
    x = torch.randn(3, 5, K, dtype=torch.float16)
    y, state = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    packed = layer.packed.tensors()
    assert layer.prepare()
    assert layer.qweight is None  # the weight is not there twice
    assert layer.kernel_weights is not None
    torch.testing.assert_close(layer(x), y)
    assert layer.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert all(torch.equal(v, packed[k]) for k, v in layer.packed.tensors().items())
    assert not [k for k, _ in layer.named_parameters() if k.startswith("kernel")]


@pytest.mark.parametrize("undo", ["restore", "to_dtype", "load", "copy", "pickle"])
def test_undone(layer: CompressedLinear, undo: str) -> None:
    x = torch.randn(7, K, dtype=torch.float16)
    y, state = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    layer.prepare()
    if undo == "restore":
        layer.restore()
    elif undo == "to_dtype":
        layer.to(torch.bfloat16).to(torch.float16)
        state = layer.state_dict()  # scales went through bfloat16
        y = CompressedLinear(layer.packed, layer.bias)(x)
    elif undo == "load":
        layer.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
        layer.prepare()
        layer.load_state_dict(state)
    elif undo == "copy":
        layer = copy.deepcopy(layer)
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        layer = torch.load(file, weights_only=False)
    assert layer.qweight is not None
    assert all(b is None for b in layer._buffers.values())
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    torch.testing.assert_close(layer(x), y)
    assert layer.prepare()
    torch.testing.assert_close(layer(x), y)


def test_prepared_once_per_dtype(layer: CompressedLinear, kernels: list[torch.dtype]) -> None:
    assert layer.prepare()
    assert layer.prepare()
    assert layer.prepare(torch.bfloat16)
    assert layer.kernel_scales.dtype == torch.bfloat16
    assert not layer.prepare(torch.float32)
    assert not layer.prepare(torch.float32)
    assert layer.qweight is not None
    assert kernels == [torch.float16, torch.bfloat16, torch.float32]


def test_bias_follows_the_dtype_of_the_inputs(layer: CompressedLinear) -> None:
    x = torch.randn(7, K)
    layer.prepare(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    want = torch.nn.functional.linear(x, layer.dequantize(torch.float32), layer.bias.float())
    assert (y - want).norm() < 0.02 * want.norm()


def test_other_dtype_than_prepared_for(layer: CompressedLinear) -> None:
    layer.prepare(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"prepared for torch\.bfloat16: call prepare\(torch\.float16\)"):
        layer(torch.randn(1, K, dtype=torch.float16))


def test_traces_without_graph_breaks(layer: CompressedLinear) -> None:
    x = torch.randn(7, K, dtype=torch.float16)
    layer.prepare()
    y = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y)
    torch.testing.assert_close(compiled(x[:3]), y[:3])


def test_sharded_parameters_are_left_alone(layer: CompressedLinear, kernels: list[torch.dtype]) -> None:
    class Sharded(Tensor):
        pass

    layer.qweight = torch.nn.Parameter(layer.qweight.data.as_subclass(Sharded), requires_grad=False)
    assert not layer.prepare()
    assert kernels == []


def with_adapter(layer: CompressedLinear, bits: int) -> CompressedLinear:
    torch.manual_seed(1)
    factors: list[Tensor | PackedWeight] = []
    for rows, columns in ((16, K), (N, 16)):
        scheme = Scheme(4, 128, None).fit(columns)
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
        scales = torch.rand(rows, scheme.num_groups(columns)) / 100
        factors.append(
            torch.randn(rows, columns).half() / 8 if bits == 16 else PackedWeight.pack(codes, scales, scheme)
        )
    return CompressedLinear(layer.packed, layer.bias, Adapter(*factors))


@pytest.mark.parametrize("bits", [4, 16])
def test_an_adapter_beside_kernels(layer: CompressedLinear, bits: int) -> None:
    layer = with_adapter(layer, bits)
    x = torch.randn(3, 5, K, dtype=torch.float16)
    y, state = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    prepared = [m for m in layer.modules() if isinstance(m, CompressedLinear)]
    assert len(prepared) == (3 if bits == 4 else 1)
    assert layer.prepare()
    assert all(m.qweight is None for m in prepared)  # INT4 factors run on the kernels too
    torch.testing.assert_close(layer(x), y)
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    torch._dynamo.reset()  # it counts how often forward was compiled, in all tests together
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y)
    torch.testing.assert_close(compiled(x[:2]), y[:2])
    layer.restore()
    assert all(m.qweight is not None for m in prepared)
    torch.testing.assert_close(layer(x), y)
    other = copy.deepcopy(layer)
    other.prepare()
    torch.testing.assert_close(copy.deepcopy(other)(x), y)
    other.to(torch.bfloat16)
    assert all(m.qweight is not None for m in other.modules() if isinstance(m, CompressedLinear))
    assert other(x.bfloat16()).dtype == torch.bfloat16
