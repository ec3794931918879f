"""Measures the Hopper kernels in every schedule, and fits the cost model of sparse_marlin/dispatch.py to what it finds.

    python bench/kernels/calibrate.py --json bench/results/h200/calibration.json             on the GPU
    python bench/kernels/calibrate.py --fit bench/results/h200/calibration.json              anywhere: prints constants

The fit weighs what is near the fastest of its problem most, and decoding with small batches more than the rest: the
model has to rank those, and nothing else. From there a search moves single constants as long as that makes the model's
choices faster. Several files, of other GPUs of the kind or other days, keep it from fitting noise. It prints how much
slower the choices are than the fastest that was measured; there, no kernel is preferred for what it leaves to the next
(dispatch.cost).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import about, write_json

from sparse_marlin import Scheme, dispatch, runtime, tuning
from sparse_marlin.dispatch import Config, Device, Kernel, Problem
from sparse_marlin.layouts import to_kernel

SHAPES = (
    (1024, 4096),
    (1024, 8192),
    (4096, 4096),
    (28672, 8192),
    (8192, 28672),
    (6144, 4096),
    (14336, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (5120, 13824),
    (73728, 18432),
)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SEARCH, TIE = 9000, 0.005  # steps; share by which estimates that are as good as equal differ
SMALL_ONLY = 70000  # rows of a weight from which on large M would take too long
GLOBALS = (
    "_HOPPER_STREAM_K_US",
    "_HOPPER_CLUSTER_US",
    "_HOPPER_EARLY_US",
    "_HOPPER_TOGETHER",
    "_IDLE_EXPONENT",
    "_HOPPER_LAUNCH_US",
    "_HOPPER_BANDWIDTH_SHARE",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="measure, and write what was found there")
    parser.add_argument("--time-limit", type=float, default=1e9, metavar="SECONDS", help="no further shape after that")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="FILE", help="fit the model to files")
    args = parser.parse_args()
    if args.fit:
        fit([json.loads(path.read_text(encoding="utf-8")) for path in args.fit])
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


Row = tuple[Problem, Kernel, Config, float]  # and its microseconds


def fit(files: Sequence[dict[str, Any]]) -> None:
    """Prints the constants that suit the rows best, as dispatch.py spells them, and how good its choices are then."""
    from scipy.optimize import least_squares

    meta = files[0]["meta"]
    device = Device(**{**meta["device"], "clusters": tuple(meta["device"]["clusters"])})
    kernels = {s: {k["name"]: Kernel(**k) for k in table} for s, table in meta["kernels"].items()}
    problems: dict[tuple[int, Problem], list[int]] = {}  # of each file: its rows
    rows: list[Row] = []
    for i, data in enumerate(files):
        for r in data["rows"]:
            scheme = Scheme(4, 128, None if r["sparsity"] == "none" else r["sparsity"])
            config = Config.parse(r["step"])
            problem = Problem(r["M"], r["N"], r["K"], scheme, torch.float16)
            kernel = kernels[r["sparsity"]][config.kernel]
            if config in dispatch.schedules(problem, device, kernel):  # of an older file, what is still offered
                problems.setdefault((i, problem), []).append(len(rows))
                rows.append((problem, kernel, config, r["us"]))
    times = np.array([us for *_, us in rows])
    weights = np.zeros(len(rows))
    for (_, p), at in problems.items():
        near = np.exp(-8 * np.minimum(2.0, times[at] / times[at].min() - 1))
        weights[at] = near / near.sum() * _importance(p)
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

    def estimates() -> Any:
        return np.array([max(dispatch.estimate(p, device, kernel, config), 1e-3) for p, kernel, config, _ in rows])

    def residuals(values: Sequence[float]) -> Any:
        write(values)
        return weights**0.5 * np.log(estimates() / times)

    def loss(values: Sequence[float]) -> float:
        """How much slower choices are than the fastest, with near ties taken by turns, and how far times are off."""
        write(values)
        expected = estimates()
        off = weights**0.5 * np.log(expected / times)
        lost = 0.0
        for (_, p), at in problems.items():
            share = np.exp((1 - expected[at] / expected[at].min()) / TIE)
            lost += (share @ times[at] / share.sum() / times[at].min() - 1) * _importance(p)
        return float(lost + off @ off)

    first = read()
    bounds = [(-0.5, 1.0) if n in ("cut", "many") else (0.0, 10.0) for _ in tiles for n in names for _ in range(2)]
    bounds += [(0.0, 10.0)] * (len(first) - len(bounds))
    low, high = zip(*bounds, strict=True)
    first = [max(x, lo + 1e-4) for x, lo in zip(first, low, strict=True)]
    print(f"fitting {len(first)} constants to {len(rows)} rows", file=sys.stderr)
    best = least_squares(residuals, first, bounds=(low, high), max_nfev=12).x
    least, random = loss(best), np.random.default_rng(0)
    for _ in tqdm(range(SEARCH), desc="search"):
        moved = best.copy()
        i = random.integers(len(moved))
        moved[i] = min(high[i], max(low[i], moved[i] * np.exp(0.1 * random.normal()) + 0.01 * random.normal()))
        if (now := loss(moved)) < least:
            best, least = moved, now
    write(best)
    for t in tiles:
        h = dispatch._HOPPER[t]
        pairs = ", ".join(f"({a:.4f}, {b:.4f})" for a, b in (getattr(h, n) for n in names))
        print(f"    {t}: _Hopper({h.k_tile}, {pairs}),")
    for g in GLOBALS:
        value = getattr(dispatch, g)
        values = value if isinstance(value, tuple) else (value,)
        print(f"{g} = {', '.join(f'{x:.4f}' for x in values)}")
    for i in range(len(files)):
        report({p: [rows[j] for j in at] for (of, p), at in problems.items() if of == i}, device)


def _importance(p: Problem) -> int:
    if p.M > 32:
        return 1
    return 5 if p.M <= 16 and p.N * p.K > 200e6 else 3


def report(rows: Mapping[Problem, Sequence[Row]], device: Device) -> None:
    loss = []
    for p, of_problem in rows.items():
        _, us, step = min((dispatch.estimate(p, device, k, c), us, c.step) for _, k, c, us in of_problem)
        best_us, best = min((us, c.step) for _, _, c, us in of_problem)
        loss.append((us / best_us - 1, p, step, best))
    loss.sort(key=lambda v: -v[0])
    print(f"choices are {sum(v[0] for v in loss) / len(loss):.1%} slower than the fastest on average; the worst:")
    for lost, p, step, best in loss[:12]:
        print(f"  {p.M} {p.N}x{p.K} {p.scheme.sparsity or 'dense'}: {lost:.1%} with {step}, best {best}")


if __name__ == "__main__":
    raise SystemExit(main())
