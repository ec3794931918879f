"""Timing: the order of rounds, robust against clocks that drift, and the graphs of the CUDA timer on a fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import timing
import torch
from fakes import FakeCuda, FakeCudaTimer
from timing import Runner, Timing, interleave
from torch import Tensor


@dataclass
class Machine:
    """A device whose clock slows down with every call."""

    slowdown: float = 0.0
    factor: float = 1.0
    log: list[str] = field(default_factory=list)
    synchronized: int = 0

    def synchronize(self) -> None:
        self.synchronized += 1


@dataclass
class Fake:
    machine: Machine
    name: str
    us: float
    calls: int = 1

    def start(self) -> Callable[[], float]:
        self.machine.log.append(self.name)
        elapsed = self.us * self.machine.factor * self.calls
        self.machine.factor *= 1 + self.machine.slowdown
        begun = self.machine.synchronized

        def read() -> float:
            assert self.machine.synchronized > begun, "read before the device was done"
            return elapsed

        return read


def test_rounds_rotate() -> None:
    machine = Machine()
    runners: dict[str, Runner] = {n: Fake(machine, n, us) for n, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    times = interleave(runners, dict.fromkeys(runners, 4), machine.synchronize)
    assert "".join(machine.log) == "abcbcacababc"
    assert machine.synchronized == 4
    assert times == {"a": Timing(1.0, 0.0), "b": Timing(2.0, 0.0), "c": Timing(3.0, 0.0)}


def test_time_is_per_call() -> None:
    machine = Machine()
    times = interleave({"a": Fake(machine, "a", 2.0, calls=50)}, {"a": 3}, machine.synchronize)
    assert times["a"].us == pytest.approx(2.0)


def test_drift_is_shared() -> None:
    # A GPU that slows down by 1 % with each graph: one after the other the second would look 20 % worse.
    machine = Machine(slowdown=0.01)
    runners: dict[str, Runner] = {n: Fake(machine, n, 10.0) for n in "ab"}
    times = interleave(runners, dict.fromkeys(runners, 20), machine.synchronize)
    assert times["a"].us == pytest.approx(times["b"].us, rel=0.01)
    assert times["a"].spread > 0.5


def test_rounds_of_slow_ones() -> None:
    machine = Machine()
    runners: dict[str, Runner] = {n: Fake(machine, n, 1.0) for n in "ab"}
    interleave(runners, {"a": 2, "b": 5}, machine.synchronize)
    assert machine.log.count("a") == 2 and machine.log.count("b") == 5


def test_expires_between_rounds() -> None:
    machine = Machine()
    runners: dict[str, Runner] = {n: Fake(machine, n, 1.0) for n in "ab"}
    times = interleave(runners, dict.fromkeys(runners, 9), machine.synchronize, lambda: machine.synchronized >= 2)
    assert machine.log == ["a", "b", "b", "a"]
    assert set(times) == {"a", "b"}
    assert interleave(runners, dict.fromkeys(runners, 9), machine.synchronize, lambda: True) == {}
    assert interleave({}, {}, machine.synchronize) == {}


def test_quartiles() -> None:
    assert Timing.of([4.0, 1.0, 3.0, 2.0, 100.0]) == Timing(3.0, 2.0)  # 1 2 3 4 100: quartiles 2 and 4
    assert Timing.of([7.0]) == Timing(7.0, 0.0)


def test_plans() -> None:
    assert timing.plan_calls(10.0, 1) == 50  # 500 us
    assert timing.plan_calls(0.1, 1) == timing.MAX_CALLS
    assert timing.plan_calls(600.0, 1) == 1
    assert timing.plan_calls(600.0, 8) == 8  # every copy is read
    assert timing.plan_rounds(500.0, 10.0) == timing.MAX_ROUNDS
    assert timing.plan_rounds(5e3, 5e3) == 4  # 20 ms in all
    assert timing.plan_rounds(15e3, 15e3) == timing.MIN_ROUNDS
    assert timing.plan_rounds(100e3, 100e3) == 2


def test_copies() -> None:
    # 240 MB have to pass: 30 weights of 8 MB, or 15 where x and y are 120 MB themselves, and one where they are enough.
    assert timing.copies_needed(8e6, 0, 240e6) == 30
    assert timing.copies_needed(8e6, 120e6, 240e6) == 15
    assert timing.copies_needed(8e6, 300e6, 240e6) == 1
    assert timing.copies_needed(500e6, 0, 240e6) == 1
    assert timing.copies_needed(1e3, 0, 240e6) == timing.MAX_COPIES


def functions(cuda: FakeCuda, count: int) -> list[Callable[[Tensor], Tensor]]:
    def make(i: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            cuda.note(i)
            return x

        return call

    return [make(i) for i in range(count)]


def test_graph_takes_turns(fake_cuda: FakeCuda) -> None:
    timer = FakeCudaTimer(rotate_bytes=100.0)
    runner = timer.runner(functions(fake_cuda, 3), torch.zeros(2, 2), 7)
    assert fake_cuda.captures[-1].copies == [0, 1, 2, 0, 1, 2, 0]
    elapsed = runner.start()
    timer.synchronize()
    assert elapsed() == pytest.approx(7 * fake_cuda.call_us)


def test_pool_lives_until_release(fake_cuda: FakeCuda) -> None:
    timer = FakeCudaTimer(rotate_bytes=100.0)
    for _ in range(3):
        timer.runner(functions(fake_cuda, 1), torch.zeros(2, 2), 1)
    assert fake_cuda.pools == 1
    assert len(fake_cuda.captures) == 4  # one that keeps the pool alive
    assert {g.pool for g in fake_cuda.captures} == {1}
    timer.release()
    assert fake_cuda.emptied == 1
    timer.runner(functions(fake_cuda, 1), torch.zeros(2, 2), 1)
    assert fake_cuda.pools == 2


def test_failed_capture_ends(fake_cuda: FakeCuda) -> None:
    timer = FakeCudaTimer(rotate_bytes=100.0)

    def fails(x: Tensor) -> Tensor:
        raise ValueError("the kernel is missing")

    with pytest.raises(timing.CaptureError, match="the kernel is missing"):
        timer.runner([fails], torch.zeros(2, 2), 1)
    assert fake_cuda.capturing is None
    timer.runner(functions(fake_cuda, 1), torch.zeros(2, 2), 1)


def test_replay_is_what_the_gpu_takes(fake_cuda: FakeCuda) -> None:
    def slow(x: Tensor) -> Tensor:
        fake_cuda.now_us += 0 if fake_cuda.capturing else 300e3
        fake_cuda.note(0)
        return x

    timer = FakeCudaTimer(rotate_bytes=100.0)
    assert timer.estimate_us(slow, torch.zeros(2, 2)) == pytest.approx(300e3)
    assert timing.replay_us(timer, slow, torch.zeros(2, 2)) == pytest.approx(fake_cuda.call_us)
    assert fake_cuda.captures[-1].copies == [0]


def test_host_time(fake_cuda: FakeCuda) -> None:
    us = FakeCudaTimer(rotate_bytes=100.0).host_us(lambda x: x + 1, torch.zeros(2, 2))
    assert us is not None and 0 < us < 1e5


def test_rates_of_this_machine() -> None:
    timer = timing.CpuTimer()
    ways = timing.measure_bandwidth(timer)
    assert set(ways) == {"sum", "max", "copy"}
    assert all(0.01 < v < 1e4 for v in ways.values())
    assert timing.measure_peak(timer, torch.float32) > 1e-4


def test_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_program(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(timing.subprocess, "Popen", no_program)
    sensors = timing.Sensors()
    assert sensors.summary() is None
    for line in (
        "1200, 3201, 400.5, 50\n",
        "1980, 3201, 690.0, 61\n",
        "[N/A], 3201, 600, 60\n",
        "1500, 3201, 600, 60\n",
    ):
        sensors.add(line)
    sensors.add("1, 2")
    assert sensors.summary() == {
        "sm_mhz": [1200.0, 1500.0, 1980.0],
        "memory_mhz": [3201.0, 3201.0, 3201.0],
        "power_w": [400.5, 600.0, 690.0],
        "temperature_c": [50.0, 60.0, 61.0],
    }
    sensors.close()
