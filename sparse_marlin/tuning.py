"""Measuring the kernels on a GPU, and remembering which is the fastest for a layer's shape there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from .dispatch import PLAN_TOKENS, Config, Device, Kernel, Problem, estimate, plan_text, schedules
from .layouts import KERNEL_TENSOR_NAMES, KernelWeight, to_kernel
from .packed import PackedWeight
from .samples import cache_directory
from .scheme import Scheme

_COLD_BYTES = 300 << 20  # of weights that are gone through, so that none is found in the L2
_MIN_LAUNCHES, _REPLAYS = 10, 7
# The model decides what is worth measuring: nothing that it takes for so much slower than its choice.
_WORTH_MEASURING = 2.0


def measure(
    form: KernelWeight, xs: Mapping[int, Tensor], configs: Mapping[int, Sequence[Config]]
) -> Iterator[tuple[int, Config]]:
    """Times configurations of the kernels on cold weights, inside a CUDA graph of back-to-back launches.

    Args:
        form: the weight on a CUDA device.
        xs: inputs [M, K] by their number of tokens.
        configs: what to measure for each number of tokens.

    Yields:
        The number of tokens, and the configuration with the measured time.

    Raises:
        RuntimeError: if two configurations disagree by more than rounding: one of them is wrong.
    """
    copies = [form]
    size = sum(t.nbytes for name in KERNEL_TENSOR_NAMES if (t := getattr(form, name)) is not None)
    while len(copies) * size < _COLD_BYTES:
        tensors = {name: None if (t := getattr(form, name)) is None else t.clone() for name in KERNEL_TENSOR_NAMES}
        copies.append(replace(form, **tensors))  # type: ignore[arg-type]  # by name
    launches = max(len(copies), _MIN_LAUNCHES)
    for tokens, candidates in configs.items():
        x = xs[tokens]
        expected: Tensor | None = None
        for config in candidates:
            plan = f"*:{config.step}"
            y = _multiply(form, x, plan).float()
            expected = y if expected is None else expected
            error = float((y - expected).norm() / expected.norm())
            if not error < 4 * torch.finfo(x.dtype).eps:
                raise RuntimeError(
                    f"{config.step} and {candidates[0].step} disagree for {tokens} tokens (relative error {error:.1e})"
                )
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(launches):
                    _multiply(copies[i % len(copies)], x, plan)
            yield tokens, replace(config, microseconds=median(_replay(graph) for _ in range(_REPLAYS)) / launches)


def _multiply(form: KernelWeight, x: Tensor, plan: str) -> Tensor:
    from .runtime import multiply  # which asks this module for what was tuned

    return multiply(form, x, plan)


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def candidates(
    problem: Problem, device: Device, kernels: Sequence[Kernel], worth: float = _WORTH_MEASURING
) -> list[Config]:
    """What may be the fastest, by the cost model's times: those within ``worth`` times the best, fastest first."""
    every = [
        replace(c, microseconds=estimate(problem, device, kernel, c))
        for kernel in kernels
        for c in schedules(problem, device, kernel)
    ]
    every.sort(key=lambda c: (c.microseconds, c.kernel, c.blocks))
    return [c for c in every if c.microseconds <= worth * every[0].microseconds]


def tune(packed: PackedWeight, dtype: torch.dtype, tokens: Iterable[int] = PLAN_TOKENS) -> dict[int, list[Config]]:
    """Measures the kernels for a layer on its GPU and remembers the plan; later models of this user take it by itself.

    Args:
        packed: a weight on a CUDA device; its numbers do not matter, its shape and scheme do.
        dtype: of the inputs.
        tokens: the numbers of tokens to measure, ascending.

    Returns:
        For each number of tokens what was measured, fastest first.

    Raises:
        RuntimeError: if no kernel can run the layer, or one computes something else than the others.
    """
    from .runtime import device_properties, kernels

    index = packed.device.index
    table, device = kernels(packed.scheme, dtype), device_properties(index)
    n, k = packed.out_features, packed.in_features
    configs = {m: candidates(Problem(m, n, k, packed.scheme, dtype), device, table) for m in tokens}
    if not all(configs.values()):
        raise RuntimeError(f"no kernel can run this layer on {device.name}")
    random = torch.Generator(packed.device).manual_seed(0)
    xs = {m: torch.randn(m, k, generator=random, device=packed.device).to(dtype) for m in configs}
    found: dict[int, list[Config]] = {m: [] for m in configs}
    for m, config in measure(to_kernel(packed, dtype), xs, configs):
        found[m].append(config)
    for measured in found.values():
        measured.sort(key=lambda c: c.microseconds)
    _remember(_key(n, k, packed.scheme, dtype, device, table), plan_text({m: c[0] for m, c in found.items()}))
    return found


# ---------------------------------------------------------------- what was tuned, in the user's cache


def tuned_plan(
    N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]
) -> str | None:
    """The plan that :func:`tune` found for this shape on this GPU, or None."""
    return _remembered().get(_key(N, K, scheme, dtype, device, kernels))


def _file() -> Path:
    return cache_directory() / "tuned.json"


def _key(N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]) -> str:
    # Other kernels, after an update, make what was measured worthless.
    table = hashlib.sha256(repr(kernels).encode()).hexdigest()[:12]
    return f"{device.name}, {device.multiprocessors} SMs, {N}x{K}, {scheme}, {str(dtype)[6:]}, kernels {table}"


@cache
def _remembered() -> dict[str, str]:
    try:
        plans = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in plans.items() if isinstance(v, str)} if isinstance(plans, dict) else {}


def _remember(key: str, plan: str) -> None:
    _remembered.cache_clear()
    plans = _remembered() | {key: plan}
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    part.replace(file)
    _remembered.cache_clear()
