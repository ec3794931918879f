"""The kernel form: against C++ byte for byte, against what the lanes of a warp make of it, and back again."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import example
from torch import Tensor

from sparse_marlin import Scheme
from sparse_marlin.layouts import KernelWeight, canonical_codes, coordinates, from_kernel, to_kernel, why_not
from sparse_marlin.layouts.scales import pack_scales, scale_limit, unpack_scales
from sparse_marlin.packed import PackedWeight

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ROOT = Path(__file__).resolve().parents[2]

SCHEMES = [
    Scheme(4, 128, "2:4"),
    Scheme(4, 32, "2:4", dtype=BF16),
    Scheme(8, 64, "2:4"),
    Scheme(8, -1, "2:4", dtype=BF16),
    Scheme(4, 64, None),
    Scheme(4, -1, None, dtype=BF16),
    Scheme(8, 128, None, dtype=BF16),
    Scheme(8, -1, None),
    Scheme(4, 32, None, False),
    Scheme(4, -1, None, False, BF16),
    Scheme(8, 32, None, False, BF16),
    Scheme(8, 128, None, False),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s} {s.dtype}".replace("torch.", ""))


def assert_same(a: PackedWeight, b: PackedWeight) -> None:
    assert (a.scheme, a.in_features) == (b.scheme, b.in_features)
    assert a.tensors().keys() == b.tensors().keys()
    for name, t in a.tensors().items():
        other = b.tensors()[name]
        assert t.dtype == other.dtype and t.shape == other.shape, name
        assert torch.equal(bits(t), bits(other)), name


def bits(t: Tensor) -> Tensor:
    """Floating-point numbers as integers, so that signs of zero count."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.itemsize]) if t.is_floating_point() else t


# -------------------------------------------------------------------------------------------------------------- C++


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dump.cpp, compiled."""
    program = tmp_path_factory.mktemp("layouts") / "dump"
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'kernels'}"]
    source = Path(__file__).with_name("dump.cpp")
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", *include, source, "-o", program], check=True)
    return program


def output(program: Path, *arguments: object) -> bytes:
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True).stdout


def test_coordinates_are_those_of_layout_h(dump: Path) -> None:
    pairs = [coordinates.code_coordinates(4), coordinates.code_coordinates(8), coordinates.meta_coordinates()]
    want = torch.cat([torch.stack(pair, -1).view(-1, 2) for pair in pairs])
    assert np.frombuffer(output(dump, "map"), np.int32).reshape(-1, 2).tolist() == want.tolist()


@each_scheme
@pytest.mark.parametrize(("n", "k"), [(1, 128), (131, 384), (256, 512), (77, 100)], ids=str)
def test_bytes_are_those_of_the_kernels_own_tests(dump: Path, scheme: Scheme, n: int, k: int) -> None:
    if scheme.group_size != -1:
        k = -(-k // scheme.group_size) * scheme.group_size
    sparse, zero_points = scheme.sparsity is not None, not scheme.symmetric
    kind = (scheme.num_bits, scheme.group_size, int(sparse), int(zero_points), int(scheme.dtype == BF16))
    stream = memoryview(bytearray(output(dump, "weight", *kind, n, k)))

    def read(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal stream
        t = torch.frombuffer(stream, dtype=dtype, count=int(np.prod(shape))).view(shape)
        stream = stream[t.nbytes :]
        return t

    stored, groups = k // 2 if sparse else k, scheme.num_groups(k)
    codes, quads = read(torch.uint8, n, stored), read(torch.uint8, n, k // 4) if sparse else None
    scales = read(scheme.dtype, n, groups)
    zero = read(torch.uint8, n, groups) if zero_points else None
    if quads is None:
        packed = PackedWeight.pack(codes, scales, scheme, None, zero)
    else:
        positions = torch.stack([quads & 3, quads >> 2], -1).long()
        mask = torch.zeros(n, k // 4, 4, dtype=torch.bool).scatter_(2, positions, True).view(n, k)
        full = torch.zeros(n, k, dtype=torch.uint8).masked_scatter(mask, codes)
        packed = PackedWeight.pack(full, scales, scheme, mask)

    kernel = to_kernel(packed, scheme.dtype)
    for name in ("weights", "meta", "scales", "row_scales"):
        t: Tensor | None = getattr(kernel, name)
        if t is not None:
            assert torch.equal(bits(t), bits(read(t.dtype, *t.shape))), name
    assert not stream
    assert_same(from_kernel(kernel), packed)


# ------------------------------------------------------------------------------------------------------------ lanes


def as_numbers(halves: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values of 16-bit patterns."""
    return torch.from_numpy(halves.astype(np.uint16).view(np.int16)).view(dtype).double().numpy()


