"""torch.ops.sparse_marlin.linear: its schema, its shapes for tracing, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import example
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_marlin import CompressedLinear, Scheme, compress

CASES = [
    (Scheme(4, 32, "2:4"), False),
    (Scheme(8, 64, "2:4", dtype=torch.bfloat16), False),
    (Scheme(4, -1, "2:4", dtype=torch.float32), False),
    (Scheme(4, 32, None), False),
    (Scheme(8, -1, None, False), False),
    (Scheme(4, 32, None, False, torch.float32), True),
]
each_case = pytest.mark.parametrize(("scheme", "g_idx"), CASES, ids=[f"{s}{' g_idx' * g}" for s, g in CASES])


def arguments(x: Tensor, layer: CompressedLinear) -> tuple[Any, ...]:
    s = layer.scheme
    tensors = (layer.qweight, layer.scales, layer.meta, layer.zero_point, layer.g_idx, layer.bias)
    return (x, *tensors, s.num_bits, s.group_size)


def layer_of(scheme: Scheme, g_idx: bool, bias: bool) -> CompressedLinear:
    e = example(24, 128, scheme, g_idx=g_idx)
    return CompressedLinear(e.packed(), torch.randn(24) if bias else None)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(128).to(dtype),
        torch.randn(3, 128).to(dtype),
        torch.randn(2, 3, 128).to(dtype),
        torch.randn(3, 200).to(dtype)[:, :128],
        torch.randn(128, 3).to(dtype).T,
        torch.randn(0, 128).to(dtype),
    ]


@each_case
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(scheme: Scheme, g_idx: bool, bias: bool) -> None:
    x = inputs(scheme.dtype)[2]
    torch.library.opcheck(torch.ops.sparse_marlin.linear.default, arguments(x, layer_of(scheme, g_idx, bias)))


def test_opcheck_for_any_shape_and_strides() -> None:
    layer = layer_of(*CASES[0], bias=True)
    for x in inputs(CASES[0][0].dtype):
        torch.library.opcheck(torch.ops.sparse_marlin.linear.default, arguments(x, layer))


@each_case
def test_fake_tensors_have_the_real_shape_stride_and_dtype(scheme: Scheme, g_idx: bool) -> None:
    layer = layer_of(scheme, g_idx, bias=True)
    for x in inputs(scheme.dtype):
        real = layer(x)
        with FakeTensorMode() as mode:
            args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments(x, layer)]
            fake = torch.ops.sparse_marlin.linear(*args)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.device == real.device


def test_meta_tensors() -> None:
    layer = CompressedLinear.empty(128, 24, Scheme(), bias=True)
    y = layer(torch.empty(2, 3, 128, dtype=torch.float16, device="meta"))
    assert y.is_meta and y.shape == (2, 3, 24) and y.dtype == torch.float16


def test_a_layer_is_one_node_in_a_graph() -> None:
    layer = layer_of(*CASES[0], bias=True)
    targets = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(layer, fullgraph=True, backend=backend)(torch.randn(3, 128).half())
    ours = [t for t in targets if "sparse_marlin" in str(t)]
    assert len(ours) == 1


class Block(nn.Module):
    def __init__(self, scheme: Scheme, g_idx: bool) -> None:
        super().__init__()
        self.up = layer_of(scheme, g_idx, bias=True)
        self.down = CompressedLinear(example(128, 24, Scheme(8, -1, None, dtype=scheme.dtype)).packed())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@each_case
def test_compiled_equals_eager(scheme: Scheme, g_idx: bool) -> None:
    torch._dynamo.reset()
    block = Block(scheme, g_idx)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for x in inputs(scheme.dtype)[2:4]:
            assert torch.equal(compiled(x), block(x))


def test_compiled_once_for_every_number_of_tokens() -> None:
    torch._dynamo.reset()
    block = Block(*CASES[0])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    with torch.inference_mode():
        for m in (2, 3, 17, 64, 300):
            x = torch.randn(m, 128).half()
            assert torch.equal(compiled(x), block(x))
    assert counter.frame_count == 1


def test_compiled_under_autocast() -> None:
    """Compiled code may skip a rounding to the autocast dtype, so the errors are compared, not the bits."""
    torch._dynamo.reset()
    block = Block(Scheme(4, 32, dtype=torch.float32), False)
    x = torch.randn(5, 128)
    with torch.inference_mode():
        truth = block(x)
        with torch.autocast("cpu", torch.bfloat16):
            eager, compiled = block(x), torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == eager.dtype
    assert (compiled - truth).norm() <= 2 * (eager - truth).norm()


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager() -> None:
    torch._dynamo.reset()
    block = Block(Scheme(4, 32, dtype=torch.float32), False)
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(5, 128)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), block(x))


def test_exports() -> None:
    block = Block(*CASES[0])
    x = torch.randn(5, 128).half()
    program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    for m in (2, 5, 40):
        x = torch.randn(m, 128).half()
        assert torch.equal(program.module()(x), block(x))


@pytest.mark.parametrize("rank", [0, 16])
def test_a_gradient_passes_to_the_inputs(rank: int) -> None:
    """A layer is for inference, but what lies before it, such as a prompt, may be trained."""
    layer = compress(torch.nn.Linear(128, 24), group_size=32, adapter_rank=rank)
    x = torch.randn(2, 3, 128, requires_grad=True)
    layer(x).square().sum().backward()
    w = layer.dequantize()
    expected = 2 * torch.nn.functional.linear(x.detach(), w, layer.bias) @ w
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("shape", [(128,), (3, 128), (2, 3, 128), (0, 128)])
def test_outputs_may_be_changed_in_place(shape: tuple[int, ...], rank: int) -> None:
    """As models do that clamp or add, outside no_grad too."""
    layer = compress(torch.nn.Linear(128, 24), group_size=32, adapter_rank=rank)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x).clamp_(-1, 1).add_(1)
    assert torch.equal(y, layer(x.detach()).clamp(-1, 1) + 1)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def test_gradients_of_torch_func() -> None:
    layer = compress(torch.nn.Linear(128, 24), group_size=32)
    grad = torch.func.grad(lambda x: layer(x).sum())(torch.randn(128))
    torch.testing.assert_close(grad, layer.dequantize().sum(0))
