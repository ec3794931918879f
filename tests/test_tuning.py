"""What was tuned is remembered in the user's cache, and worthless for other GPUs, kernels and shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparse_marlin import Scheme, tuning
from sparse_marlin.dispatch import Device, Kernel, Problem, choose, estimate, schedules

H200 = Device("H200", 90, 132, 232448, 233472, 1.98, 4916, (66, 33, 30, 20, 16, 14, 12))
KERNELS = (
    Kernel("sm90_256x16", 90, 90, 16, 256, 256, 220 << 10, 1),
    Kernel("sm90_128x64", 90, 90, 64, 128, 256, 220 << 10, 1),
    Kernel("sm80_128x16", 80, 0, 16, 128, 256, 100 << 10, 2),
)
SCHEME = Scheme(4, 128, "2:4")


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._remembered.cache_clear()
    yield tmp_path / "sparse_marlin"
    tuning._remembered.cache_clear()


def test_remembers_a_plan_for_its_shape_scheme_gpu_and_kernels_only(cache_directory: Path) -> None:
    layer = (4096, 4096, SCHEME, torch.float16, H200, KERNELS)
    assert tuning.tuned_plan(*layer) is None
    tuning._remember(tuning._key(*layer), "*:sm90_256x16@64/4")
    assert tuning.tuned_plan(*layer) == "*:sm90_256x16@64/4"
    others = [
        (4096, 8192, *layer[2:]),
        (4096, 4096, Scheme(4, 64, "2:4"), *layer[3:]),
        (*layer[:3], torch.bfloat16, H200, KERNELS),
        (*layer[:4], replace(H200, name="H100"), KERNELS),
        (*layer[:5], KERNELS[:2]),
    ]
    assert [tuning.tuned_plan(*other) for other in others] == [None] * len(others)
    assert len(json.loads((cache_directory / "tuned.json").read_text())) == 1


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 3}'])
def test_a_damaged_cache_is_no_plan(cache_directory: Path, text: str) -> None:
    cache_directory.mkdir(parents=True)
    (cache_directory / "tuned.json").write_text(text)
    assert tuning.tuned_plan(4096, 4096, SCHEME, torch.float16, H200, KERNELS) is None


def test_candidates_are_the_schedules_near_the_choice_fastest_first() -> None:
    problem = Problem(16, 4096, 4096, SCHEME, torch.float16)
    found = tuning.candidates(problem, H200, KERNELS)
    times = [c.microseconds for c in found]
    assert times == sorted(times)
    assert times[-1] <= 2 * times[0]
    assert choose(problem, H200, KERNELS) in found
    every = [estimate(problem, H200, kernel, c) for kernel in KERNELS for c in schedules(problem, H200, kernel)]
    assert len(found) == sum(t <= 2 * min(every) for t in every) < len(every)
    assert tuning.candidates(problem, replace(H200, capability=75), KERNELS) == []
