"""Whether kernels may be used, on any machine; and the operator ``gemm`` itself where there is a GPU."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_marlin import CompressedLinear, Scheme, runtime
from sparse_marlin.build import BuildError
from sparse_marlin.dispatch import Device, Kernel
from sparse_marlin.layouts import to_kernel
from sparse_marlin.packed import PackedWeight

H200 = Device("H200", 90, 132, 232448, 233472, 1.98, 4916)
SCHEMES = [
    Scheme(4, 128, "2:4"),
    Scheme(8, 64, "2:4", dtype=torch.bfloat16),
    Scheme(4, 32, None),
    Scheme(8, -1, None, symmetric=False, dtype=torch.bfloat16),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that one test found out about this process is known to the next one."""
    caches = (runtime.extension_error, runtime.kernels, runtime.device_properties, runtime._cannot, runtime._warn)
    for c in caches:
        c.cache_clear()
    yield
    for c in caches:
        c.cache_clear()


def weight(scheme: Scheme, n: int, k: int, device: str = "cpu", seed: int = 0) -> PackedWeight:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << scheme.num_bits, (n, k), dtype=torch.uint8, generator=random)
    mask = torch.rand(n, k // 4, 4, generator=random).argsort().lt(2).view(n, k) if scheme.sparsity else None
    scales = torch.rand(n, scheme.num_groups(k), generator=random) + 0.5
    zero = None if scheme.symmetric else torch.full(scales.shape, 3, dtype=torch.uint8)
    return PackedWeight.pack(codes, scales, scheme, mask, zero).to(device)


def on_gpu(scheme: Scheme = SCHEMES[0]) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), scheme=scheme, out_features=256, in_features=256)


def test_missing_extension_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BuildError("no nvcc on this machine: install it")

    monkeypatch.setattr(runtime, "extension_path", missing)
    monkeypatch.delenv("SPARSE_MARLIN_BUILD", raising=False)
    with pytest.warns(UserWarning, match="kernels are not available: no nvcc on this machine: install it"):
        assert runtime.plan_for(on_gpu(), torch.float16) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.plan_for(on_gpu(SCHEMES[1]), torch.bfloat16) is None


def test_missing_extension_is_an_error_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BuildError("no nvcc on this machine: install it")

    monkeypatch.setattr(runtime, "extension_path", missing)
    monkeypatch.setenv("SPARSE_MARLIN_BUILD", "1")
    with pytest.raises(BuildError, match="no nvcc"):
        runtime.plan_for(on_gpu(), torch.float16)


def test_weight_on_the_cpu_needs_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "extension_path", lambda: pytest.fail("asked for the extension"))
    assert runtime.plan_for(weight(SCHEMES[0], 8, 128), torch.float16) is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (lambda y: y, None),
        (lambda y: y * 1.05, r"computes wrong results on H200 \(relative error 5\.0e-02\)"),
        (lambda y: y.index_fill(0, torch.tensor([0]), float("nan")), "computes wrong results"),
        (lambda y: torch.empty(1).view(7), "kernel sm90_a does not run on H200: "),
    ],
    ids=["right", "inexact", "nan", "error"],
)
def test_self_test(
    monkeypatch: pytest.MonkeyPatch, scheme: Scheme, kernel: Callable[[Tensor], Tensor], text: str | None
) -> None:
    plans: list[str] = []

    def multiply(packed: PackedWeight, x: Tensor, plan: str) -> Tensor:
        plans.append(plan)
        return kernel(x.double() @ packed.dequantize(x.dtype).double().T).to(x.dtype)

    monkeypatch.setattr(runtime, "to_kernel", lambda packed, _dtype: packed)
    monkeypatch.setattr(runtime, "multiply", multiply)
    monkeypatch.setattr(runtime, "kernels", lambda *_: (Kernel("sm90_a", 90, 90, 64, 128, 64, 1 << 16, 1),))
    result = runtime.self_test(torch.device("cpu"), H200, scheme, scheme.dtype)
    if text is None:
        assert result is None
        assert plans == 3 * ["*:sm90_a@5", "*:sm90_a@5/1", "*:sm90_a@5/2"]  # for each number of tokens
    else:
        assert len(plans) == 1
        assert result is not None
        assert re.search(text, result)


def relative_error(y: Tensor, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> float:
    want = x.double() @ packed.dequantize(torch.float32).to(x.dtype).double().T
    want = want if bias is None else want + bias.double()
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (200, 896), (8, 128)])
def test_layer_uses_the_kernels_and_is_right(scheme: Scheme, n: int, k: int) -> None:
    packed = weight(scheme, n, k, "cuda")
    bias = torch.randn(n, dtype=scheme.dtype, device="cuda")
    layer = CompressedLinear(packed, bias)
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    assert layer.prepare(), runtime._cannot(0, scheme, scheme.dtype)
    for shape in [(1, k), (3, 17, k), (300, k), (k,), (0, k)]:
        x = torch.randn(shape, dtype=scheme.dtype, device="cuda")
        y = layer(x)
        assert y.shape == (*shape[:-1], n)
        assert y.numel() == 0 or relative_error(y, x, packed, bias) < 2 * torch.finfo(scheme.dtype).eps
    assert all(torch.equal(t, state[name]) for name, t in layer.state_dict().items())


