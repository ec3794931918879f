"""Every kernel for sm_80, through csrc/gemm.h: random shapes and schedules, outputs and padding that begin as NaN.

Half of the problems have sums that are exact in float, and the answer must be right to the bit. The others are compared
with float64 within the rounding of y and of adding in float, and must give the same bits under another schedule.
"""

from __future__ import annotations

from pathlib import Path

import build
import pytest


@pytest.fixture(scope="module")
def executables() -> dict[tuple[str, str], Path]:
    return build.build(["sm80"])


@pytest.mark.parametrize("kind", build.BUILDS)
@pytest.mark.parametrize("part", ["dense", "sparse", "gather", "refusals"])
def test_sm80(part: str, kind: str, executables: dict[tuple[str, str], Path]) -> None:
    result = build.run(executables["sm80", kind], part)
    assert result.returncode == 0, result.stdout + result.stderr
