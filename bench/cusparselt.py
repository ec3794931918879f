"""The fastest algorithm of cuSPARSELt for each problem, tried one by one in a child process: some of them crash.

torch's own search ends the process at some sizes, and so would ours. The child says what it tries before it tries it;
when it dies or hangs, another one goes on after that.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

MAX_ALGORITHMS = 32
PATIENCE = 3  # algorithms in a row that are refused, until the rest is taken for refused as well
TIMED_CALLS = 4

Problem = tuple[int, int, str, int]  # N, K, dtype, M


@dataclass
class Outcome:
    """What is known so far.

    Attributes:
        times: microseconds by problem and algorithm.
        crashed: what ended a child.
    """

    times: dict[Problem, dict[int, float]] = field(default_factory=dict)
    crashed: list[tuple[Problem, int]] = field(default_factory=list)
    finished: set[Problem] = field(default_factory=set)
    error: str | None = None  # why the search was given up

    def best(self) -> dict[Problem, int]:
        """The fastest algorithm of each problem that has one."""
        return {p: min(found, key=lambda a: found[a]) for p, found in self.times.items() if found}


class Search:
    """Runs the children. The first starts at once, so that its start-up costs no time."""

    def __init__(
        self, problems: Sequence[Problem], command: Sequence[str] | None = None, patience_s: float = 60.0
    ) -> None:
        self._problems = list(problems)
        self._command = [sys.executable, str(Path(__file__).resolve())] if command is None else list(command)
        self._patience_s = patience_s
        self._outcome = Outcome()
        self._child = self._start()

    def _start(self) -> subprocess.Popen[str]:
        todo = [p for p in self._problems if p not in self._outcome.finished]
        task = {"todo": todo, "skip": self._outcome.crashed}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  read later
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed later
            child.stdin.write(json.dumps(task))
            child.stdin.close()
        return child

    def finish(self, expired: Callable[[], bool] = lambda: False, max_crashes: int = 20) -> Outcome:
        """Waits for the rest; gives up early if the time is over or children keep dying."""
        while True:
            attempt = self._follow(expired)
            code = self._child.wait()
            if code == 0 or expired():
                return self._outcome
            if attempt is None:
                self._errors.seek(0)
                lines = self._errors.read().strip().splitlines()
                self._outcome.error = lines[-1] if lines else f"the child process ended with {code}"
                return self._outcome
            self._outcome.crashed.append(attempt)
            if len(self._outcome.crashed) >= max_crashes:
                self._outcome.error = f"{max_crashes} algorithms crashed"
                return self._outcome
            self._child = self._start()

    def _follow(self, expired: Callable[[], bool]) -> tuple[Problem, int] | None:
        """Reads one child to its end; what it was trying then, if anything."""
        attempt: tuple[Problem, int] | None = None
        for line in self._lines(expired):
            word, *values = json.loads(line)
            n, k, dtype, m = values[:4]
            problem = (int(n), int(k), str(dtype), int(m))
            if word == "try":
                attempt = (problem, int(values[4]))
            elif word == "took":
                self._outcome.times.setdefault(problem, {})[int(values[4])] = float(values[5])
                attempt = None
            elif word == "refused":
                attempt = None
            elif word == "done":
                self._outcome.finished.add(problem)
        return attempt

    def _lines(self, expired: Callable[[], bool]) -> Iterator[str]:
        """The child's lines; it is killed when none comes for too long."""
        lines: queue.Queue[str | None] = queue.Queue()
        stdout = self._child.stdout
        assert stdout is not None

        def pump() -> None:
            for line in stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        while not expired():
            try:
                line = lines.get(timeout=self._patience_s)
            except queue.Empty:
                break
            if line is None:
                return
            yield line
        self._child.kill()


def cusparselt_linear(x: Tensor, compressed: Tensor, algorithm: int) -> Tensor:
    """x @ w.T; cuSPARSELt wants multiples of eight tokens, and gets zeros for those that are not there."""
    m = x.shape[0]
    if m % 8:
        x = torch.nn.functional.pad(x, (0, 0, 0, -m % 8))
    y: Tensor = torch._cslt_sparse_mm(compressed, x.t(), transpose_result=True, alg_id=algorithm)
    return y[:m]


def main() -> None:
    """The child: reads what to do from stdin, and writes a line per step."""
    task = json.load(sys.stdin)
    skip = {(tuple(problem), algorithm) for problem, algorithm in task["skip"]}
    compressed, made_for = None, None
    cold = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    for n, k, dtype, m in task["todo"]:
        if made_for != (n, k, dtype):
            compressed = None
            w = torch.randn(n, k, device="cuda").to(getattr(torch, dtype))
            w.view(n, k // 2, 2)[..., 1] = 0  # one of two is two of four
            compressed = torch._cslt_compress(w)
            del w
            made_for = (n, k, dtype)
        x = torch.randn(m, k, device="cuda").to(getattr(torch, dtype))
        refused = 0
        for algorithm in range(MAX_ALGORITHMS):
            if ((n, k, dtype, m), algorithm) in skip:
                continue
            _say("try", n, k, dtype, m, algorithm)
            try:
                cusparselt_linear(x, compressed, algorithm)
                torch.cuda.synchronize()
                # The host takes a fraction of a second for each call: only a graph shows what the GPU takes.
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    cusparselt_linear(x, compressed, algorithm)
            except RuntimeError:
                _check_context()
                _say("refused", n, k, dtype, m, algorithm)
                refused += 1
                if refused == PATIENCE:
                    break
                continue
            refused = 0
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * TIMED_CALLS)]
            for begin, end in zip(events[::2], events[1::2], strict=True):
                cold.zero_()
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) * 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
            _say("took", n, k, dtype, m, algorithm, min(times))
        _say("done", n, k, dtype, m)


def _check_context() -> None:
    """Ends the process if a kernel has left the GPU unusable: every later call would fail as well."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        sys.exit(1)


def _say(*words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