def what_lanes_multiply(kernel: KernelWeight) -> np.ndarray:
    """The padded weight [rows, columns], float64, as mma and mma.sp find it in the registers of dequant.cuh.

    Written from the PTX ISA's figures of operand A and of metadata alone: a lane 4 g + t has, in half h of register i,
    instruction row g + 8 (i % 2) and column 2 t + h + 8 (i / 2). Instruction rows g and g + 8 are rows 2 g and 2 g + 1.
    Products are not rounded.
    """
    s, dtype = kernel.scheme, kernel.scales.dtype
    words = kernel.weights.numpy().view(np.uint32)
    panels, runs = words.shape[:2]
    words = words.reshape(panels, runs, 8, 32, 4)
    steps = 4 if s.num_bits == 4 else 2  # instructions per fragment
    depth = 32 if s.sparsity else 16  # columns of an instruction
    columns = runs * steps * depth
    group_width = columns if s.group_size == -1 else s.group_size
    scales = kernel.scales.view(torch.int16).numpy().view(np.uint16)
    meta = None if kernel.meta is None else kernel.meta.numpy().view(np.uint32).reshape(panels, -1, 8, 32)
    out = np.zeros((panels, 8, 16, columns))
    panel, run, tile = np.ogrid[:panels, :runs, :8]
    for lane in range(32):
        g, t = divmod(lane, 4)
        for step in range(steps):
            if s.num_bits == 4:
                w = words[..., lane, step]
                registers = [w & 0x000F000F, w & 0x00F000F0, w >> 8 & 0x000F000F, w >> 8 & 0x00F000F0]
            else:
                pair = words[..., lane, 2 * step], words[..., lane, 2 * step + 1]
                registers = [w >> shift & 0x00FF00FF for w in pair for shift in (0, 8)]
            first = (run * steps + step) * depth
            for i, register in enumerate(registers):
                second_row = i % 2
                for half in range(2):
                    at = 2 * t + half + 8 * (i // 2)
                    column = first + at
                    if meta is not None:  # two stored values per quad
                        quad, chosen = at // 2, at % 2
                        selector = first // 32 % 2
                        holder = 4 * g + 2 * selector + quad // 4
                        nibble = meta[panel, first // 64, tile, holder] >> 4 * (quad % 4 + 4 * second_row)
                        assert (nibble & 3 < nibble >> 2 & 3).all(), "mma.sp wants positions that increase"
                        column = first + 4 * quad + (nibble >> 2 * chosen & 3)
                    record = scales[panel, column // group_width, tile * 8 + g]
                    scale = as_numbers(record[..., second_row], dtype)
                    if s.symmetric:
                        middle = np.array([s.zero_code << (4 * second_row if s.num_bits == 4 else 0)])
                        zero = as_numbers(middle, dtype)
                    else:
                        zero = as_numbers(record[..., 2 + second_row], dtype)
                    code = as_numbers(register >> 16 * half & 0xFFFF, dtype)
                    out[panel, tile, 2 * g + second_row, column] = (code - zero) * scale
    return out.reshape(panels * 128, columns) * kernel.row_scales.double().numpy()[:, None]


@each_scheme
@pytest.mark.parametrize(("n", "k"), [(140, 384), (3, 36)], ids=str)
def test_lanes_find_the_weight(scheme: Scheme, n: int, k: int) -> None:
    if scheme.group_size != -1:
        k = -(-k // scheme.group_size) * scheme.group_size
    e = example(n, k, scheme, seed=n)
    kernel = to_kernel(e.packed(), scheme.dtype)
    w = what_lanes_multiply(kernel)
    np.testing.assert_array_equal(w[:n, :k], e.packed().dequantize(torch.float64).numpy())
    assert not w[n:].any()
    if scheme.symmetric or scheme.group_size != -1:  # else columns past K have a scale, and meet an x that is zero
        assert not w[:, k:].any()
    assert np.isfinite(w).all()


@pytest.mark.parametrize("scheme", [Scheme(4, 32, None, dtype=FP32), Scheme(4, 64, dtype=BF16), Scheme(8, -1)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_scales_of_another_dtype_are_rounded_once(scheme: Scheme, dtype: torch.dtype) -> None:
    """Also scales that the dtype of the activations could not hold: normalisation comes first."""
    e = example(6, 256, scheme)
    tiny = 2.0**-12 if scheme.dtype == FP16 else 1e-20
    packed = replace(e, scales=(e.scales.double() * tiny).to(scheme.dtype)).packed()
    kernel = to_kernel(packed, dtype)
    want, eps = packed.dequantize(torch.float64).numpy(), torch.finfo(dtype).eps
    np.testing.assert_allclose(what_lanes_multiply(kernel)[:6], want, rtol=eps / 2, atol=0)
    again = from_kernel(kernel)
    assert torch.equal(again.qweight, packed.qweight)
    if torch.finfo(scheme.dtype).eps >= eps:
        assert_same(again, packed)
    else:
        torch.testing.assert_close(again.scales, packed.scales, rtol=eps / 2, atol=0)


# ----------------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_every_scale_of_the_kernels_dtype_survives(num_bits: int, dtype: torch.dtype) -> None:
    """All of them in each of two rows, subnormal and negative ones too, up to the documented limit."""
    limit = scale_limit(dtype) if dtype == BF16 else 2.0**12 if num_bits == 4 else float("inf")
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[every.isfinite() & (every.abs() < limit)]
    scales = torch.stack([every, every.flip(0)])
    stored, row_scales = pack_scales(scales, None, num_bits, every.numel(), dtype)
    assert stored.isfinite().all() and row_scales.isfinite().all()
    assert torch.equal(bits(unpack_scales(stored, row_scales, 2, every.numel(), num_bits, dtype)[0]), bits(scales))


def test_a_scale_far_below_a_huge_one_of_its_row_is_rounded() -> None:
    scales = torch.tensor([[2.0**-24, 32768.0]] * 2, dtype=FP16)
    again, _ = unpack_scales(*pack_scales(scales, None, 4, 2, FP16), 2, 2, 4, FP16)
    assert again.tolist() == [[2.0**-24, 32768.0], [0.0, 32768.0]]  # codes of odd rows are 16 times larger


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("largest", [1e-45, 1e-30, 0.1, 1.9999999, 3e4, 1e30])
def test_rows_are_normalised_to_the_last_power_of_two(dtype: torch.dtype, largest: float) -> None:
    scales = torch.tensor([[largest, largest / 3], [-largest, 0.0], [0.0, 0.0]], dtype=FP32)
    stored, row_scales = pack_scales(scales, None, 8, 2, dtype)
    top = stored[0, :, 0].abs().amax(0).double()
    top_of_dtype = torch.finfo(dtype).max
    assert (top <= top_of_dtype).all() and (2 * top > top_of_dtype * (1 - torch.finfo(dtype).eps)).all()
    assert (torch.frexp(row_scales).mantissa == 0.5).all()
    assert (row_scales[2:] == 1).all()
    again, _ = unpack_scales(stored, row_scales, 3, 2, 8, FP32)
    torch.testing.assert_close(again, scales, rtol=torch.finfo(dtype).eps / 2, atol=1e-45)


# ---------------------------------------------------------------------------------------------------------- inverse


@given(data=st.data())
@settings(max_examples=80)
def test_the_canonical_form_comes_back(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    unit = scheme.group_size if scheme.group_size != -1 else 4 if scheme.sparsity else 1
    n, k = data.draw(st.integers(1, 270)), unit * data.draw(st.integers(1, max(2, 600 // unit)))
    packed = random_weight(n, k, scheme, data.draw(st.integers(0, 2**31)))
    if scheme.sparsity is None and data.draw(st.booleans()):
        groups = torch.arange(k, dtype=torch.int32) // scheme.group_width(k)
        g_idx = groups[torch.randperm(k)]
        packed = replace(packed, g_idx=g_idx if bool((g_idx.diff() < 0).any()) else None)
    kernel = to_kernel(packed, scheme.dtype)
    assert_same(from_kernel(kernel), packed)
    assert torch.equal(canonical_codes(kernel)[0], packed.qweight)
    for f in fields(kernel):
        t = getattr(kernel, f.name)
        assert not isinstance(t, Tensor) or t.is_contiguous(), f.name


def random_weight(n: int, k: int, scheme: Scheme, seed: int = 0) -> PackedWeight:
    torch.manual_seed(seed)
    codes = torch.randint(1 << scheme.num_bits, (n, k), dtype=torch.uint8)
    mask = torch.rand(n, k // 4, 4).argsort().lt(2).view(n, k) if scheme.sparsity else None
    groups = scheme.num_groups(k)
    zero = None if scheme.symmetric else torch.randint(1 << scheme.num_bits, (n, groups), dtype=torch.uint8)
    return PackedWeight.pack(codes, torch.randn(n, groups) * 1e-3, scheme, mask, zero)


@each_scheme
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    packed = random_weight(700, 384, scheme)
    whole = to_kernel(packed, scheme.dtype)
    monkeypatch.setattr(coordinates, "_CHUNK", 2 * 128 * 512)
    parts = to_kernel(packed, scheme.dtype)
    assert torch.equal(parts.weights, whole.weights)
    assert (parts.meta is None) if whole.meta is None else torch.equal(parts.meta, whole.meta)
    assert_same(from_kernel(whole), packed)


def test_slices_of_larger_tensors_are_taken() -> None:
    packed = random_weight(64, 512, Scheme(4, 64, None))
    columns = {name: t[:, : t.shape[1] // 2] for name, t in packed.tensors().items()}
    part = PackedWeight.from_tensors(columns, packed.scheme, 256)
    assert not part.qweight.is_contiguous()
    assert_same(from_kernel(to_kernel(part, FP16)), packed.shard(1, 0, 2))


# ------------------------------------------------------------------------------------------------- activation order


@pytest.mark.parametrize("scheme", [Scheme(4, 32, None, False), Scheme(8, 64, None)], ids=str)
def test_columns_are_sorted_by_group_and_else_stay_in_order(scheme: Scheme) -> None:
    k = 256
    e = example(9, k, scheme, g_idx=True)
    assert e.g_idx is not None
    kernel = to_kernel(e.packed(), FP16)
    assert kernel.perm is not None and kernel.perm.dtype == torch.int32
    assert kernel.perm.tolist() == sorted(range(k), key=lambda column: int(e.g_idx[column]))
    w = what_lanes_multiply(kernel)[:9, :k]
    np.testing.assert_array_equal(w, e.packed().dequantize(torch.float64)[:, kernel.perm.long()].numpy())
    x = torch.randn(5, k, dtype=torch.float64)
    torch.testing.assert_close(
        x[:, kernel.perm.long()] @ torch.from_numpy(w).T, x @ e.packed().dequantize(torch.float64).T
    )


def test_groups_that_are_runs_already_need_no_gather() -> None:
    packed = random_weight(5, 96, Scheme(4, 32, None))
    kernel = to_kernel(replace(packed, g_idx=torch.arange(96, dtype=torch.int32) // 32), FP16)
    assert kernel.perm is None
    assert_same(from_kernel(kernel), packed)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("group", [-1, 0, 1, 2, 3, 2**31 - 1])
def test_groups_of_unequal_width_are_refused(group: int) -> None:
    packed = example(4, 96, Scheme(4, 32, None), g_idx=True).packed()
    assert why_not(packed, FP16) is None
    assert packed.g_idx is not None
    column = int((packed.g_idx != group).int().argmax())
    packed.g_idx[column] = group
    with pytest.raises(ValueError, match=r"each group 32 columns"):
        to_kernel(packed, FP16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e37])
def test_scales_out_of_range_are_refused(bad: float) -> None:
    packed = example(4, 96, Scheme(4, 32, dtype=BF16)).packed()
    packed.scales[3, 1] = bad
    with pytest.raises(ValueError, match="finite and below"):
        to_kernel(packed, BF16)


def test_scales_just_within_range_are_taken() -> None:
    packed = example(4, 96, Scheme(4, 32, dtype=BF16)).packed()
    packed.scales[3] = scale_limit(BF16) * (1 - 2.0**-8)
    kernel = to_kernel(packed, BF16)
    assert kernel.row_scales.isfinite().all()
    np.testing.assert_array_equal(what_lanes_multiply(kernel)[:4, :96], packed.dequantize(torch.float64).numpy())


def test_zero_points_out_of_range_are_refused() -> None:
    packed = example(4, 96, Scheme(4, 32, None, False)).packed()
    assert packed.zero_point is not None
    packed.zero_point[2, 2] = 16  # one more than a code: some formats count from 1
    for dtype in (FP16, BF16):
        kernel = to_kernel(packed, dtype)
        np.testing.assert_allclose(
            what_lanes_multiply(kernel)[:4, :96], packed.dequantize(torch.float64).numpy(), rtol=torch.finfo(dtype).eps
        )
    packed.zero_point[2, 2] = 17
    with pytest.raises(ValueError, match="zero points reach 17; the kernels take 16"):
        to_kernel(packed, FP16)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2:4 INT4 group 32 weight \[4, 96\].*not float32"):
        to_kernel(example(4, 96, Scheme(4, 32)).packed(), FP32)


# ------------------------------------------------------------------------------------------------------------- time


@pytest.mark.slow
def test_rearranging_is_quick() -> None:
    """28672 x 8192 within six seconds each way on one core, measured on an eighth of its rows."""
    packed = random_weight(28672 // 8, 8192, Scheme(4, 128, None))
    seconds: dict[str, list[float]] = {"to": [], "from": []}
    for _ in range(3):
        start = time.perf_counter()
        kernel = to_kernel(packed, FP16)
        seconds["to"].append(time.perf_counter() - start)
        start = time.perf_counter()
        from_kernel(kernel)
        seconds["from"].append(time.perf_counter() - start)
    assert max(min(s) for s in seconds.values()) < 6 / 8, seconds


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", [Scheme(4, 128, None), Scheme(4, 128, "2:4"), Scheme(8, 128, None, False)], ids=str)
def test_a_gpu_does_the_same_in_fifty_milliseconds(scheme: Scheme) -> None:
    small = random_weight(300, 640, scheme)
    there = to_kernel(small.to("cuda"), FP16)
    here = to_kernel(small, FP16)
    for f in fields(here):
        t = getattr(here, f.name)
        assert not isinstance(t, Tensor) or torch.equal(getattr(there, f.name).cpu(), t), f.name
    assert_same(from_kernel(there).to("cpu"), small)

    small = random_weight(28672 // 16, 8192, scheme).to("cuda")
    large = PackedWeight.from_tensors({n: t.repeat(16, 1) for n, t in small.tensors().items()}, scheme, 8192)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to_kernel(large, FP16)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05, seconds
