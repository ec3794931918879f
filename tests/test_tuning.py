"""What was tuned is remembered in the user's cache, and worthless for other GPUs, kernels and shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_marlin import Scheme, remembered, runtime, tuning
from sparse_marlin.dispatch import (
    PLAN_TOKENS,
    Config,
    Device,
    Kernel,
    Problem,
    choice_of,
    choose,
    estimate,
    parse_plan,
    plan,
    schedules,
)

H200 = Device("H200", 90, 132, 232448, 233472, 1.98, 4916, (66, 33, 30, 20, 16, 14, 12))
KERNELS = (
    Kernel("sm90_256x8", 90, 90, 8, 256, 256, 220 << 10, 1),
    Kernel("sm90_128x64", 90, 90, 64, 128, 256, 220 << 10, 1),
    Kernel("sm80_128x16", 80, 0, 16, 128, 256, 100 << 10, 2),
)
SCHEME = Scheme(4, 128, "2:4")
LAYER = (4096, 4096, SCHEME, torch.float16, H200, KERNELS)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered._remembered.cache_clear()
    yield tmp_path / "sparse_marlin"
    remembered._remembered.cache_clear()


def test_remembers_a_plan_for_its_shape_scheme_gpu_and_kernels_only(cache_directory: Path) -> None:
    assert remembered.tuned_plan(*LAYER) is None
    remembered.remember(LAYER, {}, "*:sm90_256x8@64/4")
    assert remembered.tuned_plan(*LAYER) == "*:sm90_256x8@64/4"
    assert remembered.tuned_plan(*LAYER[:5], list(KERNELS)) == "*:sm90_256x8@64/4"
    others = [
        (4096, 8192, *LAYER[2:]),
        (4096, 4096, Scheme(4, 64, "2:4"), *LAYER[3:]),
        (*LAYER[:3], torch.bfloat16, H200, KERNELS),
        (*LAYER[:4], replace(H200, name="H100"), KERNELS),
        (*LAYER[:5], KERNELS[:2]),
    ]
    assert [remembered.tuned_plan(*other) for other in others] == [None] * len(others)
    assert len(json.loads((cache_directory / "tuned.json").read_text())) == 1


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 3}'])
def test_a_damaged_cache_is_no_plan(cache_directory: Path, text: str) -> None:
    cache_directory.mkdir(parents=True)
    (cache_directory / "tuned.json").write_text(text)
    assert remembered.tuned_plan(*LAYER) is None


@pytest.mark.parametrize("text", ["", "nonsense", "8:sm90_256x8@64", "*:sm90_256x8@0", "*:gone@132"])
def test_a_plan_that_is_none_is_forgotten(cache_directory: Path, text: str) -> None:
    cache_directory.mkdir(parents=True)
    (cache_directory / "tuned.json").write_text(json.dumps({remembered._key(*LAYER): text}))
    assert remembered.tuned_plan(*LAYER) is None


def test_choices_for_a_few_tokens_leave_the_rest_of_the_plan_as_it_was() -> None:
    old = "16:sm90_256x8@128 *:sm90_128x64@132"
    remembered.remember(LAYER, {1: Config("sm90_256x8", 64, 4), 20: Config("sm80_128x16", 264)}, old)
    assert remembered.tuned_plan(*LAYER) == ("1:sm90_256x8@64/4 16:sm90_256x8@128 20:sm80_128x16@264 *:sm90_128x64@132")
    remembered.remember(LAYER, {64: Config("sm90_128x64", 96, 3)}, "*:sm80_128x16@1")
    assert remembered.tuned_plan(*LAYER) == (
        "1:sm90_256x8@64/4 16:sm90_256x8@128 20:sm80_128x16@264 48:sm90_128x64@132 64:sm90_128x64@96/3 "
        "*:sm90_128x64@132"
    )


def test_candidates_are_the_schedules_near_the_choice_fastest_first() -> None:
    problem = Problem(16, 4096, 4096, SCHEME, torch.float16)
    choice = choose(problem, H200, KERNELS)
    assert choice is not None
    every = [estimate(problem, H200, kernel, c) for kernel in KERNELS for c in schedules(problem, H200, kernel)]
    for worth in (1.0, 1.3, 2.0):
        found = tuning.candidates(problem, H200, KERNELS, worth)
        times = [c.microseconds for c in found]
        assert times == sorted(t for t in every if t <= worth * choice.microseconds)
        assert choice in found
    assert len(tuning.candidates(problem, H200, KERNELS, 1.3)) < len(every)
    assert tuning.candidates(problem, replace(H200, capability=75), KERNELS) == []


def test_the_choice_is_a_candidate_even_if_the_model_takes_older_kernels_for_much_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "estimate", lambda p, d, k, c: estimate(p, d, k, c) / (9 if k.name[2] == "8" else 1))
    problem = Problem(16, 4096, 4096, SCHEME, torch.float16)
    choice = choose(problem, H200, KERNELS)
    assert choice is not None
    assert choice.kernel.startswith("sm90")
    assert choice in tuning.candidates(problem, H200, KERNELS)


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a weight on the CPU were on an H200 with these kernels."""
    monkeypatch.setattr(runtime, "why_no_kernel", lambda *_: None)
    monkeypatch.setattr(runtime, "kernels", lambda *_: KERNELS)
    monkeypatch.setattr(runtime, "device_properties", lambda _: H200)
    monkeypatch.setattr(tuning, "to_kernel", lambda packed, _: packed)


