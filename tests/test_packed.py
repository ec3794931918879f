"""PackedWeight against the naive packer, bit for bit; its checks; its shards; its size."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import Example, example, max_nonzeros_per_quad, pack, pack_bits
from torch import Tensor

from sparse_marlin import Scheme
from sparse_marlin.packed import TENSOR_NAMES, PackedWeight

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# (N, K, scheme, g_idx): ordinary widths, rows that end inside a byte of qweight or meta, and every optional tensor.
CASES = [
    (3, 256, Scheme(4, 128, None), False),
    (3, 256, Scheme(8, 128, None), False),
    (3, 256, Scheme(4, 64, "2:4"), False),
    (3, 256, Scheme(8, 64, "2:4"), False),
    (5, 96, Scheme(4, 32, None, False), False),
    (5, 96, Scheme(8, 32, None, False, BF16), False),
    (2, 7, Scheme(4, -1, None), False),
    (2, 7, Scheme(8, -1, None, False), False),
    (1, 1, Scheme(4, -1, None), False),
    (1, 1, Scheme(8, -1, None), False),
    (1, 4, Scheme(4, -1, "2:4"), False),
    (3, 12, Scheme(4, -1, "2:4", True, FP32), False),
    (3, 12, Scheme(8, -1, "2:4", True, BF16), False),
    (2, 20, Scheme(4, -1, "2:4"), False),
    (2, 28, Scheme(8, -1, "2:4"), False),
    (4, 96, Scheme(4, 32, "2:4", True, BF16), False),
    (3, 96, Scheme(4, 32, None), True),
    (3, 96, Scheme(8, 32, None, False), True),
    (3, 9, Scheme(4, -1, None, False), True),
    (2, 128, Scheme(4, 128, None, True, FP32), True),
]
IDS = [f"{n}x{k}-{s}-{s.dtype}{'-g_idx' * g}".replace("torch.", "").replace(" ", "_") for n, k, s, g in CASES]
each_case = pytest.mark.parametrize(("n", "k", "scheme", "g_idx"), CASES, ids=IDS)


def check_against_oracle(e: Example) -> None:
    """Packs, compares every stored byte with the naive packer, and comes back."""
    p = e.packed()
    qweight, meta = pack(e.codes.numpy(), None if e.mask is None else e.mask.numpy(), e.scheme.num_bits)
    np.testing.assert_array_equal(p.qweight.numpy(), qweight)
    assert p.qweight.dtype == torch.uint8
    if meta is None:
        assert p.meta is None
    else:
        assert p.meta is not None and p.meta.dtype == torch.uint8
        np.testing.assert_array_equal(p.meta.numpy(), meta)
    assert (p.out_features, p.in_features) == tuple(e.codes.shape)
    assert p.scales.dtype == e.scheme.dtype and torch.equal(p.scales, e.scales)

    codes, mask = p.unpack()
    expected = e.codes if e.mask is None else e.codes.where(e.mask, e.scheme.zero_code)
    assert codes.dtype == torch.uint8 and torch.equal(codes, expected)
    assert (mask is None) if e.mask is None else (mask is not None and torch.equal(mask, e.mask))
    p.check_indices()

    w = e.weight()
    assert torch.equal(p.dequantize(FP32), w)
    assert torch.equal(p.dequantize(), w.to(e.scheme.dtype)) and p.dequantize().dtype == e.scheme.dtype
    assert torch.equal(p.dequantize(BF16), w.to(BF16))


@each_case
def test_packs_as_the_naive_packer(n: int, k: int, scheme: Scheme, g_idx: bool) -> None:
    check_against_oracle(example(n, k, scheme, seed=n * k, g_idx=g_idx))


@given(st.data())
def test_fuzzed_round_trip(data: st.DataObject) -> None:
    sparsity = data.draw(st.sampled_from([None, "2:4"]))
    scheme = Scheme(
        data.draw(st.sampled_from([4, 8])),
        data.draw(st.sampled_from([-1, 32, 64, 128])),
        sparsity,
        sparsity is not None or data.draw(st.booleans()),
        data.draw(st.sampled_from([FP16, BF16, FP32])),
    )
    unit = scheme.group_size if scheme.group_size != -1 else 4 if sparsity else 1
    n, k = data.draw(st.integers(1, 6)), unit * data.draw(st.integers(1, 192 // unit))
    g_idx = sparsity is None and data.draw(st.booleans())
    check_against_oracle(example(n, k, scheme, data.draw(st.integers(0, 2**32 - 1)), g_idx))


def test_extreme_codes_and_zero_points() -> None:
    for num_bits in (4, 8):
        top = 2**num_bits - 1
        codes = torch.tensor([[0, top, 0, top], [top, top, 0, 0]], dtype=torch.uint8)
        zero = torch.tensor([[top], [0]], dtype=torch.uint8)
        p = PackedWeight.pack(codes, torch.ones(2, 1), Scheme(num_bits, -1, None, False, FP32), zero_point=zero)
        assert p.dequantize().tolist() == [[-top, 0, -top, 0], [top, top, 0, 0]]


def test_kept_weights_may_be_zero() -> None:
    """The mask is stored apart from the integers: a kept weight that is the zero code stays kept."""
    mask = torch.tensor([[True, False, False, True, False, True, True, False]])
    for num_bits in (4, 8):
        codes = torch.full((1, 8), 2 ** (num_bits - 1), dtype=torch.uint8)
        p = PackedWeight.pack(codes, torch.ones(1, 1), Scheme(num_bits, -1), mask)
        unpacked = p.unpack()[1]
        assert unpacked is not None and torch.equal(unpacked, mask)
        assert not p.dequantize().any()


def test_every_quad_pattern_and_code_pair() -> None:
    """All six patterns with all 256 pairs of 4-bit codes, in one weight."""
    patterns = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    mask = torch.zeros(6, 256, 4, dtype=torch.bool)
    codes = torch.full((6, 256, 4), 15, dtype=torch.uint8)
    for row, (i, j) in enumerate(patterns):
        mask[row, :, [i, j]] = True
        codes[row, :, i] = torch.arange(256) % 16
        codes[row, :, j] = torch.arange(256) // 16
    mask, codes = mask.view(6, 1024), codes.view(6, 1024)
    p = PackedWeight.pack(codes, torch.ones(6, 8), Scheme(), mask)
    assert p.qweight.tolist() == [list(range(256))] * 6
    unpacked, unpacked_mask = p.unpack()
    assert unpacked_mask is not None and torch.equal(unpacked_mask, mask)
    assert torch.equal(unpacked, codes.where(mask, 8))


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 32), Scheme(4, 32, None), Scheme(8, 32, None)], ids=str)
def test_strided_inputs_pack_as_contiguous_ones(scheme: Scheme) -> None:
    e = example(8, 64, scheme)
    transposed = dataclasses.replace(
        e,
        codes=e.codes.T.contiguous().T,
        scales=e.scales.T.contiguous().T,
        mask=None if e.mask is None else e.mask.T.contiguous().T,
    )
    wider = dataclasses.replace(e, codes=torch.nn.functional.pad(e.codes, (1, 3))[:, 1:65])
    for other in (transposed, wider):
        assert not other.codes.is_contiguous()
        assert_equal(other.packed(), e.packed())


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 32), Scheme(4, 32, None), Scheme(8, 32, None)], ids=str)
def test_one_row_of_any_strides(scheme: Scheme) -> None:
    """A column turned into a row counts as contiguous whatever its strides say."""
    e = example(1, 64, scheme)

    def column(row: Tensor) -> Tensor:
        return row.flatten().unsqueeze(1).T

    turned = dataclasses.replace(e, codes=column(e.codes), mask=None if e.mask is None else column(e.mask))
    assert turned.codes.stride() == (1, 1)
    assert_equal(turned.packed(), e.packed())


def test_packing_copies() -> None:
    e = example(4, 64, Scheme(8, 32, None))
    p = e.packed()
    before = p.dequantize()
    e.codes.zero_()
    assert torch.equal(p.dequantize(), before)


def assert_equal(a: PackedWeight, b: PackedWeight) -> None:
    assert (a.scheme, a.in_features) == (b.scheme, b.in_features)
    assert a.tensors().keys() == b.tensors().keys()
    for name, t in a.tensors().items():
        assert torch.equal(t, b.tensors()[name]), name


# ------------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("k", [128, 1024, 7424])
def test_two_four_int4_takes_three_bits_a_weight_and_its_scales(k: int, dtype: torch.dtype) -> None:
    n = 16
    e = example(n, k, Scheme(dtype=dtype))
    assert 8 * (e.packed().nbytes - n * k // 128 * dtype.itemsize) == 3 * n * k


@each_case
def test_nbytes_is_bits_per_weight_when_bytes_are_full(n: int, k: int, scheme: Scheme, g_idx: bool) -> None:
    p = example(n, k, scheme, g_idx=g_idx).packed()
    padding = 0 if k % 8 == 0 else 2 * n
    bits = n * k * scheme.bits_per_weight(k) + 32 * k * g_idx
    assert bits <= 8 * p.nbytes <= bits + 8 * padding


# ----------------------------------------------------------------------------------------------------- bad tensors

META = torch.device("meta")
FULL = [
    example(4, 64, Scheme(4, 32, "2:4")),
    example(4, 64, Scheme(8, 32, "2:4")),
    example(4, 64, Scheme(4, 32, None, False), g_idx=True),
    example(4, 64, Scheme(8, -1, None, False), g_idx=True),
]


def spoiled(t: Tensor) -> list[tuple[str, Tensor]]:
    """The same tensor with each property wrong in turn."""
    other = {torch.uint8: torch.int8, torch.int32: torch.int64}.get(t.dtype, torch.float64)
    return [
        ("row", t[:-1]),
        ("rows", torch.cat([t, t])),
        ("column", t[..., :-1]),
        ("columns", torch.cat([t, t], -1)),
        ("dim", t.unsqueeze(0)),
        ("flat", t.flatten() if t.dim() > 1 else t.view(1, -1)),
        ("scalar", t.flatten()[0]),
        ("empty", t[:0]),
        ("dtype", t.to(other)),
        ("float", t.double()),
        ("device", t.to(META)),
    ]


@pytest.mark.parametrize("name", TENSOR_NAMES)
@pytest.mark.parametrize("e", FULL, ids=lambda e: str(e.scheme))
def test_every_tensor_of_the_wrong_shape_dtype_or_device_is_refused(e: Example, name: str) -> None:
    tensors = e.packed().tensors()
    if name not in tensors:
        with pytest.raises(ValueError, match=name):
            PackedWeight.from_tensors({**tensors, name: torch.zeros(4, 8, dtype=torch.uint8)}, e.scheme, 64)
        return
    for _, bad in spoiled(tensors[name]):
        # Any tensor may be the one that the error names: a qweight with a row less makes the scales one too long.
        with pytest.raises(ValueError, match="|".join((*TENSOR_NAMES, "at least one row"))):
            PackedWeight.from_tensors({**tensors, name: bad}, e.scheme, 64)
    if name != "g_idx":
        with pytest.raises(ValueError, match=name):
            PackedWeight.from_tensors({n: t for n, t in tensors.items() if n != name}, e.scheme, 64)
    assert_equal(PackedWeight.from_tensors(tensors, e.scheme, 64), e.packed())


def test_an_unknown_tensor_is_refused() -> None:
    e = FULL[0]
    with pytest.raises(ValueError, match="workspace"):
        PackedWeight.from_tensors({**e.packed().tensors(), "workspace": e.scales}, e.scheme, 64)


@pytest.mark.parametrize("in_features", [0, -64, 32, 60, 68, 128])
def test_in_features_that_contradict_the_tensors_are_refused(in_features: int) -> None:
    for e in FULL:
        with pytest.raises(ValueError):
            PackedWeight.from_tensors(e.packed().tensors(), e.scheme, in_features)


def test_an_error_says_expected_and_got() -> None:
    e = FULL[0]
    with pytest.raises(ValueError, match=r"scales.*\[4, 2\].*\[4, 1\]"):
        PackedWeight.from_tensors({**e.packed().tensors(), "scales": e.scales[:, :1]}, e.scheme, 64)


PACK_ARGUMENTS = ("codes", "scales", "mask", "zero_point", "g_idx")


@pytest.mark.parametrize("name", PACK_ARGUMENTS)
@pytest.mark.parametrize("e", FULL, ids=lambda e: str(e.scheme))
def test_pack_refuses_every_argument_of_the_wrong_shape_dtype_or_device(e: Example, name: str) -> None:
    good: Tensor | None = getattr(e, name)
    if good is None:
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(e, **{name: torch.zeros(4, 8, dtype=torch.uint8)}).packed()
        return
    for what, bad in spoiled(good):
        if name == "scales" and what in ("dtype", "float"):
            continue  # cast, as documented
        with pytest.raises(ValueError, match="|".join((*PACK_ARGUMENTS, "at least one row", "in_features"))):
            dataclasses.replace(e, **{name: bad}).packed()
    if name != "g_idx":
        with pytest.raises((ValueError, TypeError, AttributeError)):
            dataclasses.replace(e, **{name: None}).packed()


@pytest.mark.parametrize("kept", [(), (0,), (3,), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("num_bits", [4, 8])
def test_a_quad_that_keeps_other_than_two_is_refused(num_bits: int, kept: tuple[int, ...]) -> None:
    for quad in (0, 7, 14):
        e = example(3, 60, Scheme(num_bits, -1))
        assert e.mask is not None
        e.mask[2, 4 * quad : 4 * quad + 4] = False
        e.mask[2, [4 * quad + i for i in kept]] = True
        with pytest.raises(ValueError, match="exactly two"):
            e.packed()


def test_a_code_that_does_not_fit_is_refused() -> None:
    e = example(4, 64, Scheme(4, 32, None))
    for code in (16, 128, 255):
        e.codes[3, 63] = code
        with pytest.raises(ValueError, match=f"15.*{code}"):
            e.packed()


def test_values_under_pruned_positions_are_ignored() -> None:
    for num_bits in (4, 8):
        e = example(4, 64, Scheme(num_bits, 32))
        assert e.mask is not None
        other = dataclasses.replace(e, codes=e.codes.where(e.mask, 2**num_bits - 1))
        assert_equal(other.packed(), e.packed())


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 62, 63, 66])
def test_in_features_that_do_not_fill_quads_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        PackedWeight.pack(
            torch.zeros(2, k, dtype=torch.uint8), torch.ones(2, 1), Scheme(4, -1), torch.ones(2, k, dtype=torch.bool)
        )


def test_in_features_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size=64 would fit"):
        PackedWeight.pack(torch.zeros(2, 192, dtype=torch.uint8), torch.ones(2, 1), Scheme(4, 128, None))


# --------------------------------------------------------------------------------------------------------- indices


def test_check_indices_knows_every_nibble() -> None:
    legal = {pack_bits([i, j], 2)[0] for i in range(4) for j in range(i + 1, 4)}
    assert len(legal) == 6
    e = example(2, 12, Scheme(4, -1))  # three quads: the fourth nibble is padding
    for nibble in range(16):
        for quad in range(3):
            p = e.packed()
            assert p.meta is not None
            shift = 4 * (quad % 2)
            p.meta[1, quad // 2] = int(p.meta[1, quad // 2]) & ~(15 << shift) & 255 | nibble << shift
            if nibble in legal:
                p.check_indices()
            else:
                with pytest.raises(ValueError, match="meta"):
                    p.check_indices()


@pytest.mark.parametrize("bad", [-1, 3, 4, 2**31 - 1, -(2**31)])
def test_check_indices_refuses_a_group_that_does_not_exist(bad: int) -> None:
    e = example(2, 96, Scheme(4, 32, None), g_idx=True)
    assert e.g_idx is not None
    e.packed().check_indices()
    e.g_idx[95] = bad
    with pytest.raises(ValueError, match="g_idx"):
        e.packed().check_indices()


# ---------------------------------------------------------------------------------------------------------- shards

SHARDS = [
    (12, 256, Scheme(4, 64, "2:4")),
    (12, 256, Scheme(8, 64, "2:4")),
    (12, 256, Scheme(4, 32, None, False)),
    (12, 256, Scheme(8, 32, None)),
    (12, 48, Scheme(4, -1, "2:4")),
    (12, 48, Scheme(8, -1, "2:4")),
    (12, 48, Scheme(4, -1, None, False)),
    (12, 48, Scheme(8, -1, None)),
    (4, 15, Scheme(8, -1, None)),
]


@pytest.mark.parametrize(("n", "k", "scheme"), SHARDS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_weights_that_join_to_the_whole(n: int, k: int, scheme: Scheme, dim: int) -> None:
    whole = example(n, k, scheme).packed()
    w = whole.dequantize()
    counts = [c for c in range(1, 13) if legal(whole, dim, c)]
    assert len(counts) > 1
    for count in counts:
        parts = [whole.shard(dim, i, count) for i in range(count)]
        for p in parts:
            p.check_indices()
            assert p.scheme == scheme
            assert all(t.is_contiguous() for t in p.tensors().values())
        assert torch.equal(torch.cat([p.dequantize() for p in parts], dim), w)
        for name, t in whole.tensors().items():
            if t.shape[dim] > 1:
                assert torch.equal(torch.cat([p.tensors()[name] for p in parts], dim), t), name


def legal(p: PackedWeight, dim: int, count: int) -> bool:
    """Equal parts; along K each of whole groups, or of whole bytes of every tensor where a row is one group."""
    if dim == 0:
        return p.out_features % count == 0
    unit = p.scheme.group_size
    if unit == -1:
        unit = 8 if p.scheme.sparsity else 8 // p.scheme.num_bits
    return count == 1 or p.in_features % (unit * count) == 0


@pytest.mark.parametrize(("n", "k", "scheme"), SHARDS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_an_illegal_count_is_refused_with_the_legal_ones(n: int, k: int, scheme: Scheme, dim: int) -> None:
    whole = example(n, k, scheme).packed()
    possible = [c for c in range(1, 13) if legal(whole, dim, c)]
    for count in (0, -1, *(c for c in range(1, 13) if c not in possible)):
        with pytest.raises(ValueError) as error:
            whole.shard(dim, 0, count)
        assert ", ".join(map(str, possible)) in str(error.value)
    for index in (-1, 2, 3):
        with pytest.raises(ValueError):
            whole.shard(0, index, 2)


@pytest.mark.parametrize(("n", "k", "scheme"), [(3, 20, Scheme(4, -1)), (3, 15, Scheme(4, -1, None))], ids=str)
def test_one_shard_is_always_the_whole(n: int, k: int, scheme: Scheme) -> None:
    whole = example(n, k, scheme).packed()
    for dim in (0, 1):
        assert_equal(whole.shard(dim, 0, 1), whole)
        with pytest.raises(ValueError):
            whole.shard(dim, 0, 5 if dim else 2)


@pytest.mark.parametrize("dim", [2, -1, -2, 7])
def test_a_dimension_that_a_weight_does_not_have_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="dim"):
        example(4, 256, Scheme(4, 32)).packed().shard(dim, 0, 2)


def test_a_border_inside_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\b1, 2, 4\b"):
        example(2, 512, Scheme()).packed().shard(1, 0, 8)


def test_shards_of_a_weight_in_activation_order() -> None:
    e = example(4, 96, Scheme(4, 32, None), g_idx=True)
    whole = e.packed()
    assert torch.equal(torch.cat([whole.shard(0, i, 2).dequantize() for i in range(2)]), whole.dequantize())
    with pytest.raises(ValueError, match="g_idx"):
        whole.shard(1, 0, 3)


def test_shards_are_copies() -> None:
    whole = example(4, 96, Scheme(4, 32, None), g_idx=True).packed()
    before = {n: t.clone() for n, t in whole.tensors().items()}
    for t in whole.shard(0, 0, 2).tensors().values():
        t.zero_()
    assert all(torch.equal(t, before[n]) for n, t in whole.tensors().items())


# ------------------------------------------------------------------------------------------------------ large ones


def test_dequantized_rows_never_exceed_two_nonzeros_per_quad() -> None:
    e = example(32, 576, Scheme(4, 64))
    assert max_nonzeros_per_quad(e.packed().dequantize()) == 2


def test_a_weight_of_several_chunks_packs_like_its_parts() -> None:
    """Wide enough that the packer cannot hold it in one piece."""
    n, k = 5, 1 << 22
    quads = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    mask = quads[torch.arange(n * k // 4) * 7 % 4].view(n, k)
    codes = (torch.arange(n * k) % 13).to(torch.uint8).view(n, k)
    whole = PackedWeight.pack(codes, torch.ones(n, 1), Scheme(4, -1), mask)
    for row in range(n):
        part = PackedWeight.pack(codes[row : row + 1], torch.ones(1, 1), Scheme(4, -1), mask[row : row + 1])
        assert torch.equal(whole.qweight[row], part.qweight[0])
        assert whole.meta is not None and part.meta is not None and torch.equal(whole.meta[row], part.meta[0])
    unpacked, unpacked_mask = whole.unpack()
    assert unpacked_mask is not None and torch.equal(unpacked_mask, mask)
    assert torch.equal(unpacked, codes.where(mask, 8))


@pytest.mark.slow
def test_packing_is_quick() -> None:
    """28672 x 8192 within four seconds of one core, measured on a quarter of its rows."""
    n, k = 28672 // 4, 8192
    mask = torch.tensor([True, False, False, True]).repeat(n, k // 4)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.ones(n, k // 128)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        PackedWeight.pack(codes, scales, Scheme(), mask)
        seconds.append(time.process_time() - start)
    assert min(seconds) <= 1.0