@pytest.mark.cuda
def test_strides_and_alignment_of_the_inputs() -> None:
    n, k = 256, 512
    packed = weight(SCHEMES[0], n, k, "cuda")
    layer = CompressedLinear(packed)
    assert layer.prepare()
    wide = torch.randn(40, 2 * k + 8, dtype=torch.float16, device="cuda")
    for x in [
        wide[:, :k],
        wide[:, 1 : k + 1],  # rows that start at odd addresses
        wide[:, : 2 * k : 2],
        wide[::2, :k],
        wide[:1, :k].expand(9, k),
        wide[:32, :k].reshape(4, 8, k).transpose(0, 1),
        torch.randn(k, 40, dtype=torch.float16, device="cuda").T,
    ]:
        assert relative_error(layer(x), x, packed) < 2e-3
        assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.cuda
def test_graphs_replayed_at_once_do_not_disturb_each_other() -> None:
    """Each captured graph has a workspace of its own, and eager calls have another one."""
    n, k, tokens = 256, 8192, 16  # few tiles, long sums: blocks have to exchange partial sums
    packed = [weight(SCHEMES[0], n, k, "cuda", seed) for seed in (0, 1)]
    layers = [CompressedLinear(p) for p in packed]
    assert all(layer.prepare() for layer in layers)
    x = torch.randn(tokens, k, dtype=torch.float16, device="cuda")
    want = [layer(x) for layer in layers]
    graphs, outputs = [], []
    for layer in layers:  # captured without a warm-up: the workspaces are allocated within
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(20):
                y = layer(x)
        outputs.append(y)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = [layer(x) for layer in layers]
        torch.cuda.synchronize()
        for got, also, right in zip(outputs, eager, want, strict=True):
            assert torch.equal(got, right)
            assert torch.equal(also, right)
    del graphs, y, outputs
    for _ in range(20):  # workspaces of graphs that are gone serve new ones
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers[0](x)
        graph.replay()
        assert torch.equal(y, want[0])


@pytest.mark.cuda
def test_streams_do_not_disturb_each_other() -> None:
    n, k = 256, 8192
    packed = [weight(SCHEMES[0], n, k, "cuda", seed) for seed in range(4)]
    layers = [CompressedLinear(p) for p in packed]
    x = torch.randn(16, k, dtype=torch.float16, device="cuda")
    want = [layer(x) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[] for _ in layers]
    for _ in range(100):
        for i, (layer, stream) in enumerate(zip(layers, streams, strict=True)):
            with torch.cuda.stream(stream):
                got[i].append(layer(x))
    torch.cuda.synchronize()
    for ys, right in zip(got, want, strict=True):
        assert all(torch.equal(y, right) for y in ys)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device_than_the_current_one() -> None:
    packed = weight(SCHEMES[0], 256, 512, "cuda:1")
    x = torch.randn(17, 512, dtype=torch.float16, device="cuda:1")
    assert relative_error(CompressedLinear(packed)(x), x, packed) < 2e-3
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_compiled_with_graphs() -> None:
    packed = weight(SCHEMES[0], 256, 512, "cuda")
    layer = CompressedLinear(packed)
    assert layer.prepare()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for tokens in (1, 1, 1, 16, 16, 16):
        x = torch.randn(tokens, 512, dtype=torch.float16, device="cuda")
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.cuda
def test_operator_checks_what_it_gets() -> None:
    packed = weight(SCHEMES[0], 256, 512, "cuda")
    assert CompressedLinear(packed).prepare()
    plan = runtime.plan_for(packed, torch.float16)
    form = to_kernel(packed, torch.float16)
    x = torch.randn(3, 512, dtype=torch.float16, device="cuda")
    bias = torch.zeros(256, dtype=torch.float16, device="cuda")
    good = {
        "x": x,
        "weights": form.weights,
        "meta": form.meta,
        "scales": form.scales,
        "row_scales": form.row_scales,
        "perm": None,
        "bias": bias,
        "out_features": 256,
        "num_bits": 4,
        "group_size": 128,
        "zero_points": False,
        "plan": plan,
    }
    torch.ops.sparse_marlin.gemm(**good)
    for change, text in [
        ({"x": x.float()}, "x must be float16 or bfloat16"),
        ({"x": x.bfloat16()}, "scales must have the dtype of x"),
        ({"x": x[:, :256]}, "weights must have"),
        ({"weights": form.weights[:-1]}, "weights must have"),
        ({"weights": form.weights.cpu()}, "weights must be on the device of x"),
        ({"meta": None}, "weights must have"),
        ({"bias": bias[:8]}, "bias must have 512 bytes"),
        ({"bias": bias.float()}, "bias must have the dtype of x"),
        ({"num_bits": 3}, "num_bits must be 4 or 8, got 3"),
        ({"group_size": 16}, "group_size must be"),
        ({"plan": "16:nonsense"}, "no entry of a plan"),
        ({"plan": "*:nonsense@4"}, "no kernel nonsense"),
        ({"plan": "1:nonsense@4"}, "says nothing about 3 tokens"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            torch.ops.sparse_marlin.gemm(**good | change)
