"""What binds the kernels that the dispatcher chooses for some products: Nsight Compute's counters, in a few columns.

python bench/kernels/profile_kernels.py --json bench/results/h200/profile.json    runs ncu, which must be in the PATH
python bench/kernels/profile_kernels.py --json FILE --csv ncu.csv                 of what ncu has written before

ncu holds the clocks at their base and empties the caches, so the times are no benchmark's; shares of peaks and cycles
are what to read. "shared" is the data path of shared memory, which wgmma reads x through, once per warpgroup.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import about, table, write_json

from sparse_marlin import CompressedLinear, Scheme, runtime

# N, K, sparsity, M: where the kernels are furthest from a limit, and one that is near the memory's.
PRODUCTS = (
    (28672, 8192, None, 1),
    (28672, 8192, None, 32),
    (8192, 28672, "2:4", 32),
    (28672, 8192, "2:4", 128),
    (28672, 8192, "2:4", 4096),
    (4096, 4096, None, 16),
)
SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "LaunchStats")
# Column -> section and metric of ncu.
COLUMNS = {
    "us": ("GPU Speed Of Light Throughput", "Duration"),
    "sm_mhz": ("GPU Speed Of Light Throughput", "SM Frequency"),
    "blocks": ("Launch Statistics", "Grid Size"),
    "registers": ("Launch Statistics", "Registers Per Thread"),
    "memory_pct": ("GPU Speed Of Light Throughput", "DRAM Throughput"),
    "l2_pct": ("GPU Speed Of Light Throughput", "L2 Cache Throughput"),
    "shared_pct": ("GPU Speed Of Light Throughput", "L1: Data Pipe Lsu Wavefronts"),
    "tensor_pct": ("GPU Speed Of Light Throughput", "SM: Pipe Tensor Cycles Active"),
    "alu_pct": ("GPU Speed Of Light Throughput", "SM: Pipe Alu Cycles Active"),
    "issue_pct": ("GPU Speed Of Light Throughput", "SM: Issue Active"),
    "active_cycles_pct": ("GPU Speed Of Light Throughput", "SM Active Cycles"),  # of the elapsed ones
    "warps": ("Scheduler Statistics", "Active Warps Per Scheduler"),
    "eligible_warps": ("Scheduler Statistics", "Eligible Warps Per Scheduler"),
}
SCALES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "hz": 1e-6}  # to microseconds and megahertz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--csv", type=Path, help="a log of ncu, instead of running it")
    parser.add_argument("--multiply", action="store_true", help="what ncu is given to run")
    args = parser.parse_args()
    if args.multiply:
        multiply()
        return 0
    text = args.csv.read_text(encoding="utf-8") if args.csv else run()
    rows = rows_of(text)
    write_json(args.json, about("bench/kernels/profile_kernels.py", sys.argv[1:]), rows)
    names = [c for c in rows[0] if c not in ("kernel", "stalls")]
    print(table(names, [[str(r[n]) for n in names] for r in rows]))
    return 0


def run() -> str:
    """The log of ncu over this script's products."""
    if error := "needs an NVIDIA GPU" if not torch.cuda.is_available() else runtime.extension_error():
        sys.exit(error)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        sections = [word for s in SECTIONS for word in ("--section", s)]
        options = ["--profile-from-start", "off", "--kernel-name", "regex:gemm", "--csv", "--page", "details"]
        options += ["--print-details", "all", *sections, "--log-file", str(log)]
        script = [sys.executable, str(Path(__file__).resolve()), "--json", "-", "--multiply"]
        subprocess.run(["ncu", *options, *script], check=True)
        return log.read_text(encoding="utf-8")


def multiply() -> None:
    """Every product once, within the part that ncu looks at."""
    device = torch.device("cuda", 0)
    for n, k, sparsity, m in PRODUCTS:
        layer = CompressedLinear(runtime.random_weight(n, k, Scheme(4, 128, sparsity), device))  # type: ignore[arg-type]
        layer.prepare(torch.float16)
        x = torch.randn(m, k, device=device, dtype=torch.float16)
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def rows_of(text: str) -> list[dict[str, Any]]:
    """A row per product, from ncu's CSV.

    Raises:
        ValueError: if there is not one kernel for each product, or a metric is missing.
    """
    found: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
    kernels: dict[str, str] = {}
    for line in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        kernels[line["ID"]] = line["Kernel Name"]
        metric = line["Section Name"], line["Metric Name"]
        found.setdefault(line["ID"], {})[metric] = line["Metric Value"].replace(",", ""), line["Metric Unit"]
    if len(found) != len(PRODUCTS):
        raise ValueError(f"expected a kernel for each of {len(PRODUCTS)} products, the log has {len(found)}")
    rows = []
    for (n, k, sparsity, m), (number, metrics) in zip(PRODUCTS, found.items(), strict=True):
        if missing := [name for name in COLUMNS.values() if name not in metrics]:
            raise ValueError(f"the log lacks {missing}: was ncu called with other sections?")
        row: dict[str, Any] = {"N": n, "K": k, "M": m, "sparsity": sparsity or "none", "kernel": kernels[number]}
        for column, name in COLUMNS.items():
            value, unit = metrics[name]
            scaled = float(value) * SCALES.get(unit, 1.0)
            row[column] = int(scaled) if scaled.is_integer() else round(scaled, 2)
        elapsed = float(metrics["GPU Speed Of Light Throughput", "Elapsed Cycles"][0])
        row["active_cycles_pct"] = round(100 * row["active_cycles_pct"] / elapsed, 2)
        stalls = {
            name.removeprefix("Stall "): float(value)
            for (section, name), (value, _) in metrics.items()
            if section == "Warp State Statistics" and name.startswith("Stall ") and float(value) >= 0.3
        }
        row["stalls"] = dict(sorted(stalls.items(), key=lambda s: -s[1]))  # cycles per instruction
        rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
