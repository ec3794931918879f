"""Errors of the kernels on a GPU beside those of torch.matmul on the dequantized weight, both against float64.

python bench/kernels/errors.py --json bench/results/h200/errors.json

Every scheme and dtype, every M of a grid, each kernel of the device's own architecture and each for sm_80 by itself:
with the schedule that the dispatcher would give it. An error may be twice torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import commit, write_json

from sparse_marlin import Scheme, runtime
from sparse_marlin.dispatch import Config, Problem, configurations
from sparse_marlin.layouts import to_kernel

TOKENS = (*range(1, 18), 31, 33, 64, 100, 128, 257, 1024, 4096)
N, K = 1072, 2048
LIMIT = 2.0


def schemes() -> Iterator[Scheme]:
    for dtype in (torch.float16, torch.bfloat16):
        for num_bits in (4, 8):
            for group_size in (-1, 32, 64, 128):
                yield Scheme(num_bits, group_size, "2:4", dtype=dtype)
                for symmetric in (True, False):
                    yield Scheme(num_bits, group_size, None, symmetric, dtype=dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    device = torch.device("cuda", 0)
    if error := runtime.extension_error():
        print(error)
        return 1
    rows: list[dict[str, Any]] = []
    for scheme in schemes():
        packed = runtime.random_weight(N, K, scheme, device)
        dtype = scheme.dtype
        form, dense = to_kernel(packed, dtype), packed.dequantize()
        exact_weight = dense.double()
        properties, table = runtime.device_properties(0), runtime.kernels(scheme, dtype)
        worst: dict[str, tuple[float, int]] = {}
        for tokens in TOKENS:
            x = torch.randn(tokens, K, device=device).to(dtype)
            exact = x.double() @ exact_weight.T
            of_torch = float((torch.matmul(x, dense.T) - exact).norm() / exact.norm())
            for config in configurations(Problem(tokens, N, K, scheme, dtype), properties, table):
                if not isinstance(config, Config):
                    continue
                y = runtime.multiply(form, x, f"*:{config.step}")
                ratio = float((y - exact).norm() / exact.norm()) / of_torch
                if not ratio <= worst.get(config.kernel, (0.0, 0))[0]:  # a NaN is the worst
                    worst[config.kernel] = (ratio, tokens)
        for kernel, (ratio, tokens) in worst.items():
            good = ratio <= LIMIT
            print(f"{'  ' if good else 'WRONG '}{scheme}, {dtype}: {kernel} {ratio:.3f} of torch's error at M={tokens}")
            rows.append(
                {
                    "kernel": kernel,
                    "dtype": str(dtype).removeprefix("torch."),
                    "bits": scheme.num_bits,
                    "group_size": scheme.group_size,
                    "sparsity": scheme.sparsity or "none",
                    "zero_points": not scheme.symmetric,
                    "worst_ratio_to_torch": ratio,
                    "at_M": tokens,
                }
            )
    wrong = [r for r in rows if not r["worst_ratio_to_torch"] <= LIMIT]
    print(f"{len(rows)} kernels and schemes, {len(TOKENS)} numbers of tokens each: {len(wrong)} wrong")
    if args.json:
        meta = {
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "N": N,
            "K": K,
            "tokens": list(TOKENS),
            "limit": LIMIT,
        }
        write_json(args.json, meta, rows)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
