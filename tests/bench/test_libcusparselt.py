"""cuSPARSELt's C interface is called as its header says: against a library of that interface for the CPU."""

from __future__ import annotations

import ctypes

import libcusparselt
import pytest
import torch
from fakes import compress_evens
from libcusparselt import Product, cusparselt_linear
from torch import Tensor


def read(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).bfloat16()


def weight(n: int, k: int) -> Tensor:
    w = integers(n, k)
    w[:, 1::2] = 0
    return w


@pytest.mark.parametrize("m", [1, 8, 13])
def test_product(fake_cusparselt: ctypes.CDLL, m: int) -> None:
    w, x = weight(32, 16), integers(m, 16)
    for algorithm in (0, 1):  # without and with a workspace
        y = cusparselt_linear(x, compress_evens(w), 32, algorithm)
        assert y.is_contiguous() and torch.equal(y, x @ w.t())


def test_weights_share_plans(fake_cusparselt: ctypes.CDLL) -> None:
    plans, products = read(fake_cusparselt, "plans"), read(fake_cusparselt, "products")
    weights = [weight(16, 32) for _ in range(3)]
    for m in (1, 7, 8):
        x = integers(m, 32)
        for w in weights:
            assert torch.equal(cusparselt_linear(x, compress_evens(w), 16, 1), x @ w.t())
    assert (read(fake_cusparselt, "plans") - plans, read(fake_cusparselt, "products") - products) == (1, 9)
    cusparselt_linear(integers(9, 32), compress_evens(weights[0]), 16, 1)
    assert read(fake_cusparselt, "plans") - plans == 2


def test_algorithms(fake_cusparselt: ctypes.CDLL) -> None:
    """Their number needs no plan; one that is refused says so, and so does one that is not there."""
    plans = read(fake_cusparselt, "plans")
    assert Product(16, 32, 8, torch.bfloat16).num_algorithms == 4
    assert Product(32, 32, 8, torch.bfloat16).num_algorithms == 3
    assert read(fake_cusparselt, "plans") == plans
    refused = Product(16, 32, 8, torch.bfloat16, 2)
    with pytest.raises(RuntimeError, match=r"cusparseLtMatmulPlanInit: operation not supported \(status 10\)"):
        refused.prepare()
    with pytest.raises(RuntimeError, match="cusparseLtMatmulAlgSetAttribute: invalid value"):
        Product(16, 32, 8, torch.bfloat16, 4)


def test_everything_is_destroyed(fake_cusparselt: ctypes.CDLL) -> None:
    libcusparselt.product.cache_clear()
    before = read(fake_cusparselt, "living")
    kept = Product(16, 32, 8, torch.bfloat16, 1)
    for _ in range(2):
        kept.prepare()
    assert read(fake_cusparselt, "living") == before + 4  # three matrices and the plan
    del kept
    assert read(fake_cusparselt, "living") == before
    with pytest.raises(RuntimeError, match="cusparseLtDenseDescriptorInit: invalid value"):
        Product(16, 32, 9, torch.bfloat16)
    assert read(fake_cusparselt, "living") == before


def test_dtypes(fake_cusparselt: ctypes.CDLL) -> None:
    for dtype, number in ((torch.float16, 2), (torch.bfloat16, 14)):  # of library_types.h
        Product(16, 32, 8, dtype)
        assert read(fake_cusparselt, "last_type") == number


def test_wrong_operands(fake_cusparselt: ctypes.CDLL) -> None:
    product, w = Product(16, 32, 8, torch.bfloat16), compress_evens(weight(16, 32))
    for x in (integers(8, 16), integers(16, 32), integers(8, 32).half(), integers(32, 8).t()):
        with pytest.raises(ValueError, match=r"x must be \[8, 32\] torch.bfloat16, contiguous"):
            product(x, w)
    for other in (weight(16, 32), w.half()):
        with pytest.raises(ValueError, match=r"no compressed weight of \[16, 32\]"):
            product(integers(8, 32), other)


def test_other_release(fake_cusparselt: ctypes.CDLL) -> None:
    minor = (ctypes.c_int * 3).in_dll(fake_cusparselt, "version")
    assert libcusparselt.library().version == "0.8.0"
    libcusparselt.library.cache_clear()
    minor[1] = 11
    try:
        with pytest.raises(RuntimeError, match=r"cuSPARSELt 0\.11\.0 is loaded, and only 0\.7, .* are known"):
            libcusparselt.library()
    finally:
        minor[1] = 8


def test_not_loaded(fake_cusparselt: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcusparselt, "SONAME", "libcusparseLt-nobody-has-this.so.0")
    with pytest.raises(RuntimeError, match="torch has not loaded libcusparseLt-nobody"):
        libcusparselt.library()
