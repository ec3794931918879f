"""What the implementations are given: the same weight, in the order of bits that each one wants."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import peers
import pytest
import torch
from torch import Tensor

from sparse_marlin import CompressedLinear, Scheme
from sparse_marlin.dispatch import Device, Kernel
from sparse_marlin.packed import PackedWeight

CPU = torch.device("cpu")
DENSE = Scheme(4, 32, None, dtype=torch.bfloat16)


@pytest.fixture
def packed() -> PackedWeight:
    return peers.random_weight(16, 128, DENSE, CPU)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sparsity", [None, "2:4"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_random_weight(bits: int, sparsity: Any, group_size: int) -> None:
    scheme = Scheme(bits, group_size, sparsity)
    packed = peers.random_weight(64, 256, scheme, CPU, seed=3)
    w = packed.dequantize(torch.float32)
    kept = 0.5 if sparsity else 1.0
    assert packed.scheme == scheme
    assert float(w.std()) == pytest.approx(0.02, rel=0.2)
    assert float((w != 0).float().mean()) <= kept
    codes, mask = packed.unpack()
    assert int(codes.min()) <= 1 and int(codes.max()) == scheme.max_code  # the whole range is used
    if mask is not None:
        assert (mask.view(64, -1, 4).sum(2) == 2).all()
    again = peers.random_weight(64, 256, scheme, CPU, seed=3)
    other = peers.random_weight(64, 256, scheme, CPU, seed=4)
    assert torch.equal(again.qweight, packed.qweight) and not torch.equal(other.qweight, packed.qweight)


def test_random_weight_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CHUNK", 5 * 128)
    packed = peers.random_weight(16, 128, Scheme(4, 32, "2:4"), CPU)
    assert packed.out_features == 16
    packed.check_indices()
    assert torch.equal(peers.dense_weight(packed, torch.float16), packed.dequantize(torch.float16))


def test_impossible_shape() -> None:
    with pytest.raises(ValueError, match="multiple of group_size"):
        peers.random_weight(16, 100, DENSE, CPU)


def test_largest_two() -> None:
    w = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0, -9.0, 8.0, 7.0, 9.0]])
    expected = [[False, True, True, False, False, False, True, True, True, False, False, True]]
    assert peers.largest_two(w).tolist() == expected
    w = torch.randn(50, 64)
    kept = w.abs().view(50, -1, 4).topk(2).indices
    assert torch.equal(peers.largest_two(w).view(50, -1, 4), torch.zeros(50, 16, 4).scatter_(2, kept, 1.0).bool())


def test_torch_int4_order(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes the even column from the high nibble, and scales with zeros as [groups, N, 2]."""
    given: list[Tensor] = []

    def convert(weight: Tensor, tiles: int) -> Tensor:
        assert tiles == 8
        given.append(weight)
        return weight

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", convert)
    _, scales = peers.TorchInt4().tensors(packed)
    codes = torch.stack([given[0] >> 4, given[0] & 15], 2).view(16, 128)
    assert torch.equal(codes, packed.unpack()[0])
    assert scales.shape == (4, 16, 2) and scales.dtype == torch.bfloat16
    w = (codes.float() - 8).view(16, 4, 32) * scales[:, :, 0].t().unsqueeze(2) + scales[:, :, 1].t().unsqueeze(2)
    assert torch.equal(w.view(16, 128).bfloat16(), packed.dequantize(torch.bfloat16))


