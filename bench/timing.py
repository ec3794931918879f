"""How long calls take: interleaved rounds, CUDA graphs over rotated weights, and the rates of the GPU itself."""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

Function = Callable[[Tensor], Tensor]

GRAPH_US = 500.0  # a graph is at least this long, so that starting it does not count
MAX_CALLS = 200  # in a graph
MAX_COPIES = 128  # of a weight
MIN_ROUNDS, MAX_ROUNDS = 3, 7
BUDGET_US = 20e3  # for all rounds of one implementation on one problem, if MIN_ROUNDS fit into it
SLOW_US = 50e3  # a call that takes longer is timed twice only


class CaptureError(RuntimeError):
    """A call that works cannot be captured in a CUDA graph."""


class Runner(Protocol):
    """Starts some calls of one implementation."""

    calls: int

    def start(self) -> Callable[[], float]:
        """Starts them, and returns what tells their microseconds together once the device is idle."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call."""

    us: float
    spread: float  # interquartile range over the rounds

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The median and the spread of one time per round."""
        if len(samples) < 2:
            return cls(samples[0], 0.0)
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, high - low)


def interleave(
    runners: dict[str, Runner],
    rounds: dict[str, int],
    synchronize: Callable[[], None],
    expired: Callable[[], bool] = lambda: False,
) -> dict[str, Timing]:
    """Times every runner once per round, so that all see the same clocks; each round begins with another runner.

    Returns:
        Timings by name; without those that had no round before ``expired``.
    """
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(max(rounds.values(), default=0)):
        if expired():
            break
        names = [n for n in runners if i < rounds[n]]
        first = i % len(names)
        pending = [(n, runners[n].start()) for n in [*names[first:], *names[:first]]]
        synchronize()
        for name, elapsed in pending:
            samples[name].append(elapsed() / runners[name].calls)
    return {name: Timing.of(s) for name, s in samples.items() if s}


def plan_calls(estimate_us: float, copies_needed: int) -> int:
    """Calls in a graph: enough to be long, and to visit every copy of the weight, but no more."""
    return max(copies_needed, min(MAX_CALLS, math.ceil(GRAPH_US / estimate_us)))


def plan_rounds(graph_us: float, call_us: float) -> int:
    """How often an implementation's graph is timed."""
    if call_us > SLOW_US:
        return 2
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET_US / graph_us)))


def replay_us(
    timer: Timer, function: Function, x: Tensor, replays: int = 2, before: Callable[[], Any] = lambda: None
) -> float:
    """Microseconds of a call in a graph of its own: what the host does before is no part of it.

    The least of some replays, since the first one of a graph is slower; ``before`` is called before each.
    """
    runner = timer.runner([function], x, 1)
    times = []
    for _ in range(replays):
        before()
        elapsed = runner.start()
        timer.synchronize()
        times.append(elapsed())
    return min(times)


def copies_needed(weight_bytes: float, activation_bytes: float, rotate_bytes: float) -> int:
    """Copies of a weight to take turns, so that other data of ``rotate_bytes`` passes before one is read again."""
    return max(1, min(MAX_COPIES, math.ceil((rotate_bytes - activation_bytes) / weight_bytes)))


class CpuTimer:
    """Calls timed one after the other on the CPU; the graph is a loop."""

    device = torch.device("cpu")
    rotate_bytes = 0.0  # nobody compares CPU times

    @dataclass
    class _Loop:
        functions: Sequence[Function]
        x: Tensor
        calls: int

        def start(self) -> Callable[[], float]:
            begin = time.perf_counter()
            for i in range(self.calls):
                self.functions[i % len(self.functions)](self.x)
            elapsed = (time.perf_counter() - begin) * 1e6
            return lambda: elapsed

    def runner(self, functions: Sequence[Function], x: Tensor, calls: int) -> Runner:
        return self._Loop(functions, x, min(calls, 10))

    def estimate_us(self, function: Function, x: Tensor) -> float:
        return self.runner([function], x, 1).start()()

    def host_us(self, function: Function, x: Tensor) -> float | None:
        return None  # the call is the work

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def release(self) -> None:
        pass


