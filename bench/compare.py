"""Compares sparse_marlin with what else is installed, on this machine's GPU: python bench/compare.py --dense --sparse

python bench/compare.py                          says what it would run, and what it found
python bench/compare.py --quick                  a first look, in less than a minute
python bench/compare.py --dense --sparse --shapes llama3-8b 28672x8192 --m 1 16 256 --dtype float16 bfloat16
python bench/compare.py --dense --sparse --json bench/results/h200/llama3-8b.json --resume --time-limit 300

Every implementation multiplies by the same weight, and is compared with the product in float64 before it is timed.
Then all of them take turns: a round times each one's CUDA graph of several calls, which read other copies of the weight
in turn, so that no call finds it in the L2 cache. bench/README.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import math
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import results
import timing
import torch
from cusparselt import Problem, Search
from results import Limits, Results, Row
from torch import Tensor

import sparse_marlin
from sparse_marlin import Scheme

# [N, K] of the linear layers of a decoder block, as checkpoints store them; each once.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "llama3-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    "llama3-70b": ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
    "qwen3-32b": ((8192, 5120), (1024, 5120), (5120, 8192), (25600, 5120), (5120, 25600)),
    "paper": ((73728, 18432),),  # the one large layer of the first figure of "MARLIN" (arXiv 2408.11743)
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SHAPES, QUICK_TOKENS = ("4096x4096", "8192x28672"), (1, 16, 128, 2048)
QUICK_PEERS = ("torch_int4", "cusparselt", "humming")
CPU_SHAPES, CPU_TOKENS = ("512x1024", "1024x512"), (1, 16)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# Largest error against float64, relative to the largest element, in units of the dtype's epsilon: a result that is
# rounded a few times on its way passes, one that misses a scale or a tile does not.
TOLERANCE_EPS = 4
GIVEN_UP = "given up, see before"
NOT_KNOWN = (GIVEN_UP, f"ValueError: {peers.NOT_SEARCHED}")  # reasons that leave open what a product takes
SEARCH_SHARE = 0.6  # of the time that is left, for cuSPARSELt's search at most
GIVE_UP = 6  # failures of an implementation, three for a weight that it cannot take, that has not worked yet
CHECKED_ROWS = 128  # the first ones; of the others, one in each 64


@dataclass(frozen=True)
class Job:
    """What is to be compared."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    sparsities: tuple[str, ...]
    bits: int
    group_size: int
    seed: int = 0

    def scheme(self, sparsity: str, dtype: str) -> Scheme:
        return Scheme(self.bits, self.group_size, "2:4" if sparsity == "2:4" else None, dtype=DTYPES[dtype])

    def problems(self) -> list[tuple[int, int, str]]:
        return [(n, k, dtype) for n, k in self.shapes for dtype in self.dtypes]


@dataclass
class Subject:
    """An implementation with its copies of one weight, ready to run."""

    name: str
    sparsity: str  # of its weight
    bits: int
    group_size: int
    bits_per_weight: float
    functions: list[peers.Function]
    reference: Tensor  # float64 product for the rows that are checked

    @property
    def label(self) -> str:
        return f"{self.name} {self.sparsity}" if self.sparsity != "none" else self.name


@dataclass
class Notes:
    """What happened besides the rows."""

    wrong: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    host_us: list[dict[str, Any]] = field(default_factory=list)


