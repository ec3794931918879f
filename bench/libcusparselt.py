"""cuSPARSELt through its C interface: calls share a plan, where torch's own operator makes a new one each time.

A plan takes the host a fraction of a second; a call with one is as cheap as another launch, and CUDA graphs take it.
What is multiplied is what ``torch._cslt_sparse_mm`` multiplies: the weight is the structured operand, and neither x nor
y is copied. Names and numbers are those of cusparseLt.h and cusparse.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

SONAME = "libcusparseLt.so.0"
KNOWN = ((0, 7), (0, 8), (0, 9), (0, 10))  # releases whose headers declare all of this alike

_NON_TRANSPOSE, _TRANSPOSE = 0, 1
_ORDER_COL, _ORDER_ROW = 1, 2
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_SPARSITY_50_PERCENT = 0
_COMPUTE_32F = 2
_ALG_DEFAULT = 0
_ALG_CONFIG_ID, _ALG_CONFIG_MAX_ID = 0, 1
_ALIGNMENT = 16  # bytes
_OPAQUE_BYTES = 4096  # of a structure; the headers say 512 or 1024
_ZERO, _ONE = c_float(0.0), c_float(1.0)


class Library:
    """The shared library that torch has loaded, so that its compressed weights fit; for the current device.

    Raises:
        RuntimeError: if there is none, or one of a release that is not known here.
    """

    def __init__(self) -> None:
        try:
            self._functions = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
        except OSError as e:
            raise RuntimeError(f"torch has not loaded {SONAME}") from e
        self._functions.cusparseLtGetErrorString.restype = ctypes.c_char_p
        parts = [c_int() for _ in range(3)]
        for i, part in enumerate(parts):
            self.call("GetProperty", i, byref(part))
        self.version = ".".join(str(p.value) for p in parts)
        if tuple(p.value for p in parts[:2]) not in KNOWN:
            known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
            raise RuntimeError(f"cuSPARSELt {self.version} is loaded, and only {known} are known here")
        self.handle = _opaque()
        self.call("Init", self.handle)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; of tensors it gets the address. An int is a C int, which enumerations are as well.

        Raises:
            RuntimeError: for any status but success, with the library's text.
        """
        values = (c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
        if status := getattr(self._functions, f"cusparseLt{name}")(*values):
            text = self._functions.cusparseLtGetErrorString(status).decode()
            raise RuntimeError(f"cusparseLt{name}: {text} (status {status})")


@functools.cache
def library() -> Library:
    return Library()


def _opaque() -> Tensor:
    """Memory for one of the library's structures, which may point to each other: torch aligns it, and it stays put."""
    return torch.zeros(_OPAQUE_BYTES, dtype=torch.uint8)


class Product:
    """y = x @ w.T for one M, N, K and dtype, by one algorithm, with float32 sums.

    Args:
        N: a multiple of 16, as K is; M is a multiple of 8.
        algorithm: from 0, which is the default, to below :attr:`num_algorithms`.

    Raises:
        RuntimeError: for what the library refuses.
    """

    def __init__(self, N: int, K: int, M: int, dtype: torch.dtype, algorithm: int = 0) -> None:
        self.N, self.K, self.M, self.dtype = N, K, M, dtype
        self._call, self._handle = library().call, library().handle
        self._workspace_bytes: int | None = None
        self._plan, self._matmul, self._selection = _opaque(), _opaque(), _opaque()
        self._owned: list[tuple[str, Tensor]] = []
        # The plan may point to the other structures.
        weakref.finalize(self, _destroy, self._call, self._owned, self._matmul, self._selection).atexit = False
        w = self._matrix("StructuredDescriptorInit", N, K, K, _ORDER_ROW, _SPARSITY_50_PERCENT)
        x = self._matrix("DenseDescriptorInit", M, K, K, _ORDER_ROW)
        y = self._matrix("DenseDescriptorInit", N, M, N, _ORDER_COL)
        operands = _NON_TRANSPOSE, _TRANSPOSE, w, x, y, y
        self._call("MatmulDescriptorInit", self._handle, self._matmul, *operands, _COMPUTE_32F)
        self._call("MatmulAlgSelectionInit", self._handle, self._selection, self._matmul, _ALG_DEFAULT)
        count, chosen = c_int(), c_int(algorithm)
        of, size = (self._handle, self._selection), c_size_t(ctypes.sizeof(c_int))
        self._call("MatmulAlgGetAttribute", *of, _ALG_CONFIG_MAX_ID, byref(count), size)
        self._call("MatmulAlgSetAttribute", *of, _ALG_CONFIG_ID, byref(chosen), size)
        self.num_algorithms = count.value

    def _matrix(self, init: str, rows: int, columns: int, stride: int, order: int, *more: int) -> Tensor:
        matrix, sizes = _opaque(), (c_int64(v) for v in (rows, columns, stride))
        self._call(init, self._handle, matrix, *sizes, _ALIGNMENT, _DATA_TYPES[self.dtype], order, *more)
        self._owned.append(("MatDescriptorDestroy", matrix))
        return matrix

    def prepare(self) -> None:
        """Makes the plan, unless it is there: that is what takes long."""
        if self._workspace_bytes is None:
            self._call("MatmulPlanInit", self._handle, self._plan, self._matmul, self._selection)
            self._owned.append(("MatmulPlanDestroy", self._plan))
            size = c_size_t()
            self._call("MatmulGetWorkspace", self._handle, self._plan, byref(size))
            self._workspace_bytes = size.value

    def __call__(self, x: Tensor, compressed: Tensor) -> Tensor:
        """[M, N] from x [M, K] and what ``torch._cslt_compress`` makes of w [N, K]; on the current stream."""
        if x.shape != (self.M, self.K) or x.dtype != self.dtype or not x.is_contiguous():
            raise ValueError(f"x must be [{self.M}, {self.K}] {self.dtype}, contiguous, got {list(x.shape)} {x.dtype}")
        if compressed.numel() != self.N * self.K * 9 // 16 or compressed.dtype != self.dtype:
            raise ValueError(f"this is no compressed weight of [{self.N}, {self.K}] {self.dtype}")
        self.prepare()
        y = x.new_empty(self.M, self.N)
        workspace = x.new_empty(self._workspace_bytes or 0, dtype=torch.uint8)
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        operands = byref(_ONE), compressed, x, byref(_ZERO), y, y
        self._call("Matmul", self._handle, self._plan, *operands, workspace, byref(stream), 1)
        return y


def _destroy(call: Any, owned: list[tuple[str, Tensor]], *_: Tensor) -> None:
    for name, structure in reversed(owned):
        call(name, structure)


# More than are in use at a time: the algorithms of one weight for all M.
product = functools.lru_cache(maxsize=32)(Product)


def cusparselt_linear(x: Tensor, compressed: Tensor, N: int, algorithm: int) -> Tensor:
    """x @ w.T; cuSPARSELt wants multiples of eight tokens, and gets zeros for those that are not there."""
    m, k = x.shape
    if m % 8:
        x = torch.nn.functional.pad(x, (0, 0, 0, -m % 8))
    return product(N, k, x.shape[0], x.dtype, algorithm)(x, compressed)[:m]
