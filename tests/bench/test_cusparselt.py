"""The search for algorithms survives children that crash, hang or never start."""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cusparselt
import pytest
import torch
from cusparselt import Outcome, Problem, Search
from fakes import FakeCuda, FakeCudaTimer, compress_evens

A: Problem = (16, 32, "float16", 8)
B: Problem = (16, 32, "float16", 64)

# Algorithm i takes 10 - i microseconds; what happens instead is set by FAULT.
CHILD = """
import json, os, sys, time
task = json.load(sys.stdin)
skip = [(tuple(p), a) for p, a in task["skip"]]
def say(*words):
    print(json.dumps(words), flush=True)
for p in task["todo"]:
    for a in range(4):
        if (tuple(p), a) in skip or f"{p[2]} {a}" in open(task["turn"]).read().splitlines():
            continue
        say("try", *p, a)
        FAULT
        say("took", *p, a, 10.0 - a)
    say("done", *p)
"""


def search(tmp_path: Path, fault: str, patience_s: float = 60.0, children: int = 1, **options: Any) -> Search:
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("FAULT", fault))
    return Search([A, B], [sys.executable, str(child)], patience_s, children, **options)


def test_best(tmp_path: Path) -> None:
    outcome = search(tmp_path, "pass").finish()
    assert outcome.best() == {A: 3, B: 3}
    assert outcome.times[A] == {0: 10.0, 1: 9.0, 2: 8.0, 3: 7.0}
    assert outcome.crashed == [] and outcome.error is None


def test_children_share_the_problems(tmp_path: Path) -> None:
    """Each waits for the other one to begin; what crashes one is no loss of the other one."""
    fault = f"""open({str(tmp_path)!r} + "/" + str(p[3]), "w").close()
        while len([f for f in os.listdir({str(tmp_path)!r}) if f.isdigit()]) < 2:
            time.sleep(0.01)
        if a == 2 and p[3] == 64:
            os._exit(139)"""
    outcome = search(tmp_path, fault, children=5).finish()
    assert outcome.best() == {A: 3, B: 3}
    assert outcome.crashed == [(B, 2)] and outcome.finished == {A, B} and outcome.error is None


def test_a_new_child_goes_on(tmp_path: Path) -> None:
    """What is timed is not timed again after a crash."""
    log = tmp_path / "log"
    fault = f"""open({str(log)!r}, "a").write(f"{{p[3]}}:{{a}} ")
        if a == 2 and p[3] == 64:
            os._exit(139)"""
    search(tmp_path, fault).finish()
    assert log.read_text().split() == [f"8:{a}" for a in range(4)] + [f"64:{a}" for a in range(4)]


def test_nothing_to_do() -> None:
    assert Search([]).finish() == Outcome()


def test_waiting_is_no_hang(tmp_path: Path) -> None:
    fault = """for _ in range(4 if a == 1 and p[3] == 8 else 0):
            say("waiting")
            time.sleep(0.5)"""
    outcome = search(tmp_path, fault, patience_s=1.5).finish()
    assert outcome.best() == {A: 3, B: 3} and outcome.crashed == []


def test_crash(tmp_path: Path) -> None:
    """What crashes is not tried on the other problems of the dtype."""
    outcome = search(tmp_path, "if a == 3: os._exit(139)").finish()
    assert outcome.best() == {A: 2, B: 2}
    assert outcome.crashed == [(A, 3)]
    again = search(tmp_path, "if a == 3: os._exit(139)", crashed=[("float16", 3)]).finish()
    assert again.best() == {A: 2, B: 2} and again.crashed == []


def test_refused(tmp_path: Path) -> None:
    fault = """if a == 3:
            say("refused", *p, a)
            continue"""
    assert search(tmp_path, fault).finish().best() == {A: 2, B: 2}


def test_hang(tmp_path: Path) -> None:
    outcome = search(tmp_path, "if a == 1 and p[3] == 64: time.sleep(60)", patience_s=1.5).finish()
    assert outcome.crashed == [(B, 1)]
    assert outcome.best() == {A: 3, B: 3}


def test_never_starts(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit('no GPU in here')")
    outcome = Search([A], [sys.executable, str(child)]).finish()
    assert outcome.error == "no GPU in here"
    assert outcome.best() == {}


def test_gives_up(tmp_path: Path) -> None:
    outcome = search(tmp_path, "os._exit(1)").finish(max_crashes=3)
    assert outcome.error == "3 algorithms crashed"
    assert outcome.crashed == [(A, 0), (A, 1), (A, 2)]


def test_time_is_over(tmp_path: Path) -> None:
    outcome = search(tmp_path, "time.sleep(60)").finish(expired=lambda: True)
    assert outcome.best() == {}


def test_the_real_child_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the search would run")
    outcome = Search([A]).finish()
    assert outcome.error is not None and "Error" in outcome.error


def test_the_real_child(
    fake_cuda: FakeCuda,
    fake_cusparselt: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it does on a GPU: of four algorithms one crashed before, one is refused, one is known."""
    monkeypatch.setattr(torch, "_cslt_compress", compress_evens)
    monkeypatch.setattr(cusparselt.timing, "CudaTimer", lambda: FakeCudaTimer(rotate_bytes=1000.0))
    turn = tmp_path / "turn"
    turn.write_text("float16 0\nbfloat16 1\n")
    problems = [(16, 32, "bfloat16", 5), (16, 32, "bfloat16", 8), (32, 16, "bfloat16", 8), (32, 12, "bfloat16", 8)]
    task = {"todo": problems, "skip": [(problems[0], 3)], "turn": str(turn), "first": 0.5}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(task)))
    cusparselt.main()
    said: dict[str, list[list[object]]] = {}
    for line in capsys.readouterr().out.splitlines():
        word, *values = json.loads(line)
        said.setdefault(word, []).append(values)
    orders = ([2, 0], [2, 3, 0], [2, 0], [])  # of 4, 4, 3 and no algorithms
    tried = [[*p, a] for p, order in zip(problems, orders, strict=True) for a in order]
    assert said["try"] == tried
    assert said["refused"] == [[*p, 2] for p in problems[:3]]
    assert [v[:5] for v in said["took"]] == [t for t in tried if t not in said["refused"]]
    assert [v[5] for v in said["took"]] == pytest.approx([fake_cuda.call_us] * len(said["took"]))
    assert said["done"] == [list(p) for p in problems]


def test_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the GPU says so, which is no hang, and gets it when the other one is done or has died."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    path = tmp_path / "turn"
    path.touch()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True);"
            "time.sleep(60)",
            str(path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    waited = 0

    def sleep(_: float) -> None:
        nonlocal waited
        waited += 1
        if waited == 1001:
            holder.kill()
            holder.wait()

    monkeypatch.setattr(cusparselt.time, "sleep", sleep)
    with path.open() as turn, path.open() as other:
        with cusparselt._alone(turn), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert waited >= 1001
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert capsys.readouterr().out == '["waiting"]\n' * (waited // 500)
