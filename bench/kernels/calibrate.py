"""Measures the Hopper kernels in every schedule, and fits the cost model of sparse_marlin/dispatch.py to what it finds.

    python bench/kernels/calibrate.py --json bench/results/h200/calibration.json             on the GPU
    python bench/kernels/calibrate.py --fit bench/results/h200/calibration.json              anywhere: prints constants

The fit weighs what is near the fastest of its problem most, and decoding with small batches more than the rest: the
model has to rank those, and nothing else. It prints how much slower the model's choices are than the fastest that was
measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from math import exp, log
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import about, write_json

from sparse_marlin import Scheme, dispatch, runtime, tuning
from sparse_marlin.dispatch import Config, Device, Kernel, Problem
from sparse_marlin.layouts import to_kernel

SHAPES = (
    (4096, 4096),
    (28672, 8192),
    (8192, 28672),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (5120, 13824),
    (73728, 18432),
)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SMALL_ONLY = 70000  # rows of a weight from which on large M would take too long
GLOBALS = (
    "_HOPPER_STREAM_K_US",
    "_HOPPER_CLUSTER_US",
    "_IDLE_EXPONENT",
    "_HOPPER_LAUNCH_US",
    "_HOPPER_BANDWIDTH_SHARE",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="measure, and write what was found there")
    parser.add_argument("--time-limit", type=float, default=1e9, metavar="SECONDS", help="no further shape after that")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit the model to a file")
    args = parser.parse_args()
    if args.fit:
        fit(json.loads(args.fit.read_text(encoding="utf-8")))
        return 0
    if args.json is None:
        parser.error("give --json FILE to measure, or --fit FILE to fit")
    if error := "needs an NVIDIA GPU" if not torch.cuda.is_available() else runtime.extension_error():
        print(error)
        return 1
    began = time.monotonic()
    meta = {
        **about("bench/kernels/calibrate.py", sys.argv[1:]),
        "device": asdict(runtime.device_properties(0)),
        "kernels": {},
    }
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        for sparsity in (None, "2:4"):
            if time.monotonic() - began > args.time_limit:
                break
            scheme = Scheme(4, 128, sparsity)  # type: ignore[arg-type]
            table = [t for t in runtime.kernels(scheme, torch.float16) if t.min_capability == 90]
            meta["kernels"][sparsity or "none"] = [asdict(t) for t in table]
            found = list(measure(n, k, scheme, table))
            rows += found
            best = {r["M"]: r for r in sorted(found, key=lambda r: -r["us"])}
            print(f"{n}x{k} {scheme}:", *(f"{m}: {best[m]['step']} {best[m]['us']:.1f}" for m in sorted(best)))
            write_json(args.json, meta, rows)
    return 0


def measure(N: int, K: int, scheme: Scheme, table: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """Every kernel for a number of tokens in every schedule."""
    device = runtime.device_properties(0)
    where = torch.device("cuda", 0)
    form = to_kernel(runtime.random_weight(N, K, scheme, where), torch.float16)
    tokens = [m for m in TOKENS if N < SMALL_ONLY or m <= 64]
    for warm, m in enumerate([tokens[0], *tokens]):
        problem = Problem(m, N, K, scheme, torch.float16)
        configs = [c for t in table if _plausible(t, m) for c in dispatch.schedules(problem, device, t)]
        x = torch.randn(m, K, device=where, dtype=torch.float16)
        for _, c in tuning.measure(form, x, {m: configs}):
            if warm:  # the first ones find the GPU at a low clock
                sparsity = scheme.sparsity or "none"
                yield {"N": N, "K": K, "M": m, "sparsity": sparsity, "step": c.step, "us": round(c.microseconds, 3)}


def _plausible(kernel: Kernel, tokens: int) -> bool:
    return kernel.token_tile <= max(16, 2 * tokens) and min(tokens, 256) <= 2 * kernel.token_tile


def fit(data: dict[str, Any]) -> None:
    """Prints the constants that suit the rows best, as dispatch.py spells them, and how good its choices are then."""
    from scipy.optimize import least_squares

    device = Device(**{**data["meta"]["device"], "clusters": tuple(data["meta"]["device"]["clusters"])})
    kernels = {s: {k["name"]: Kernel(**k) for k in table} for s, table in data["meta"]["kernels"].items()}
    rows = []
    for r in data["rows"]:
        scheme = Scheme(4, 128, None if r["sparsity"] == "none" else r["sparsity"])
        config = Config.parse(r["step"])
        problem, kernel = Problem(r["M"], r["N"], r["K"], scheme, torch.float16), kernels[r["sparsity"]][config.kernel]
        if config in dispatch.schedules(problem, device, kernel):  # of an older file, what is still offered
            rows.append((problem, kernel, config, r["us"]))
    best: dict[Problem, float] = {}
    for p, _, _, us in rows:
        best[p] = min(us, best.get(p, us))
    weights = [exp(-8 * min(2.0, us / best[p] - 1)) for p, _, _, us in rows]
    total: dict[Problem, float] = dict.fromkeys(best, 0.0)
    for (p, *_), w in zip(rows, weights, strict=True):
        total[p] += w
    weights = [w / total[p] * (3 if p.M <= 16 else 1) for (p, *_), w in zip(rows, weights, strict=True)]
    tiles = sorted({(k.row_tile, k.token_tile) for table in kernels.values() for k in table.values()})
    start = {(k.row_tile, k.token_tile): k.k_tile for table in kernels.values() for k in table.values()}
    for tile in tiles:
        near = min(dispatch._HOPPER, key=lambda t: (abs(t[1] - tile[1]), abs(t[0] - tile[0])))
        dispatch._HOPPER.setdefault(tile, replace(dispatch._HOPPER[near], k_tile=start[tile]))
    dispatch._HOPPER = {t: dispatch._HOPPER[t] for t in tiles}
    names = [f.name for f in fields(dispatch._Hopper) if f.name != "k_tile"]

    def read() -> list[float]:
        flat = [x for t in tiles for n in names for x in getattr(dispatch._HOPPER[t], n)]
        for g in GLOBALS:
            value = getattr(dispatch, g)
            flat += value if isinstance(value, tuple) else [value]
        return flat

    def write(values: Sequence[float]) -> None:
        left = iter(map(float, values))
        for t in tiles:
            pairs = {n: (next(left), next(left)) for n in names}
            dispatch._HOPPER[t] = replace(dispatch._HOPPER[t], **pairs)
        for g in GLOBALS:
            value = getattr(dispatch, g)
            setattr(dispatch, g, tuple(next(left) for _ in value) if isinstance(value, tuple) else next(left))

    def residuals(values: Sequence[float]) -> list[float]:
        write(values)
        out = []
        for (p, kernel, config, us), w in zip(rows, weights, strict=True):
            out.append(w**0.5 * (log(max(dispatch.estimate(p, device, kernel, config), 1e-3)) - log(us)))
        return out

    first = read()
    low = [-0.5 if n in ("cut", "many") else 0.0 for _ in tiles for n in names for _ in range(2)]
    low += [0.0] * (len(first) - len(low))
    first = [max(x, lo + 1e-4) for x, lo in zip(first, low, strict=True)]
    print(f"fitting {len(first)} constants to {len(rows)} rows", file=sys.stderr)
    write(least_squares(residuals, first, bounds=(low, [10.0] * len(low)), max_nfev=12).x)
    for t in tiles:
        h = dispatch._HOPPER[t]
        pairs = ", ".join(f"({a:.3f}, {b:.3f})" for a, b in (getattr(h, n) for n in names))
        print(f"    {t}: _Hopper({h.k_tile}, {pairs}),")
    for g in GLOBALS:
        value = getattr(dispatch, g)
        values = value if isinstance(value, tuple) else (value,)
        print(f"{g} = {', '.join(f'{x:.4f}' for x in values)}")
    report(rows, device, best)


def report(rows: Sequence[tuple[Problem, Kernel, Config, float]], device: Device, best: dict[Problem, float]) -> None:
    chosen: dict[Problem, tuple[float, float, str]] = {}
    for p, kernel, config, us in rows:
        expected = replace(config, microseconds=dispatch.estimate(p, device, kernel, config))
        chosen[p] = min((dispatch.cost(p, device, kernel, expected), us, config.step), chosen.get(p, (1e9, 0.0, "")))
    loss = sorted(((us / best[p] - 1, p, step) for p, (_, us, step) in chosen.items()), key=lambda v: -v[0])
    print(f"choices are {sum(v[0] for v in loss) / len(loss):.1%} slower than the fastest on average; the worst:")
    for lost, p, step in loss[:12]:
        fastest = min((us, c.step) for q, _, c, us in rows if q == p)
        print(f"  {p.M} {p.N}x{p.K} {p.scheme.sparsity or 'dense'}: {lost:.1%} with {step}, best {fastest}")


if __name__ == "__main__":
    raise SystemExit(main())
