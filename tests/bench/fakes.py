"""A row of plausible values, and as much of a GPU and of cuSPARSELt as is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import timing
import torch
from results import Row
from torch import Tensor


def make_row(**changes: Any) -> Row:
    """A row of plausible values."""
    values: dict[str, Any] = {
        "impl": "sparse_marlin",
        "N": 4096,
        "K": 4096,
        "M": 16,
        "group_size": 128,
        "dtype": "float16",
        "bits": 4,
        "sparsity": "none",
        "us": 10.0,
        "us_spread": 0.1,
        "gbps": 900.0,
        "tflops": 50.0,
        "roofline_pct": 25.0,
        "speedup_vs_fp16": 2.0,
        "max_rel_err": 3e-4,
    }
    return Row(**{**values, **changes})


@dataclass
class FakeCuda:
    """As much of torch.cuda as CudaTimer uses, on a clock that only replayed graphs advance."""

    now_us: float = 0.0
    call_us: float = 10.0
    captures: list[FakeGraph] = field(default_factory=list)
    capturing: FakeGraph | None = None
    pools: int = 0
    emptied: int = 0

    def note(self, copy: object) -> None:
        """Called by an implementation: which copy of its weight it reads."""
        if self.capturing is not None:
            self.capturing.copies.append(copy)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.copies, self.pool = cuda, list[object](), None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self.cuda.capturing is None, "a capture within a capture"
        self.cuda.capturing, self.pool = self, pool
        self.cuda.captures.append(self)

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.capturing = None

    def replay(self) -> None:
        assert self.cuda.capturing is None
        self.cuda.now_us += self.cuda.call_us * max(1, len(self.copies))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, float("nan")

    def record(self) -> None:
        self.at = self.cuda.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) / 1e3


class FakeCudaTimer(timing.CudaTimer):
    """The timer for GPUs, on the CPU: everything but the kernels is what runs there."""

    def __init__(self, rotate_bytes: float) -> None:
        self.device = torch.device("cpu")
        self.rotate_bytes = rotate_bytes
        self.stream = self._pool = self._keeper = None


def compress_evens(w: Tensor) -> Tensor:
    """The format of cusparselt_fake.c: the even columns, and as much besides as real ones have."""
    return torch.cat([w[:, ::2].reshape(-1), torch.full((w.numel() // 16,), torch.nan)]).to(w.dtype)
