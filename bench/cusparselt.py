"""The fastest algorithm of cuSPARSELt for each problem, tried one by one in child processes: some of them crash.

The library's own search ends the process at some sizes, and so would ours. A child says what it tries before it tries
it; when it dies or hangs, another one goes on after that. Nobody tries that algorithm on another problem of the dtype:
each crash costs seconds, and what crashes once has crashed at every size that was tried. What takes long is what the
host does before the first call, so several children share the problems. They take turns with the GPU, so that nothing
runs beside what is timed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

import libcusparselt
import timing
import torch
from torch import Tensor

MAX_CHILDREN = 8
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

    def best(self) -> dict[Problem, int | None]:
        """The fastest algorithm of each problem that all have been tried for; None where none of them works."""
        return {p: min(t, key=lambda a: t[a]) if (t := self.times.get(p)) else None for p in self.finished}


class Search:
    """Runs the children. They start at once, so that their start-up costs no time.

    Args:
        children: at most; by default one for each two CPUs, and no more than :data:`MAX_CHILDREN`.
        crashed: dtypes and algorithms that have crashed before, and are not tried.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        command: Sequence[str] | None = None,
        patience_s: float = 60.0,
        children: int | None = None,
        crashed: Iterable[tuple[str, int]] = (),
    ) -> None:
        if command is None:
            command = [sys.executable, str(Path(__file__).resolve())]
        if children is None:
            children = max(1, min(MAX_CHILDREN, (os.cpu_count() or 1) // 2))
        self._outcome = Outcome()
        # Children lock it, and find in it what has crashed so far.
        self._turn = tempfile.NamedTemporaryFile("w", encoding="utf-8")  # noqa: SIM115
        self._turn.writelines(f"{dtype} {algorithm}\n" for dtype, algorithm in crashed)
        self._turn.flush()
        shares = [list(problems[i::children]) for i in range(min(children, len(problems)))]
        self._children = [
            _Child(s, command, self._turn, i / len(shares), patience_s, self._outcome) for i, s in enumerate(shares)
        ]

    def finish(self, expired: Callable[[], bool] = lambda: False, max_crashes: int = 40) -> Outcome:
        """Waits for the rest; gives up early if the time is over or children keep dying."""
        with self._turn, ThreadPoolExecutor(max(1, len(self._children))) as threads:
            for done in [threads.submit(child.finish, expired, max_crashes) for child in self._children]:
                done.result()
        return self._outcome


class _Child:
    """Searches some of the problems, in a process that is started again after each crash.

    Each child begins somewhere else among the algorithms (``first``, a share of them), so that the bad ones, which are
    neighbours, do not meet all of them at once.
    """

    def __init__(
        self,
        problems: list[Problem],
        command: Sequence[str],
        turn: IO[str],
        first: float,
        patience_s: float,
        outcome: Outcome,
    ) -> None:
        self._problems, self._command, self._turn, self._first = problems, list(command), turn, first
        self._patience_s, self._outcome = patience_s, outcome
        self._child = self._start()

    def _start(self) -> subprocess.Popen[str]:
        todo = [p for p in self._problems if p not in self._outcome.finished]
        timed = [(p, algorithm) for p in todo for algorithm in self._outcome.times.get(p, {})]
        task = {"todo": todo, "skip": timed, "turn": self._turn.name, "first": self._first}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  read later
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed later
            child.stdin.write(json.dumps(task))
            child.stdin.close()
        return child

    def finish(self, expired: Callable[[], bool], max_crashes: int) -> None:
        """Follows one process after the other, until all is known, or the time is over, or too many have crashed."""
        while True:
            attempt = self._follow(expired)
            code = self._child.wait()
            if code == 0 or expired():
                return
            if attempt is None:
                self._errors.seek(0)
                lines = self._errors.read().strip().splitlines()
                self._outcome.error = lines[-1] if lines else f"the child process ended with {code}"
                return
            self._outcome.crashed.append(attempt)
            (_, _, dtype, _), algorithm = attempt
            print(dtype, algorithm, file=self._turn, flush=True)
            if len(self._outcome.crashed) >= max_crashes:
                self._outcome.error = f"{max_crashes} algorithms crashed"
                return
            self._child = self._start()

    def _follow(self, expired: Callable[[], bool]) -> tuple[Problem, int] | None:
        """Reads one child to its end; what it was trying then, if anything."""
        attempt: tuple[Problem, int] | None = None
        for line in self._lines(expired):
            word, *values = json.loads(line)
            if word == "waiting":
                continue
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


def main() -> None:
    """The child: reads what to do from stdin, and writes a line per step."""
    task = json.load(sys.stdin)
    skip = {(tuple(problem), algorithm) for problem, algorithm in task["skip"]}
    timer = timing.CudaTimer()
    cold = torch.empty(int(timer.rotate_bytes), dtype=torch.uint8, device=timer.device)
    compressed, made_for = torch.empty(0), None
    with open(task["turn"]) as turn, timer.active():
        for n, k, dtype, m in task["todo"]:
            with _alone(turn):
                if made_for != (n, k, dtype):
                    del compressed  # there need not be two
                    compressed, made_for = _compressed(n, k, getattr(torch, dtype), timer.device), (n, k, dtype)
                x = torch.randn(m, k, dtype=compressed.dtype, device=timer.device)
            rows = m + -m % 8
            try:
                count = libcusparselt.product(n, k, rows, x.dtype).num_algorithms
            except RuntimeError:  # the library has nothing for such a product
                count = 0
            first = int(task["first"] * count)
            for algorithm in (*range(first, count), *range(first)):
                if ((n, k, dtype, m), algorithm) in skip or f"{dtype} {algorithm}" in _crashed(turn):
                    continue
                _say("try", n, k, dtype, m, algorithm)
                try:
                    libcusparselt.product(n, k, rows, x.dtype, algorithm).prepare()
                    with _alone(turn):
                        us = _measure(x, compressed, n, algorithm, timer, cold)
                except RuntimeError:
                    _check_context(cold)
                    _say("refused", n, k, dtype, m, algorithm)
                else:
                    _say("took", n, k, dtype, m, algorithm, us)
            _say("done", n, k, dtype, m)


def _compressed(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random weight."""
    w = torch.randn(n, k, dtype=dtype, device=device)
    w.view(n, k // 2, 2)[..., 1] = 0  # one of two is two of four
    compressed: Tensor = torch._cslt_compress(w)
    del w
    torch.cuda.empty_cache()  # the other children have weights as well
    return compressed


def _measure(x: Tensor, compressed: Tensor, n: int, algorithm: int, timer: timing.CudaTimer, cold: Tensor) -> float:
    """Microseconds of a product, in a graph as in the comparison: what cannot be captured is of no use there."""

    def function(x: Tensor) -> Tensor:
        return libcusparselt.cusparselt_linear(x, compressed, n, algorithm)

    function(x)
    return timing.replay_us(timer, function, x, TIMED_CALLS, cold.zero_)


def _crashed(turn: TextIO) -> list[str]:
    turn.seek(0)
    return turn.read().splitlines()


@contextlib.contextmanager
def _alone(turn: TextIO) -> Iterator[None]:
    """Has the GPU to itself. Says while it waits that it does: it does not hang, maybe another one does."""
    waited = 0
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.002)
            waited += 1
            if waited % 500 == 0:
                _say("waiting")
    try:
        yield
        torch.cuda.synchronize()
    finally:
        fcntl.flock(turn, fcntl.LOCK_UN)


def _check_context(anything: Tensor) -> None:
    """Ends the process if a kernel has left the GPU unusable: every later call would fail as well."""
    try:
        torch.cuda.synchronize()
        anything[0].item()
    except RuntimeError:
        sys.exit(1)


def _say(*words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
