"""What is read from a log of Nsight Compute."""

from __future__ import annotations

import csv
import io

import profile_kernels
import pytest


def log(kernels: int, leave_out: str = "") -> str:
    """As ncu writes it: what the program prints, then a line per kernel and metric."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit", "Metric Value"])
    for i in range(kernels):
        for section, name in [
            *profile_kernels.COLUMNS.values(),
            ("GPU Speed Of Light Throughput", "Elapsed Cycles"),
            ("Warp State Statistics", "Stall Wait"),
            ("Warp State Statistics", "Stall Membar"),
            ("Warp State Statistics", "Stall GMMA"),
        ]:
            value, unit = {
                "Duration": ("1,500", "ns"),
                "SM Frequency": ("1,980,000,000.0", "hz"),
                "Elapsed Cycles": ("2,000", "cycle"),
                "SM Active Cycles": ("1,500.5", "cycle"),
                "Grid Size": (f"{132 + i}", ""),
                "Stall Wait": ("1.5", "inst"),
                "Stall Membar": ("0", "inst"),
                "Stall GMMA": ("2.25", "inst"),
            }.get(name, ("12.25", "%"))
            if name != leave_out:
                writer.writerow([i, f"gemm<{i}>", section, name, unit, value])
    return f"==PROF== Connected to process 1\n{out.getvalue()}"


def test_a_row_per_product() -> None:
    rows = profile_kernels.rows_of(log(len(profile_kernels.PRODUCTS)))
    assert [(r["N"], r["K"], r["M"]) for r in rows] == [(n, k, m) for n, k, _, m in profile_kernels.PRODUCTS]
    row = rows[1]
    assert (row["kernel"], row["blocks"], row["us"], row["sm_mhz"]) == ("gemm<1>", 133, 1.5, 1980.0)
    assert row["active_cycles_pct"] == pytest.approx(75.03, abs=0.01) and row["shared_pct"] == 12.25
    assert list(row["stalls"].items()) == [("GMMA", 2.25), ("Wait", 1.5)]


def test_another_log_is_refused() -> None:
    with pytest.raises(ValueError, match="the log has 5"):
        profile_kernels.rows_of(log(5))
    with pytest.raises(ValueError, match="SM: Issue Active"):
        profile_kernels.rows_of(log(len(profile_kernels.PRODUCTS), "SM: Issue Active"))