def packed() -> Any:
    return SimpleNamespace(device=torch.device("cpu"), scheme=SCHEME, out_features=4096, in_features=4096)


def slowest_first(_form: object, x: Tensor, configs: Mapping[int, Sequence[Config]]) -> Iterator[tuple[int, Config]]:
    """A GPU that contradicts the model: what it takes for fast is slow."""
    for tokens, candidates in configs.items():
        assert x.shape[0] >= tokens
        for i, config in enumerate(candidates):
            yield tokens, replace(config, microseconds=100.0 - i)


def test_tune_remembers_what_was_fastest(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", slowest_first)
    found = tuning.tune(packed(), torch.float16)
    assert list(found) == list(PLAN_TOKENS)
    tuned = remembered.tuned_plan(*LAYER)
    assert tuned is not None
    for m, configs in found.items():
        expected = tuning.candidates(Problem(m, *LAYER[:4]), H200, KERNELS)
        assert [c.step for c in configs] == [c.step for c in reversed(expected)]
        assert choice_of(parse_plan(tuned), m).step == configs[0].step


def test_an_interrupted_tune_keeps_what_is_finished(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Iterator[tuple[int, Config]]:
        for tokens, config in slowest_first(*arguments):
            if tokens == 32:
                raise KeyboardInterrupt
            yield tokens, config

    monkeypatch.setattr(tuning, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(packed(), torch.float16, tokens=(32, 16, 16))
    before, after = plan(*LAYER), remembered.tuned_plan(*LAYER)
    assert before is not None
    assert after is not None
    old, new = parse_plan(before), parse_plan(after)
    assert {m for m in PLAN_TOKENS if choice_of(old, m) != choice_of(new, m)} == {16}


def test_tune_refuses_what_it_cannot_measure(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in ((), (0, 8)):
        with pytest.raises(ValueError, match="tokens must be positive numbers"):
            tuning.tune(packed(), torch.float16, tokens)
    monkeypatch.setattr(runtime, "device_properties", lambda _: replace(H200, capability=75))
    with pytest.raises(RuntimeError, match="no kernel can run this layer on H200"):
        tuning.tune(packed(), torch.float16)


def test_tune_needs_a_weight_on_a_gpu() -> None:
    weight = runtime.random_weight(8, 128, SCHEME, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"cannot tune a 2:4 INT4 group 128 weight: .* is on cpu"):
        tuning.tune(weight, torch.float16)


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_kernel_that_computes_something_else_is_an_error(
    gpu: None, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    monkeypatch.setattr(tuning, "_COLD_BYTES", 0)
    monkeypatch.setattr(runtime, "multiply", lambda _f, x, plan: x * (factor if "wrong" in plan else 1.0))
    monkeypatch.setattr(tuning, "_microseconds", lambda _copies, x, plans: [float(len(x))] * len(plans))
    form, x = SimpleNamespace(**dict.fromkeys(tuning.KERNEL_TENSOR_NAMES)), torch.ones(16, 8)
    right, wrong = [Config("right", 1), Config("also_right", 2, 1)], Config("wrong", 3)
    measured = tuning.measure(form, x, {1: right, 4: right, 16: [*right, wrong]})  # type: ignore[arg-type]
    assert [next(measured)[1].microseconds for _ in range(4)] == [1.0, 1.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="wrong@3 and right@1 disagree for 16 tokens"):
        next(measured)
