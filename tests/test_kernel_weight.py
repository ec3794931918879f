"""The kernel form against a reader that goes through it bit by bit, as a lane does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparse_marlin import Scheme, kernel_weight
from sparse_marlin.kernel_weight import KernelWeight, code_coordinate, meta_coordinate
from sparse_marlin.packed import PackedWeight

SCHEMES = [
    Scheme(4, 128, "2:4"),
    Scheme(8, 64, "2:4"),
    Scheme(4, 32, None),
    Scheme(8, -1, None),
    Scheme(4, 64, None, symmetric=False),
    Scheme(8, 32, None, symmetric=False),
]


def random_weight(scheme: Scheme, n: int, k: int, act_order: bool = False) -> PackedWeight:
    codes = torch.randint(1 << scheme.num_bits, (n, k), dtype=torch.uint8)
    mask = torch.rand(n, k // 4, 4).argsort().lt(2).view(n, k) if scheme.sparsity else None
    groups = scheme.num_groups(k)
    scales = torch.rand(n, groups) * 10.0 ** torch.randint(-4, 2, (n, 1)) + 1e-4
    zero = None if scheme.symmetric else torch.randint(1 << scheme.num_bits, (n, groups), dtype=torch.uint8)
    g_idx = torch.arange(groups, dtype=torch.int32).repeat(k // groups) if act_order else None
    return PackedWeight.pack(codes, scales, scheme, mask, zero, g_idx)


def read(form: KernelWeight) -> Tensor:
    """The weight [N, K], float64, from the bits of the kernel form alone."""
    s, dtype = form.scheme, form.scales.dtype
    panels = form.weights.shape[0]
    padded_k = form.weights.shape[1] * 8 // s.num_bits // 128 * (2 if s.sparsity else 1)
    stored_k = padded_k // 2 if s.sparsity else padded_k
    per_word, unit = 32 // s.num_bits, 2.0 ** {torch.float16: -24, torch.bfloat16: -133}[dtype]
    width = 4 * 32 * per_word // 16  # stored columns of a fragment
    codes = torch.zeros(panels * 128, stored_k, dtype=torch.int64)
    words = form.weights.view(torch.int32).view(panels, stored_k // width, 8, 32, 4).tolist()
    for p, panel in enumerate(words):
        for kf, column in enumerate(panel):
            for f, fragment in enumerate(column):
                for lane, registers in enumerate(fragment):
                    for w, word in enumerate(registers):
                        for i in range(per_word):
                            r, c = code_coordinate(s.num_bits, lane, w, i)
                            value = word >> (s.num_bits * i) & ((1 << s.num_bits) - 1)
                            codes[128 * p + 16 * f + r, width * kf + c] = value
    columns = torch.arange(padded_k).repeat(panels * 128, 1)
    if form.meta is not None:
        columns = torch.zeros(panels * 128, stored_k, dtype=torch.int64)
        words = form.meta.view(torch.int32).view(panels, padded_k // 64, 8, 32).tolist()
        for p, panel in enumerate(words):
            for kf, column in enumerate(panel):
                for f, fragment in enumerate(column):
                    for lane, word in enumerate(fragment):
                        for i in range(8):
                            r, quad = meta_coordinate(lane, i)
                            nibble = word >> 4 * i & 15
                            assert nibble & 3 < nibble >> 2, "mma.sp wants positions that increase"
                            row, quad = 128 * p + 16 * f + r, 16 * kf + quad
                            columns[row, 2 * quad] = 4 * quad + (nibble & 3)
                            columns[row, 2 * quad + 1] = 4 * quad + (nibble >> 2)
    group = columns // (padded_k if s.group_size == -1 else s.group_size)
    shift = torch.arange(panels * 128).unsqueeze(1) % 2 * (4 if s.num_bits == 4 else 0)
    per_panel = form.scales.transpose(1, 2).reshape(panels * 64, form.scales.shape[1], -1)  # row pair, group, what
    scale = per_panel[:, :, :2].transpose(1, 2).reshape(panels * 128, -1).double()
    if s.symmetric:
        zero = torch.full(scale.shape, s.zero_code) << shift
    else:
        bits = per_panel[:, :, 2:].contiguous().view(torch.int16).transpose(1, 2).reshape(panels * 128, -1)
        zero = bits.long()
    value = ((codes << shift) - zero.gather(1, group)).double() * unit * scale.gather(1, group)
    value *= form.row_scales.double().unsqueeze(1)
    dense = torch.zeros(panels * 128, padded_k, dtype=torch.float64).scatter_(1, columns, value)
    assert not dense[form.out_features :].any(), "padding has scale 0"
    dense = dense[: form.out_features, : form.in_features]
    return dense if form.perm is None else dense[:, form.perm.argsort()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bits_mean_the_weight(scheme: Scheme, dtype: torch.dtype) -> None:
    packed = random_weight(scheme, 140, 384)
    form = KernelWeight.prepare(packed, dtype)
    # Where the scales are in another precision than the inputs they are rounded to theirs, once.
    rounding = 0 if dtype == scheme.dtype else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(read(form), packed.dequantize(torch.float64), rtol=rounding, atol=0)


def test_columns_are_sorted_by_group() -> None:
    packed = random_weight(Scheme(4, 128, None), 16, 512, act_order=True)
    form = KernelWeight.prepare(packed, torch.float16)
    assert form.perm is not None
    torch.testing.assert_close(read(form), packed.dequantize(torch.float64), rtol=0, atol=0)


def test_groups_of_unequal_width_have_no_kernel_form() -> None:
    packed = random_weight(Scheme(4, 128, None), 16, 512, act_order=True)
    assert KernelWeight.why_not(packed) is None
    assert packed.g_idx is not None
    packed.g_idx[0] = 3
    assert KernelWeight.why_not(packed) == "its groups have 127 to 129 columns; the kernels need 128 in each"


@given(
    n=st.integers(1, 300),
    k=st.integers(1, 12).map(lambda i: 128 * i),
    scheme=st.sampled_from(SCHEMES),
    act_order=st.booleans(),
)
def test_canonical_form_comes_back_bit_for_bit(n: int, k: int, scheme: Scheme, act_order: bool) -> None:
    packed = random_weight(scheme, n, k, act_order and scheme.sparsity is None)
    qweight, meta = KernelWeight.prepare(packed, torch.float16).restore()
    assert torch.equal(qweight, packed.qweight)
    assert (meta is None) == (packed.meta is None)
    assert meta is None or torch.equal(meta, packed.meta)


@pytest.mark.parametrize(("k", "sparsity"), [(4, "2:4"), (36, "2:4"), (7, None), (1, None)])
def test_any_number_of_columns(k: int, sparsity: str | None) -> None:
    packed = random_weight(Scheme(4, -1, sparsity), 3, k)  # type: ignore[arg-type]
    form = KernelWeight.prepare(packed, torch.float16)
    torch.testing.assert_close(read(form), packed.dequantize(torch.float64), rtol=0, atol=0)
    assert torch.equal(form.restore()[0], packed.qweight)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_weight(SCHEMES[0], 700, 512)
    whole = KernelWeight.prepare(packed, torch.float16)
    monkeypatch.setattr(kernel_weight, "_CHUNK", 2 * 128 * 256)
    parts = KernelWeight.prepare(packed, torch.float16)
    assert torch.equal(whole.weights, parts.weights)
    assert whole.meta is not None
    assert parts.meta is not None
    assert torch.equal(whole.meta, parts.meta)
    assert torch.equal(parts.restore()[0], packed.qweight)


def test_scales_far_apart_stay_exact() -> None:
    scheme = Scheme(4, 32, None)
    scales = torch.tensor([[2.0**-24, 2.0**-10, 1.0, 0.0], [60000.0, 3.0, 2.0**-14, 1.0], [0.0, 0.0, 0.0, 0.0]])
    packed = PackedWeight.pack(torch.randint(16, (3, 128), dtype=torch.uint8), scales, scheme)
    form = KernelWeight.prepare(packed, torch.float16)
    assert form.scales.isfinite().all()
    torch.testing.assert_close(read(form), packed.dequantize(torch.float64), rtol=0, atol=0)