class CudaTimer:
    """CUDA graphs on a stream of their own, timed by events."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rotate_bytes = 4.0 * torch.cuda.get_device_properties(self.device).L2_cache_size
        # Whatever a library sets up on first use must happen on the stream of the captures, before them.
        self.stream = torch.cuda.Stream(self.device)
        self._pool: Any = None
        self._keeper: Any = None

    @dataclass
    class _Graph:
        graph: Any
        calls: int

        def start(self) -> Callable[[], float]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            return lambda: float(begin.elapsed_time(end)) * 1e3

    def runner(self, functions: Sequence[Function], x: Tensor, calls: int) -> Runner:
        if self._pool is None:
            # Graphs are replayed one at a time and nobody reads their outputs: they may share memory. A pool must not
            # be used again once all of its graphs are gone, so one stays.
            self._pool = torch.cuda.graph_pool_handle()
            self._keeper = self._capture([torch.zeros_like], x[:1, :1], 1)
        return self._Graph(self._capture(functions, x, calls), calls)

    def _capture(self, functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor, calls: int) -> Any:
        """A graph of the calls; torch.cuda.graph() would empty the cache as well, hundreds of times."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for i in range(calls):
                functions[i % len(functions)](x)
        except Exception as e:
            with contextlib.suppress(RuntimeError):  # what is reported is why the call failed
                graph.capture_end()
            raise CaptureError(str(e)) from e
        try:
            graph.capture_end()
        except RuntimeError as e:
            raise CaptureError(str(e)) from e
        return graph

    def estimate_us(self, function: Function, x: Tensor) -> float:
        """Of a call outside graphs: too long where the host is slower than the GPU."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(x)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def host_us(self, function: Function, x: Tensor) -> float | None:
        """Time until a call returns, while the GPU works on it or on those before it."""
        batches = []
        for _ in range(3):
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                function(x)
            batches.append((time.perf_counter() - begin) / 20 * 1e6)
        self.synchronize()
        return min(batches)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def release(self) -> None:
        """Gives memory back; every graph must be gone."""
        self._pool = self._keeper = None
        torch.cuda.empty_cache()


Timer = CpuTimer | CudaTimer

# Reads 16 bytes per thread and step, four steps at a time; the sum is never zero, but the compiler cannot know that.
_READ_KERNEL = """
extern "C" __global__ void __launch_bounds__(512) stream(const uint4* data, int count, unsigned* out) {
  const int stride = gridDim.x * blockDim.x;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
    sum |= a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w | c.x | c.y | c.z | c.w | d.x | d.y | d.z | d.w;
  }
  if (sum == 0) *out = 1;
}
"""


def measure_bandwidth(timer: Timer) -> dict[str, float]:
    """GB/s of reading a large buffer in different ways; the largest is the rate of the memory."""
    size = 4 << 30 if isinstance(timer, CudaTimer) else 64 << 20
    buffer = torch.ones(size // 4, dtype=torch.int32, device=timer.device)
    out = torch.zeros(1, dtype=torch.int32, device=timer.device)
    half = buffer[: buffer.numel() // 2]
    ways: dict[str, tuple[float, Callable[[], Any]]] = {
        "sum": (size, lambda: torch.sum(buffer.view(torch.float32))),
        "max": (size, lambda: torch.amax(buffer)),
        "copy": (size, lambda: half.copy_(buffer[buffer.numel() // 2 :])),
    }
    if isinstance(timer, CudaTimer):
        with contextlib.suppress(Exception):  # a private function of torch; the other ways remain
            kernel = torch.cuda._compile_kernel(_READ_KERNEL, "stream")
            blocks = 4 * torch.cuda.get_device_properties(timer.device).multi_processor_count
            arguments = [buffer, size // 16, out]
            ways["kernel"] = (size, lambda: kernel(grid=(blocks, 1, 1), block=(512, 1, 1), args=arguments))
    found = {}
    for name, (moved, call) in ways.items():
        try:
            times = [timer.estimate_us(lambda _, call=call: call(), out) for _ in range(6)]
        except Exception:  # the same: one way less
            if name != "kernel":
                raise
            continue
        found[name] = moved / min(times[1:]) / 1e3
    return found


def measure_peak(timer: Timer, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """TFLOP/s of a large dense product, sustained: the clocks that the power limit allows count."""
    size = 8192 if isinstance(timer, CudaTimer) else 256
    a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    for _ in range(3):
        us = timer.estimate_us(lambda x: linear(x, b), a)
    calls = max(3, math.ceil(seconds * 1e6 / us)) if isinstance(timer, CudaTimer) else 3

    def many(x: Tensor) -> Tensor:
        for _ in range(calls):
            y = linear(x, b)
        return y

    return 2 * size**3 * calls / timer.estimate_us(many, a) / 1e6


@dataclass
class Sensors:
    """Clock, power and temperature of a GPU, read by ``nvidia-smi`` while the benchmark runs."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __init__(self, gpu: str | None = None) -> None:
        self.samples: list[tuple[float, ...]] = []
        command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits", "-lms", "250"]
        if gpu is not None:
            command += ["-i", gpu]
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
            return
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Takes a line of nvidia-smi; one that holds no numbers is left out."""
        with contextlib.suppress(ValueError):
            values = tuple(float(v) for v in line.split(","))
            if len(values) == len(self.FIELDS):
                self.samples.append(values)

    def summary(self) -> dict[str, list[float]] | None:
        """Smallest, median and largest of each, or None without nvidia-smi."""
        names = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
        if not self.samples:
            return None
        return {
            n: [min(v), statistics.median(v), max(v)]
            for n, v in zip(names, zip(*self.samples, strict=True), strict=True)
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
