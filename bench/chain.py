"""Microseconds of the Linears of one Llama block as a dependent chain, as in a decoding step, beside cuBLAS.

    python bench/chain.py                                        llama3-8b
    python bench/chain.py --json bench/results/h200/chain.json

Fused as inference engines fuse them: q, k and v; o; gate and up; down. Each reads what the one before it wrote, chain
after chain in one CUDA graph, with weights rotated through more memory than the L2 holds. With and without early
launches (programmatic dependent launch), whose switch is read once per process: each is measured in a process of its
own, and so is cuBLAS beside both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch
from model import MODELS
from timing import CudaTimer, Runner, copies_needed, interleave, measure_bandwidth
from torch import Tensor
from torch.nn.functional import linear

from sparse_marlin import CompressedLinear, Scheme, runtime

TOKENS = (1, 16, 32)
KINDS = ("cublas", "dense", "2:4")
ROUNDS = 9
SWITCH = "SPARSE_MARLIN_EARLY_LAUNCH"

Layer = Callable[[Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--m", nargs="+", type=int, default=TOKENS, help="numbers of tokens")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measure, and print rows as JSON
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    if args.one:
        print(json.dumps(measure(args.model, args.group_size, args.m)))
        return 0
    rows: list[dict[str, Any]] = []
    bandwidth = 0.0
    for early in (True, False):
        command = [sys.executable, __file__, "--one", *sys.argv[1:]]
        run = subprocess.run(command, env=os.environ | {SWITCH: str(int(early))}, stdout=subprocess.PIPE, text=True)
        if run.returncode:
            return run.returncode
        found = json.loads(run.stdout.splitlines()[-1])
        bandwidth = max(bandwidth, found["bandwidth_gbs"])
        rows += [{**row, "early_launch": early} for row in found["rows"]]
    for row in rows:
        row["floor_us"] = row["bytes"] / bandwidth / 1e3
        row["of_floor"] = row["us"] / row["floor_us"]
    columns = ("weights", "early launch", "M", "us", "floor us", "x floor")
    cells = [
        (
            r["weights"],
            "yes" if r["early_launch"] else "no",
            str(r["M"]),
            *(f"{r[c]:.2f}" for c in ("us", "floor_us", "of_floor")),
        )
        for r in rows
    ]
    print(results.table(columns, cells))
    if args.json:
        meta = {
            **results.about("bench/chain.py", sys.argv[1:]),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "model": args.model,
            "shapes": shapes_of(args.model),
            "dtype": "float16",
            "group_size": args.group_size,
            "bandwidth_gbs": bandwidth,
        }
        results.write_json(args.json, meta, rows)
    return 0


def shapes_of(model: str) -> list[tuple[int, int]]:
    """N and K of every product of a block."""
    config = MODELS[model]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate)]


def measure(model: str, group_size: int, tokens_asked: Sequence[int]) -> dict[str, Any]:
    """Rows of every kind of weight and M, interleaved, and the bandwidth of the memory."""
    timer = CudaTimer()
    shapes = shapes_of(model)
    rows = []
    with timer.active():
        bandwidth = max(measure_bandwidth(timer).values())
        chains = {kind: make_chains(kind, shapes, group_size, timer) for kind in KINDS}
        for tokens in tokens_asked:
            x = torch.randn(tokens, shapes[0][1], device=timer.device, dtype=torch.float16)
            runners: dict[str, Runner] = {}
            for kind, (several, _) in chains.items():
                check(several[0], shapes, x)
                runners[kind] = timer.runner([lambda x, c=several: run(c, shapes, x)], x, 1)
            timings = interleave(runners, dict.fromkeys(runners, ROUNDS), timer.synchronize)
            for kind, (several, weight_bytes) in chains.items():
                timing = timings[kind]
                activations = 2 * tokens * sum(n + k for n, k in shapes)
                rows.append(
                    {
                        "weights": kind,
                        "M": tokens,
                        "us": timing.us / len(several),
                        "us_spread": timing.spread / len(several),
                        "bytes": weight_bytes + activations,
                    }
                )
            runners.clear()
    return {"bandwidth_gbs": bandwidth, "rows": rows}


def make_chains(
    kind: str, shapes: Sequence[tuple[int, int]], group_size: int, timer: CudaTimer
) -> tuple[list[list[Layer]], float]:
    """Enough blocks to pass through the L2, and the bytes of the weights of one."""
    scheme = Scheme(4, group_size, "2:4" if kind == "2:4" else None)
    bits = [16.0 if kind == "cublas" else scheme.bits_per_weight(k) for _, k in shapes]
    weight_bytes = sum(n * k * b / 8 for (n, k), b in zip(shapes, bits, strict=True))
    count = max(2, copies_needed(weight_bytes, 0, timer.rotate_bytes))
    return [[make_layer(kind, n, k, scheme, timer.device) for n, k in shapes] for _ in range(count)], weight_bytes


def make_layer(kind: str, n: int, k: int, scheme: Scheme, device: torch.device) -> Layer:
    if kind == "cublas":
        weight = torch.randn(n, k, device=device, dtype=torch.float16) / k**0.5
        return lambda x: linear(x, weight)
    packed = runtime.random_weight(n, k, scheme, device)
    gain = float(packed.dequantize(torch.float32).norm(dim=1).mean())  # 1 keeps a chain's values in range
    layer = CompressedLinear(replace(packed, scales=packed.scales / gain))
    if not layer.prepare():
        raise RuntimeError(f"no kernel for {n}x{k}")
    return layer


def run(chains: list[list[Layer]], shapes: Sequence[tuple[int, int]], x: Tensor) -> Tensor:
    """Every layer reads the first columns of what the one before it wrote."""
    for chain in chains:
        for layer, (_, k) in zip(chain, shapes, strict=True):
            x = layer(x[:, :k])
    return x


def check(chain: list[Layer], shapes: Sequence[tuple[int, int]], x: Tensor) -> None:
    """Each layer of a chain against float64."""
    for layer, (_, k) in zip(chain, shapes, strict=True):
        x = x[:, :k]
        y = layer(x)
        if isinstance(layer, CompressedLinear):
            exact = x.double() @ layer.dequantize().double().T
            error = float((y - exact).norm() / exact.norm())
            if not error < 2e-3:
                raise RuntimeError(f"wrong: relative error {error:.2g}")
        x = y


if __name__ == "__main__":
    sys.exit(main())