def test_gptq_order(packed: PackedWeight) -> None:
    columns = peers.gptq_weight(packed)
    assert columns.shape == (128 // 8, 16) and columns.dtype == torch.int32
    codes = torch.stack([columns >> 4 * i & 15 for i in range(8)], 1).view(128, 16)
    assert torch.equal(codes.t().to(torch.uint8), packed.unpack()[0])


def test_cusparselt_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(torch, "_cslt_compress", lambda w: w)
    monkeypatch.setattr(
        peers.libcusparselt, "cusparselt_linear", lambda x, w, n, algorithm: used.append((n, algorithm))
    )
    packed = peers.random_weight(16, 128, Scheme(4, 32, "2:4"), CPU)
    known = {(16, 128, "float16", 8): 7, (16, 128, "float16", 32): None}
    best = peers.Cusparselt(known).prepare(packed, torch.float16).copy()
    default = peers.Cusparselt().prepare(packed, torch.float16).copy()
    for function in (best, default):
        function(torch.zeros(8, 128))
    assert used == [(16, 7), (16, 0)]
    with pytest.raises(ValueError, match=peers.NOT_SEARCHED):
        best(torch.zeros(16, 128))
    with pytest.raises(ValueError, match="none of its algorithms works"):
        best(torch.zeros(32, 128))


def test_cusparselt_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> SimpleNamespace:
        raise RuntimeError("cuSPARSELt 0.11.0 is loaded, and only 0.8 are known here")

    peer = peers.Cusparselt()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert peer.missing() == "this torch is built without it"
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(peers.libcusparselt, "library", library)
    assert peer.missing() == "cuSPARSELt 0.11.0 is loaded, and only 0.8 are known here"
    monkeypatch.setattr(peers.libcusparselt, "library", lambda: SimpleNamespace(version="0.8.0"))
    assert peer.missing() is None and peer.version() == "0.8.0"


def test_humming_is_given_our_integers(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    class HummingLayer(torch.nn.Module):
        def __init__(self, n: int, k: int, config: dict[str, Any], torch_dtype: torch.dtype) -> None:
            super().__init__()
            assert (n, k, config, torch_dtype) == (16, 128, {"dtype": "int4", "group_size": 32}, torch.bfloat16)
            self.weight = torch.nn.Parameter(torch.empty(n, k // 8, dtype=torch.int32), requires_grad=False)
            self.weight_scale = torch.nn.Parameter(torch.empty(n, k // 32, dtype=torch_dtype))
            self.ready = False

        def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
            self.load_state_dict(tensors)

        def transform(self) -> None:
            self.ready = True

        def forward(self, x: Tensor) -> Tensor:
            assert self.ready
            codes = torch.stack([self.weight >> 4 * i & 15 for i in range(8)], 2).view(16, 128)
            w = (codes.float() - 8).view(16, 4, 32) * self.weight_scale.float().unsqueeze(2)
            return x @ w.view(16, 128).t().to(x.dtype)

    module = ModuleType("humming.layer")
    module.HummingLayer = HummingLayer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    prepared = peers.Humming().prepare(packed, torch.bfloat16)
    first, second = prepared.copy(), prepared.copy()
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(first(x), x @ packed.dequantize(torch.bfloat16).t())
    assert not first(x).requires_grad
    assert first.weight.data_ptr() != second.weight.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [peers.Cublas, peers.Ours])
def test_copies_share_nothing_that_is_read(make: Any, packed: PackedWeight) -> None:
    peer = make()
    prepared = peer.prepare(packed, torch.bfloat16)
    x = torch.randn(5, 128).bfloat16()
    expected = x.double() @ packed.dequantize(torch.bfloat16).double().t()
    for function in (prepared.copy(), prepared.copy()):
        torch.testing.assert_close(function(x).double(), expected, rtol=0.02, atol=1e-3)


def test_ours_forced(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan names kernels with the prefix alone, even where another one would be faster."""
    kernels = [
        Kernel("sm80_t16", 80, 0, 16, 128, 256, 40000, 2),
        Kernel("sm90_t16", 90, 90, 16, 128, 256, 40000, 2),
        Kernel("sm90_t64", 90, 90, 64, 128, 256, 40000, 2),
    ]
    device = Device("H200", 90, 132, 232448, 233472, 1.98, 4800.0)
    monkeypatch.setattr(peers.runtime, "kernels", lambda scheme, dtype: kernels)
    monkeypatch.setattr(peers.runtime, "device_properties", lambda index: device)
    plans = {prefix: peers.Ours(prefix).plan(packed, torch.bfloat16) for prefix in ("sm80", "sm90", "sm120")}
    assert plans["sm80"] is not None and "sm80_t16" in plans["sm80"] and "sm90" not in plans["sm80"]
    assert plans["sm90"] is not None and "sm80" not in plans["sm90"]
    assert plans["sm120"] is None
    monkeypatch.setattr(CompressedLinear, "prepare", lambda self, dtype: True)
    layer = peers.Ours("sm80").prepare(packed, torch.bfloat16).copy()
    assert isinstance(layer, CompressedLinear) and layer._plan == plans["sm80"]
    with pytest.raises(ValueError, match=r"no kernel sm120\* can multiply by a INT4 group 32 weight"):
        peers.Ours("sm120").prepare(packed, torch.bfloat16)


@pytest.mark.parametrize(
    ("peer", "scheme", "dtype", "reason"),
    [
        (peers.TorchInt4(), Scheme(4, 128, None), torch.float16, "only for bfloat16"),
        (peers.TorchInt4(), Scheme(8, 128, None), torch.bfloat16, "only for 4 bits"),
        (peers.TorchInt4(), Scheme(4, -1, None), torch.bfloat16, "only for groups"),
        (peers.Bitsandbytes(), Scheme(8, 128, None), torch.float16, "only for 4 bits"),
        (peers.Gemlite(), Scheme(4, -1, None), torch.float16, "only for groups"),
        (peers.Cusparselt(), Scheme(4, 128, "2:4"), torch.float32, "only for float16 and bfloat16"),
    ],
)
def test_refusals(peer: peers.Peer, scheme: Scheme, dtype: torch.dtype, reason: str) -> None:
    found = peer.refuses(scheme, dtype, 1024, 1024)
    assert found is not None and reason in found


def test_odd_shapes_are_refused() -> None:
    assert peers.TorchInt4().refuses(Scheme(4, 32, None), torch.bfloat16, 1020, 1024)
    assert peers.Cusparselt().refuses(Scheme(4, 32, "2:4"), torch.float16, 1024, 1000)
    assert peers.TorchInt4().refuses(Scheme(4, 32, None), torch.bfloat16, 1024, 1024) is None


def test_what_is_not_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcudart.so.99 is missing\\nand more')")
    (tmp_path / "needy_peer.py").write_text("import surely_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.not_importable("no_such_peer") == "not installed"
    assert peers.not_importable("broken_peer") == "its import fails: OSError: libcudart.so.99 is missing"
    assert peers.not_importable("needy_peer") == "its import fails: No module named 'surely_not_there'"
    assert peers.not_importable("json") is None


def test_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = peers.find(list(peers.PEERS), ["sm80"])
    assert [p.name for p in found.peers] == ["cublas", "sparse_marlin"]
    assert set(found.skipped) == {"sparse_marlin:sm80", *peers.PEERS}
    assert found.skipped["humming"] == "there is no GPU"


def test_one_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: peers.Peer) -> str:
        raise OSError("a broken installation\nand how")

    monkeypatch.setattr(peers.Humming, "missing", missing)
    assert peers.find(["humming"], []).skipped == {"humming": "OSError: a broken installation"}


def test_machete_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "not_importable", lambda module: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert peers.VllmMachete().missing() == "only for compute capability 9.0, this GPU has 8.6"
    assert peers.VllmMarlin().missing() is None


@pytest.mark.parametrize("name", ["vllm_marlin", "vllm_machete"])
def test_vllm(name: str, packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight and scales come as GPTQ has them; copies are of their own."""
    calls: dict[str, Any] = {}

    def repack(weight: Tensor, order: Tensor, k: int, n: int, bits: int) -> Tensor:
        assert (k, n, bits) == (128, 16, 4) and torch.equal(weight, peers.gptq_weight(packed))
        return weight

    def prepack(weight: Tensor, x_type: torch.dtype, kind: str, scale_type: torch.dtype) -> Tensor:
        assert torch.equal(weight, peers.gptq_weight(packed)) and weight.stride(0) == 1 and kind == "uint4b8"
        return weight

    def machete(x: Tensor, w: Tensor, kind: str, b_group_scales: Tensor, b_group_size: int) -> Tensor:
        calls.update(scales=b_group_scales, group=b_group_size, weight=w)
        return x

    def marlin(x: Tensor, w: Tensor, scales: Tensor, *rest: Any) -> Tensor:
        calls.update(scales=scales, group=32, weight=w)
        assert rest[4:] == ("uint4b8", 16, 128, True)
        return x

    modules = {
        "vllm._custom_ops": SimpleNamespace(gptq_marlin_repack=repack, machete_prepack_B=prepack, machete_mm=machete),
        "vllm.scalar_type": SimpleNamespace(scalar_types=SimpleNamespace(uint4b8="uint4b8")),
        "vllm.model_executor.layers.quantization.utils.marlin_utils": SimpleNamespace(
            marlin_make_empty_g_idx=lambda device: torch.empty(0, dtype=torch.int32),
            marlin_permute_scales=lambda scales, k, n, group: scales,
            marlin_make_workspace_new=lambda device: torch.zeros(1),
            apply_gptq_marlin_linear=marlin,
        ),
    }
    monkeypatch.setattr(peers.importlib, "import_module", lambda module: modules[module])
    function = peers.PEERS[name]().prepare(packed, torch.bfloat16).copy()
    function(torch.zeros(2, 128))
    assert torch.equal(calls["scales"], packed.scales.t()) and calls["group"] == 32
    assert torch.equal(calls["weight"], peers.gptq_weight(packed))