class Benchmark:
    """One run: measures problem after problem, and keeps the file up to date."""

    def __init__(
        self,
        job: Job,
        found: peers.Found,
        timer: timing.Timer,
        limits: Limits,
        meta: dict[str, Any],
        path: Path | None,
        old: Results | None,
        deadline: float | None,
        todo: dict[tuple[int, int, str], list[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.found, self.timer, self.limits, self.meta = job, found, timer, limits, meta
        self.path, self.old, self.deadline, self.clock = path, old, deadline, clock
        self.todo = missing_products(job, None, found.peers) if todo is None else todo
        self.notes = Notes()
        self.rows: list[Row] = []
        self.done = 0
        self.stopped = False  # by the deadline
        self._longest = self._longest_preparation = 0.0  # seconds
        self._failures: Counter[str] = Counter()
        self._worked: set[str] = set()
        self._given_up: set[str] = set()
        self._checked = checked_rows(job.tokens)

    @property
    def total(self) -> int:
        """Products to measure."""
        return sum(map(len, self.todo.values()))

    def expired(self, ahead: float = 0.0) -> bool:
        """Whether the time is over, or will be in ``ahead`` seconds."""
        self.stopped |= self.deadline is not None and self.clock() + ahead >= self.deadline
        return self.stopped

    def run(self) -> None:
        """Measures everything, as long as there is time."""
        gc.freeze()  # what was imported is no garbage: collecting the rest is quick then
        for (n, k, dtype), tokens in self.todo.items():
            if self.expired(self._longest_preparation):
                return
            begin = len(self.rows)
            try:
                with self.timer.active(), torch.no_grad():
                    self._measure_problem(n, k, dtype, tokens)
            except torch.OutOfMemoryError as e:
                problem = {"sparsity": "none", "N": n, "K": k, "dtype": dtype}
                self._fail({"impl": "everything", **problem}, describe(e))
            gc.collect()
            self.timer.release()
            self.save()
            print(summary(self.rows[begin:], self.notes, (n, k, dtype)), flush=True)

    def save(self) -> None:
        """Writes what there is, if anybody wants it."""
        if self.path is not None:
            results.write(self.path, self.results())

    def results(self) -> Results:
        """Of this run, added to the file's."""
        notes = {"wrong": self.notes.wrong, "failed": self.notes.failed, "host_us": self.notes.host_us}
        return results.merge(self.old, Results({**self.meta, **notes}, self.rows))

    def _measure_problem(self, n: int, k: int, dtype: str, tokens: Sequence[int]) -> None:
        random = torch.Generator(self.timer.device).manual_seed(self.job.seed)
        shape = (max(tokens), k)
        x = torch.randn(shape, generator=random, device=self.timer.device, dtype=torch.float32).to(DTYPES[dtype])
        checked = self._checked[self._checked < shape[0]].to(self.timer.device)
        begin = self.clock()
        subjects = list(self._prepare(n, k, dtype, x[checked]))
        self._longest_preparation = max(self._longest_preparation, self.clock() - begin)
        for m in tokens:
            # The largest M of a shape takes longer than the others, and the deadline is somebody's patience.
            if self.expired(self._longest):
                return
            begin = self.clock()
            self.done += self._measure_cell(n, k, dtype, m, x, checked, subjects)
            self._longest = max(self._longest, self.clock() - begin)

    def _prepare(self, n: int, k: int, dtype: str, x: Tensor) -> Iterator[Subject]:
        """Makes the weights, gives them to every implementation, and multiplies in float64 what is compared later."""
        for sparsity in ("none", "2:4"):
            # cuBLAS multiplies by the dense weight, also where only 2:4 ones are compared.
            takers = [
                p
                for p in self.found.peers
                if sparsity in p.sparsities and (sparsity in self.job.sparsities or p.name == results.BASE)
            ]
            if not takers:
                continue
            scheme = self.job.scheme(sparsity, dtype)
            packed = peers.random_weight(n, k, scheme, self.timer.device, self.job.seed + 1)
            product: Tensor | None = None
            for peer in takers:
                if self.expired():
                    return
                problem = self._problem(peer.name, sparsity, n, k, dtype)
                if peer.name in self._given_up:
                    self._fail(problem, GIVEN_UP)
                    continue
                if reason := peer.refuses(scheme, DTYPES[dtype], n, k):
                    self._fail(problem, reason)
                    continue
                try:
                    prepared = peer.prepare(packed, DTYPES[dtype])
                    bytes_ = n * k * prepared.bits_per_weight / 8
                    count = timing.copies_needed(bytes_, 0, self.timer.rotate_bytes)
                    functions = [prepared.copy() for _ in range(count)]
                    if prepared.weight is None:
                        if product is None:
                            product = multiply64(x, peers.dense_weight(packed, DTYPES[dtype]))
                        reference = product
                    else:
                        reference = multiply64(x, prepared.weight)
                except Exception as e:  # of any kind: others' code
                    self._fail(problem, describe(e))
                    self._note_failure(peer.name, e, 3)
                    continue
                bits = self.job.bits if peer.bits is None else peer.bits
                group = self.job.group_size if prepared.group_size is None else prepared.group_size
                yield Subject(peer.name, sparsity, bits, group, prepared.bits_per_weight, functions, reference)

    def _measure_cell(
        self, n: int, k: int, dtype: str, m: int, whole: Tensor, checked: Tensor, subjects: Sequence[Subject]
    ) -> bool:
        """Adds the rows of one product; whether there are any."""
        x = whole[:m]
        rows = checked[checked < m]
        runners: dict[str, timing.Runner] = {}
        rounds: dict[str, int] = {}
        errors: dict[str, float] = {}
        for s in subjects:
            if s.name in self._given_up:
                continue
            problem = self._problem(s.name, s.sparsity, n, k, dtype) | {"M": m}
            try:
                y = s.functions[0](x)  # also where libraries compile and choose
                error = max_rel_err(y, rows, s.reference[: len(rows)], (m, n))
                del y
                if not error <= TOLERANCE_EPS * torch.finfo(DTYPES[dtype]).eps:
                    self.notes.wrong.append({**problem, "max_rel_err": error if math.isfinite(error) else None})
                    continue
                floor = self.limits.floor_us(n, k, m, s.bits_per_weight, dtype, s.sparsity == "2:4")
                measured = self.timer.estimate_us(s.functions[0], x)
                quick = m == min(self.job.tokens) and measured < 1e3
                if quick and (host := self.timer.host_us(s.functions[0], x)) is not None:
                    self.notes.host_us.append({**problem, "us": digits(host)})
                # Calls outside graphs may take as long as the host does. For short ones the floor is the better guess.
                estimate = timing.replay_us(self.timer, s.functions[0], x) if measured > 100 else floor
                needed = timing.copies_needed(n * k * s.bits_per_weight / 8, 2 * m * (n + k), self.timer.rotate_bytes)
                needed = min(needed, len(s.functions))
                calls = timing.plan_calls(estimate, needed)
                runner = self.timer.runner(s.functions[:needed], x, calls)
                if estimate * calls < 2e4:
                    runner.start()  # a graph's first run is slower
                self.timer.synchronize()
            except Exception as e:
                self._fail(problem, describe(e))
                self._note_failure(s.name, e, 1)
                continue
            self._worked.add(s.name)
            runners[s.label], errors[s.label] = runner, error
            rounds[s.label] = timing.plan_rounds(estimate * calls, estimate)
        times = timing.interleave(runners, rounds, self.timer.synchronize, self.expired)
        base = times.get(results.BASE)
        if base is None:
            return False
        for s in subjects:
            if (t := times.get(s.label)) is None:
                continue
            floor = self.limits.floor_us(n, k, m, s.bits_per_weight, dtype, s.sparsity == "2:4")
            self.rows.append(
                Row(
                    impl=s.name,
                    N=n,
                    K=k,
                    M=m,
                    group_size=s.group_size,
                    dtype=dtype,
                    bits=s.bits,
                    sparsity=s.sparsity,
                    us=digits(t.us),
                    us_spread=digits(t.spread),
                    gbps=digits(results.bytes_moved(n, k, m, s.bits_per_weight) / t.us / 1e3),
                    tflops=digits(2 * m * n * k / t.us / 1e6),
                    roofline_pct=digits(100 * floor / t.us),
                    speedup_vs_fp16=digits(base.us / t.us),
                    max_rel_err=digits(errors[s.label]),
                )
            )
        return True

    def _problem(self, impl: str, sparsity: str, n: int, k: int, dtype: str) -> dict[str, Any]:
        scheme = {"bits": self.job.bits, "group_size": self.job.group_size}
        return {"impl": impl, "sparsity": sparsity, "N": n, "K": k, "dtype": dtype, **scheme}

    def _fail(self, problem: dict[str, Any], reason: str) -> None:
        self.notes.failed.append({**problem, "reason": reason})

    def _note_failure(self, culprit: str, error: Exception, weight: int) -> None:
        """Gives up on what fails again and again, and ends the run if the GPU is unusable for this process now."""
        self._failures[culprit] += weight
        hopeless = self._failures[culprit] >= GIVE_UP and culprit not in self._worked
        # Failed captures leave things behind in torch's allocator: none is tried twice.
        if hopeless or isinstance(error, timing.CaptureError):
            self._given_up.add(culprit)
        try:
            self.timer.synchronize()
        except RuntimeError as e:
            self.save()
            sys.exit(
                f"{culprit} has left the GPU unusable for this process ({peers.first_line(e)}): the rows so far are "
                "kept; run the rest with --resume and without it"
            )


def missing_products(
    job: Job, old: Results | None, implementations: Sequence[peers.Peer]
) -> dict[tuple[int, int, str], list[int]]:
    """The numbers of tokens to measure, by N, K and dtype: without those of which a file has every implementation.

    What was wrong or could not be timed is known as well.
    """
    wanted = {
        (p.name, s) for p in implementations for s in p.sparsities if s in job.sparsities or p.name == results.BASE
    }
    own_bits = {p.name: p.bits for p in implementations}
    notes = [e for name in ("wrong", "failed") for e in old.meta.get(name, [])] if old else []
    todo = {}
    for n, k, dtype in job.problems():
        rows = old.select(N=n, K=k, dtype=dtype) if old else []
        known = {
            (r.impl, r.sparsity, r.M)
            for r in rows
            if own_bits.get(r.impl) is not None or (r.bits, r.group_size) == (job.bits, job.group_size)
        }
        for e in notes:
            of = (e["N"], e["K"], e["dtype"], e.get("bits"), e.get("group_size"))
            if of == (n, k, dtype, job.bits, job.group_size) and e.get("reason") not in NOT_KNOWN:
                known |= {(e["impl"], e["sparsity"], m) for m in (job.tokens if e.get("M") is None else [e["M"]])}
        tokens = [m for m in job.tokens if any((*w, m) not in known for w in wanted)]
        if tokens:
            todo[n, k, dtype] = tokens
    return todo


def checked_rows(tokens: Sequence[int]) -> Tensor:
    """Which rows of y are compared: the first ones, one at random of each 64 that follow, and the last of every M."""
    last = max(tokens)
    random = torch.Generator().manual_seed(0)
    starts = torch.arange(min(CHECKED_ROWS, last), last, 64)
    sample = starts + torch.randint(64, starts.shape, generator=random)
    rows = torch.cat([torch.arange(min(CHECKED_ROWS, last)), sample, torch.tensor(tokens) - 1])
    return rows[rows < last].unique()


def multiply64(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float64, some rows of the weight at a time."""
    rows = max(1, (1 << 26) // weight.shape[1])
    x64 = x.double()
    return torch.cat([x64 @ part.double().T for part in weight.split(rows)], 1)


def max_rel_err(y: Tensor, rows: Tensor, reference: Tensor, shape: tuple[int, int]) -> float:
    """The largest error of the rows, relative to the largest element; infinite for what is no number."""
    if tuple(y.shape) != shape:
        raise ValueError(f"y must be {list(shape)}, got {list(y.shape)}")
    error = float((y[rows].double() - reference).abs().max() / reference.abs().max())
    return error if math.isfinite(error) else math.inf


def digits(value: float) -> float:
    """Five significant digits: more than repeat."""
    return float(f"{value:.5g}")


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {peers.first_line(error)}"


def summary(rows: Sequence[Row], notes: Notes, problem: tuple[int, int, str]) -> str:
    """A table of one weight: microseconds by M, and below them how many times as fast as cuBLAS."""
    n, k, dtype = problem
    tokens = sorted({r.M for r in rows})
    lines = []
    names = dict.fromkeys((r.impl, r.sparsity) for r in rows)
    for impl, sparsity in names:
        own = {r.M: r for r in rows if (r.impl, r.sparsity) == (impl, sparsity)}
        label = impl if sparsity == "none" else f"{impl} 2:4"
        lines.append([label, *(f"{own[m].us:.1f}" if m in own else "-" for m in tokens)])
        if impl != results.BASE:
            lines.append(["", *(f"{own[m].speedup_vs_fp16:.2f}x" if m in own else "" for m in tokens)])
    text = [f"\n{n}x{k} {dtype}: us by M, and times the speed of {results.BASE}"]
    if lines:
        text.append(results.table(["M", *map(str, tokens)], lines))
    for kind, found in (("WRONG", notes.wrong), ("not timed", notes.failed)):
        here = [e for e in found if (e["N"], e["K"], e["dtype"]) == problem]
        by_reason: dict[str, list[str]] = {}
        for e in here:
            label = e["impl"] if e["sparsity"] == "none" else f"{e['impl']} 2:4"
            reason = e.get("reason") or f"largest error {e['max_rel_err'] or 'not finite'}"
            by_reason.setdefault(f"{label}: {reason}", []).append(str(e.get("M", "all")))
        text.extend(f"{kind}: {what} (M = {', '.join(ms)})" for what, ms in by_reason.items())
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    argv = sys.argv[1:] if arguments is None else list(arguments)
    args, job, names = parse(argv)
    cuda = torch.cuda.is_available()
    found = peers.find(names, args.ours)
    print(describe_machine())
    for peer in found.peers:
        print(f"  {peer.name}: {peer.version()}")
    for name, reason in found.skipped.items():
        print(f"  {name}: skipped, {reason}")
    print(describe_job(job), flush=True)
    if not args.dense and not args.sparse:
        print("nothing is run without --dense, --sparse or --quick")
        return 0
    deadline = None if args.time_limit is None else started + args.time_limit
    old = None
    if args.json and args.json.exists():
        old = results.read(args.json)

    timer: timing.Timer = timing.CudaTimer() if cuda else timing.CpuTimer()
    meta = metadata(argv, found)
    try:
        results.merge(old, Results(meta, []))  # another commit's file is refused before the work
    except results.ResultError as e:
        print(f"{args.json}: {e}", file=sys.stderr)
        return 2
    todo = missing_products(job, old if args.resume else None, found.peers)
    known = known_algorithms(old) if args.resume else {}
    search = start_search(found, job, todo, known, crashed_before(old)) if cuda else None
    if search is not None:
        use_algorithms(found, search, job, todo, known, deadline, meta)
    sensors = timing.Sensors(gpu_id()) if cuda else None
    try:
        with timer.active():
            ways = timing.measure_bandwidth(timer)
            peaks = {d: digits(timing.measure_peak(timer, DTYPES[d])) for d in job.dtypes}
        timer.release()
        limits = Limits(digits(max(ways.values())), peaks)
        meta |= {
            "bandwidth_gbs": limits.bandwidth_gbs,
            "bandwidth_ways": {name: digits(v) for name, v in ways.items()},
            "peak_tflops": peaks,
            "peak_tflops_sparse": {d: 2 * v for d, v in peaks.items()},
        }
        print(
            f"reads {limits.bandwidth_gbs:.0f} GB/s; dense products, sustained, "
            + ", ".join(f"{d} {v:.4g} TFLOP/s" for d, v in peaks.items())
            + "; the roofline of 2:4 has twice that",
            flush=True,
        )
        bench = Benchmark(job, found, timer, limits, meta, args.json, old, deadline, todo)
        bench.run()
    finally:
        if sensors is not None:
            sensors.close()
        meta["sensors"] = None if sensors is None else sensors.summary()
    meta["seconds"] = round(time.monotonic() - started, 1)
    bench.save()
    report_end(bench, args.json)
    if args.plot:
        import plot

        for file in plot.draw(bench.results(), args.plot):
            print(f"drew {file}")
    return 1 if any(e["impl"].startswith("sparse_marlin") for e in bench.notes.wrong) else 0


def known_algorithms(old: Results | None) -> dict[Problem, int | None]:
    """cuSPARSELt's best algorithms that an earlier run has found."""
    found = [] if old is None else old.meta.get("cusparselt", {}).get("best", [])
    return {(n, k, dtype, m): algorithm for n, k, dtype, m, algorithm in found}


def crashed_before(old: Results | None) -> set[tuple[str, int]]:
    """dtypes and algorithms of cuSPARSELt that crashed in an earlier run."""
    found = [] if old is None else old.meta.get("cusparselt", {}).get("crashed", [])
    return {(dtype, algorithm) for _, _, dtype, _, algorithm in found}


def start_search(
    found: peers.Found,
    job: Job,
    todo: dict[tuple[int, int, str], list[int]],
    known: dict[Problem, int | None],
    crashed: set[tuple[str, int]],
) -> Search | None:
    """cuSPARSELt's algorithms, if anybody asks for the best of them."""
    if not any(p.name == "cusparselt:best" for p in found.peers) or "2:4" not in job.sparsities:
        return None
    problems = [(*problem, m) for problem, tokens in todo.items() for m in tokens]
    return Search([p for p in problems if p not in known], crashed=sorted(crashed))


def use_algorithms(
    found: peers.Found,
    search: Search,
    job: Job,
    todo: dict[tuple[int, int, str], list[int]],
    known: dict[Problem, int | None],
    deadline: float | None,
    meta: dict[str, Any],
) -> None:
    """Waits for the search; meanwhile whatever compiles its kernels when first called may do so."""
    now = time.monotonic()
    end = math.inf if deadline is None else now + SEARCH_SHARE * (deadline - now)

    def expired() -> bool:
        return time.monotonic() >= end

    for n, k, dtype in todo if "none" in job.sparsities else ():
        for peer in found.peers:
            if isinstance(peer, peers.Humming) and not expired():
                warm_up(peer, n, k, dtype, job)
    outcome = search.finish(expired)
    best = known | outcome.best()
    for peer in found.peers:
        if isinstance(peer, peers.Cusparselt) and peer.algorithms is not None:
            peer.algorithms = best
    meta["cusparselt"] = {
        "best": [[*problem, algorithm] for problem, algorithm in best.items()],
        "crashed": [[*problem, algorithm] for problem, algorithm in outcome.crashed],
    }
    tried = sum(map(len, outcome.times.values()))
    print(
        f"cuSPARSELt: {tried} algorithms timed, {len(outcome.crashed)} crashed; the best one is known of {len(best)} "
        "products",
        flush=True,
    )
    if outcome.error:
        print(f"cuSPARSELt: the search was given up: {outcome.error}", flush=True)


def warm_up(peer: peers.Peer, n: int, k: int, dtype: str, job: Job) -> None:
    """Has a peer compile its kernels for a layer; if that fails, it will fail again where it is noted."""
    with contextlib.suppress(Exception):
        device = torch.device("cuda", torch.cuda.current_device())
        packed = peers.random_weight(n, k, job.scheme("none", dtype), device)
        peer.prepare(packed, DTYPES[dtype]).copy()(torch.zeros(1, k, dtype=DTYPES[dtype], device=device))


def report_end(bench: Benchmark, path: Path | None) -> None:
    """What the last lines say."""
    print(f"\n{bench.done} of {bench.total} products compared in {bench.meta['seconds']:.0f} s")
    if skipped := len(bench.job.problems()) * len(bench.job.tokens) - bench.total:
        print(f"{skipped} were in the file before")
    if bench.stopped:
        print("stopped at the time limit: the same command with --resume measures the rest")
    if sensors := bench.meta.get("sensors"):
        low, middle, high = sensors["sm_mhz"]
        print(
            f"SM clock {low:.0f} to {high:.0f} MHz (median {middle:.0f}), power up to {sensors['power_w'][2]:.0f} W, "
            f"temperature up to {sensors['temperature_c'][2]:.0f} C"
        )
    for e in bench.notes.wrong:
        print(f"WRONG: {e['impl']} {e['sparsity']} {e['N']}x{e['K']} M={e['M']} {e['dtype']}: {e['max_rel_err']}")
    if path is not None:
        print(f"wrote {path}")


def describe_machine() -> str:
    if not torch.cuda.is_available():
        return (
            "No GPU that torch can use: the CPU path is run on small shapes, to see that it works.\n"
            f"sparse_marlin {sparse_marlin.__version__}, commit {results.commit()[:12]}, torch {torch.__version__}"
        )
    return (
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}\n"
        f"sparse_marlin {sparse_marlin.__version__}, commit {results.commit()[:12]}"
    )


def describe_job(job: Job) -> str:
    shapes = ", ".join(f"{n}x{k}" for n, k in job.shapes)
    kinds = " and ".join({"none": "dense", "2:4": "2:4"}[s] for s in job.sparsities)
    group = "one scale per channel" if job.group_size == -1 else f"group {job.group_size}"
    cells = len(job.problems()) * len(job.tokens)
    return (
        f"{kinds} INT{job.bits} {group}, {' and '.join(job.dtypes)}; N x K: {shapes}; "
        f"M: {', '.join(map(str, job.tokens))}: {cells} products"
    )


def metadata(argv: Sequence[str], found: peers.Found) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    cuda = torch.cuda.is_available()
    return {
        **results.about("bench/compare.py", argv),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver_version() if cuda else None,
        "l2_mb": torch.cuda.get_device_properties(0).L2_cache_size / 2**20 if cuda else None,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{p.name: p.version() for p in found.peers if p.name != results.BASE},
        },
        "skipped": found.skipped,
    }


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    return None


def gpu_id() -> str | None:
    """The current GPU as nvidia-smi knows it, whatever CUDA_VISIBLE_DEVICES says."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Job, list[str]]:
    """The command line, what it asks for, and the names of the peers.

    Raises:
        SystemExit: for a command line that makes no sense.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", action="store_true", help="compare dense weights")
    parser.add_argument("--sparse", action="store_true", help="compare 2:4 weights")
    parser.add_argument("--quick", action="store_true", help="dense and 2:4, two shapes, four M, float16")
    parser.add_argument(
        "--shapes", nargs="+", metavar="SET|NxK", help=f"{', '.join(SHAPES)}, or sizes such as 4096x14336"
    )
    parser.add_argument("--m", nargs="+", type=int, metavar="M", help="numbers of tokens")
    parser.add_argument("--group-size", type=int, default=128, help="32, 64, 128, or -1: one scale per output channel")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float16"])
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", help=f"all (default), none, or some of {', '.join(peers.PEERS)}"
    )
    parser.add_argument(
        "--ours", nargs="+", default=[], metavar="PREFIX", help="also ours with these kernels alone, such as sm80"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, after every shape; adds to it")
    parser.add_argument("--resume", action="store_true", help="leave out products of which FILE has everything")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the results there")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after the last product that fits")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    gpu = torch.cuda.is_available()
    if args.quick:
        args.dense = args.sparse = True
    small = not gpu
    default_shapes = CPU_SHAPES if small else QUICK_SHAPES if args.quick else ("llama3-8b",)
    default_tokens = CPU_TOKENS if small else QUICK_TOKENS if args.quick else TOKENS
    try:
        shapes = parse_shapes(args.shapes or default_shapes)
        names = parse_peers(args.peers or (QUICK_PEERS if args.quick and gpu else ["all"]))
        sparsities = tuple(s for s, asked in (("none", args.dense), ("2:4", args.sparse)) if asked) or ("none", "2:4")
        tokens = tuple(sorted(set(args.m or default_tokens)))
        if tokens[0] < 1:
            raise ValueError(f"--m must be numbers of tokens, 1 or more, got {tokens[0]}")
        if args.time_limit is not None and not args.time_limit > 0:
            raise ValueError(f"--time-limit must be a positive number of seconds, got {args.time_limit:g}")
        if args.resume and args.json is None:
            raise ValueError("--resume needs --json FILE: the file that holds what was measured")
        job = Job(shapes, tokens, tuple(dict.fromkeys(args.dtype)), sparsities, args.bits, args.group_size, args.seed)
        for dtype in job.dtypes:
            for sparsity in sparsities:
                for n, k in shapes:
                    if reason := job.scheme(sparsity, dtype).why_not(n, k):
                        raise ValueError(f"{n}x{k}: {reason}")
        if args.json and args.json.exists():
            results.read(args.json)
    except ValueError as e:
        parser.error(str(e))
    return args, job, names


def parse_shapes(names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """[N, K] of every set and size that is named, each once, in order.

    Raises:
        ValueError: for a name that is neither; it names those that are alike.
    """
    found: dict[tuple[int, int], None] = {}
    for name in names:
        if name in SHAPES:
            found |= dict.fromkeys(SHAPES[name])
        elif size := re.fullmatch(r"(\d+)[x×](\d+)", name):
            n, k = int(size[1]), int(size[2])
            if n < 1 or k < 1:
                raise ValueError(f"a shape needs at least one row and one column, got {name}")
            found[n, k] = None
        else:
            raise ValueError(f"no shape {name!r}: {suggest(name, SHAPES)}, or write a size such as 4096x14336 (N x K)")
    return tuple(found)


def parse_peers(names: Sequence[str]) -> list[str]:
    """Names of peers.

    Raises:
        ValueError: for an unknown one; it names those that are alike.
    """
    if "all" in names or "none" in names:
        if len(names) > 1:
            raise ValueError(f"--peers {' '.join(names)}: all and none stand alone")
        return list(peers.PEERS) if names == ["all"] else []
    for name in names:
        if name not in peers.PEERS:
            raise ValueError(f"no peer {name!r}: {suggest(name, peers.PEERS)}")
    return list(dict.fromkeys(names))


def suggest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
