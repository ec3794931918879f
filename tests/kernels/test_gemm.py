"""Every kernel, through csrc/gemm.h: random shapes and schedules, outputs and padding that begin as NaN.

Half of the problems have sums that are exact in float, and the answer must be right to the bit. The others are compared
with float64 within the rounding of y and of adding in float, and must give the same bits under another schedule.
"""

from __future__ import annotations

from pathlib import Path

import build
import pytest


@pytest.fixture(scope="module")
def executables() -> dict[tuple[str, str], Path]:
    return build.build(["gemm"])


@pytest.mark.parametrize("kind", build.BUILDS)
@pytest.mark.parametrize("part", ["sm80 dense", "sm80 sparse", "sm90 dense", "sm90 sparse", "gather", "refusals"])
def test_gemm(part: str, kind: str, executables: dict[tuple[str, str], Path]) -> None:
    result = build.run(executables["gemm", kind], *part.split(), timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
