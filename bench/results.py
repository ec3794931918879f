"""Result files of the benchmarks: what a row means, where the roofline is, and how files are written and merged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BASE = "cublas"  # the implementation that speedups are relative to, per dtype


@dataclass(frozen=True)
class Row:
    """One implementation, timed on one problem.

    Attributes:
        impl: name; ours begin with ``sparse_marlin``.
        group_size: columns per scale, -1 for one scale per output channel, 0 where the weight has no scales.
        bits: of a stored weight; 16 where it is not quantized.
        sparsity: ``none`` or ``2:4``.
        us: median microseconds of a call, over the rounds.
        us_spread: their interquartile range.
        gbps: bytes of the weight as stored, of x and of y, once each, per time.
        tflops: 2 * M * N * K per time, also where half of the weights are zero: "dense-equivalent".
        roofline_pct: the time that this implementation's own bytes and multiplications need at the rates measured in
            the same run, as a percentage of ``us``.
        speedup_vs_fp16: time of cuBLAS on the same problem in the same dtype, divided by ``us``.
        max_rel_err: largest difference from the float64 product with the implementation's own dequantized weight,
            relative to the largest element of that product.
    """

    impl: str
    N: int
    K: int
    M: int
    group_size: int
    dtype: str
    bits: int
    sparsity: str
    us: float
    us_spread: float
    gbps: float
    tflops: float
    roofline_pct: float
    speedup_vs_fp16: float
    max_rel_err: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a measurement in a file."""
        return (self.impl, self.N, self.K, self.M, self.group_size, self.dtype, self.bits, self.sparsity)

    @property
    def problem(self) -> tuple[int, int, int, str]:
        return self.N, self.K, self.M, self.dtype


FIELDS = tuple(f.name for f in fields(Row))


@dataclass(frozen=True)
class Limits:
    """Rates of one GPU, measured: GB/s of streaming reads, and TFLOP/s of dense matrix products by dtype."""

    bandwidth_gbs: float
    tflops: Mapping[str, float]

    def floor_us(self, N: int, K: int, M: int, bits_per_weight: float, dtype: str, sparse: bool) -> float:
        """The least time that a product can take; 2:4 weights go through the tensor cores at twice the dense rate."""
        memory = bytes_moved(N, K, M, bits_per_weight) / (self.bandwidth_gbs * 1e3)
        compute = 2 * M * N * K / (self.tflops[dtype] * (2 if sparse else 1) * 1e6)
        return max(memory, compute)


def bytes_moved(N: int, K: int, M: int, bits_per_weight: float) -> float:
    """The weight once, x and y once; activations have 16 bits."""
    return N * K * bits_per_weight / 8 + 2 * M * (N + K)


class ResultError(ValueError):
    """A result file that cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Results:
    """The contents of one file."""

    meta: dict[str, Any]
    rows: list[Row]

    def select(self, **wanted: Any) -> list[Row]:
        """The rows whose fields have these values."""
        return [r for r in self.rows if all(getattr(r, k) == v for k, v in wanted.items())]


def read(path: Path) -> Results:
    """Reads a file and checks its rows.

    Raises:
        ResultError: if it is no result file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ResultError(f"{path} cannot be read as a result file: {e}") from e
    if not isinstance(data, dict) or not isinstance(data.get("meta"), dict) or not isinstance(data.get("rows"), list):
        raise ResultError(f'{path} must hold {{"meta": {{...}}, "rows": [...]}}: bench/compare.py --json writes it')
    rows = []
    for i, row in enumerate(data["rows"]):
        if not isinstance(row, dict) or set(row) != set(FIELDS):
            found = sorted(row) if isinstance(row, dict) else row
            raise ResultError(f"row {i} of {path} must have the fields {', '.join(FIELDS)}, got {found}")
        rows.append(Row(**row))
    return Results(data["meta"], rows)


def write(path: Path, results: Results) -> None:
    """Writes a file, all or nothing."""
    write_json(path, results.meta, [asdict(r) for r in results.rows])


def write_json(path: Path, meta: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes ``{"meta": ..., "rows": [...]}``, all or nothing; a line per row, since files are compared in commits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    scratch.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    scratch.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other runs from a file: by the lock of its folder, since each writer replaces the file itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


NOTES = ("wrong", "failed", "host_us")  # lists in meta, one entry per implementation and problem
KEPT_OF_EARLIER_RUNS = ("date", "command", "seconds", "bandwidth_gbs", "peak_tflops", "sensors")


def merge(old: Results | None, new: Results) -> Results:
    """``new`` added to what was measured before: what was measured again is replaced.

    Raises:
        ResultError: if the two are of different commits or GPUs; the text names both.
    """
    if old is None:
        return Results(new.meta, sorted(new.rows, key=_order))
    for what in ("commit", "gpu"):
        if old.meta.get(what) != new.meta.get(what):
            raise ResultError(
                f"the file holds results of {what} {old.meta.get(what)!r}, this run is {new.meta.get(what)!r}: "
                "write them to a file of their own"
            )
    rows = {r.key: r for r in [*old.rows, *new.rows]}
    meta = dict(new.meta)
    timed = {(r.impl, r.sparsity, r.N, r.K, r.M, r.dtype) for r in new.rows}
    for name in NOTES:
        kept = [e for e in old.meta.get(name, []) if name == "host_us" or _subject(e)[:6] not in timed]
        merged = {_subject(e): e for e in [*kept, *new.meta.get(name, [])]}
        meta[name] = list(merged.values())
    if "cusparselt" in old.meta:  # lists of N, K, dtype, M and an algorithm
        before, now = old.meta["cusparselt"], meta.get("cusparselt", {})
        known = {tuple(e[:4]) for e in now.get("best", [])}
        crashed = [*before.get("crashed", []), *now.get("crashed", [])]  # what has crashed is not tried again
        meta["cusparselt"] = {
            "best": [*(e for e in before.get("best", []) if tuple(e[:4]) not in known), *now.get("best", [])],
            "crashed": [e for i, e in enumerate(crashed) if e not in crashed[:i]],
        }
    earlier = {k: old.meta[k] for k in KEPT_OF_EARLIER_RUNS if k in old.meta}
    meta["earlier_runs"] = [*old.meta.get("earlier_runs", []), earlier]
    return Results(meta, sorted(rows.values(), key=_order))


def _subject(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(k) for k in ("impl", "sparsity", "N", "K", "M", "dtype", "bits", "group_size"))


def _order(row: Row) -> tuple[Any, ...]:
    return row.N, row.K, row.dtype, row.sparsity, row.impl, row.M, row.group_size, row.bits


def base_times(rows: Iterable[Row]) -> dict[tuple[int, int, int, str], float]:
    """cuBLAS's microseconds by problem."""
    return {r.problem: r.us for r in rows if r.impl == BASE}


def command(script: str, argv: Sequence[str]) -> str:
    """The command of a run; of paths the last part alone, since the rest is about one machine."""
    return shlex.join(["python", script, *(Path(a).name if "/" in a else a for a in argv)])


def about(script: str, argv: Sequence[str]) -> dict[str, Any]:
    """What every file says of the run that wrote it: commit, date and command."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"commit": commit(), "date": date, "command": command(script, argv)}


def commit() -> str:
    """The commit that is measured; $SPARSE_MARLIN_COMMIT where the tree came without its history."""
    if given := os.environ.get("SPARSE_MARLIN_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in [columns, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)
