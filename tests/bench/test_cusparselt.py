"""The search for algorithms survives children that crash, hang or never start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from cusparselt import Problem, Search, cusparselt_linear
from torch import Tensor

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
        if (tuple(p), a) in skip:
            continue
        say("try", *p, a)
        FAULT
        say("took", *p, a, 10.0 - a)
    say("done", *p)
"""


def search(tmp_path: Path, fault: str, patience_s: float = 60.0) -> Search:
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("FAULT", fault))
    return Search([A, B], [sys.executable, str(child)], patience_s)


def test_best(tmp_path: Path) -> None:
    outcome = search(tmp_path, "pass").finish()
    assert outcome.best() == {A: 3, B: 3}
    assert outcome.times[A] == {0: 10.0, 1: 9.0, 2: 8.0, 3: 7.0}
    assert outcome.crashed == [] and outcome.error is None


def test_crash(tmp_path: Path) -> None:
    outcome = search(tmp_path, "if a == 3 and p[3] == 8: os._exit(139)").finish()
    assert outcome.best() == {A: 2, B: 3}
    assert outcome.crashed == [(A, 3)]


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


def test_cusparselt_pads_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(compressed: Tensor, x: Tensor, transpose_result: bool, alg_id: int) -> Tensor:
        assert x.shape[1] % 8 == 0 and transpose_result and alg_id == 5
        return (compressed @ x).t()

    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    w = torch.randn(16, 32)
    for m in (1, 8, 13):
        x = torch.randn(m, 32)
        torch.testing.assert_close(cusparselt_linear(x, w, 5), x @ w.t())
