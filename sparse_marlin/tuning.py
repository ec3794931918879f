"""Measuring the kernels on a GPU, and remembering which is the best for a layer's shape there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from . import runtime
from .dispatch import PLAN_TOKENS, Config, Device, Kernel, Problem, choose, cost, estimate, schedules
from .layouts import KERNEL_TENSOR_NAMES, KernelWeight, to_kernel
from .packed import PackedWeight
from .remembered import best_plan, remember

_COLD_BYTES = 300 << 20  # of weights that are gone through, so that none is found in the L2
# A graph has launches for half a millisecond, so that its start does not count.
_GRAPH_US, _MIN_LAUNCHES, _MAX_LAUNCHES = 500.0, 10, 200
_ROUNDS = 7
# The model decides what is worth measuring: nothing that it takes for so much slower than its choice.
_WORTH_MEASURING = 2.0


def measure(form: KernelWeight, x: Tensor, configs: Mapping[int, Sequence[Config]]) -> Iterator[tuple[int, Config]]:
    """Times configurations of the kernels on cold weights, inside CUDA graphs of back-to-back launches.

    The graphs for one number of tokens take turns, so that clocks are the same for all.

    Args:
        form: the weight, on a CUDA device.
        x: inputs [M, K] there, as many as the largest number of tokens.
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
    if x.is_cuda:  # as in to_kernel: what wrote the weights must have ended
        torch.cuda.synchronize(x.device)
    for tokens, candidates in configs.items():
        expected: Tensor | None = None
        plans = [f"*:{config.step}" for config in candidates]
        for config, its_plan in zip(candidates, plans, strict=True):
            y = runtime.multiply(form, x[:tokens], its_plan).float()
            expected = y if expected is None else expected
            error, allowed = float((y - expected).norm()), 4 * torch.finfo(x.dtype).eps * float(expected.norm())
            if not error <= allowed:  # a NaN is not either
                raise RuntimeError(
                    f"{config.step} and {candidates[0].step} disagree for {tokens} tokens: the results differ by "
                    f"{error:.3g} in the 2-norm, rounding allows {allowed:.3g}"
                )
        for config, us in zip(candidates, _microseconds(copies, x[:tokens], plans), strict=True):
            yield tokens, replace(config, microseconds=us)


def _microseconds(copies: Sequence[KernelWeight], x: Tensor, plans: Sequence[str]) -> list[float]:
    """Of a launch, for each plan: medians of some rounds, in which each plan's graph runs once."""
    if not plans:
        return []
    with torch.cuda.device(x.device):  # a graph and its events belong to the current one
        launches = max(len(copies), _MIN_LAUNCHES)
        first = _replay([_capture(copies, x, plans[0], launches)])[0] / launches
        launches = max(launches, min(_MAX_LAUNCHES, ceil(_GRAPH_US / first)))
        graphs = [_capture(copies, x, p, launches) for p in plans]
        rounds = [_replay(graphs) for _ in range(_ROUNDS)]
    return [median(times) / launches for times in zip(*rounds, strict=True)]


def _capture(copies: Sequence[KernelWeight], x: Tensor, plan: str, launches: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            runtime.multiply(copies[i % len(copies)], x, plan)
    return graph


def _replay(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
    events[0].record()
    for graph, end in zip(graphs, events[1:], strict=True):
        graph.replay()
        end.record()
    events[-1].synchronize()
    return [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairwise(events)]


def candidates(
    problem: Problem, device: Device, kernels: Sequence[Kernel], worth: float = _WORTH_MEASURING
) -> list[Config]:
    """What may be the fastest by the cost model's times: up to ``worth`` times its choice's, fastest first."""
    choice = choose(problem, device, kernels)
    if choice is None:
        return []
    every = [
        replace(c, microseconds=estimate(problem, device, kernel, c))
        for kernel in kernels
        for c in schedules(problem, device, kernel)
    ]
    every.sort(key=lambda c: (c.microseconds, c.kernel, c.blocks, c.split))
    return [c for c in every if c.microseconds <= worth * choice.microseconds]


def tune(
    packed: PackedWeight, dtype: torch.dtype, tokens: Iterable[int] = PLAN_TOKENS, progress: bool = False
) -> dict[int, list[Config]]:
    """Measures the kernels for a layer on its GPU and remembers the best ones in the user's cache.

    Layers of this shape, scheme and dtype that are prepared later take them, in this process and in others of the user,
    on GPUs of this name; those that are prepared already keep their plan until :meth:`CompressedLinear.restore`. What
    was measured is remembered after each number of tokens, so that an interruption loses none of it.

    Args:
        packed: a weight on a CUDA device; its numbers do not matter, its shape and scheme do.
        dtype: of the inputs.
        tokens: the numbers of tokens to measure. The plan for others stays what it was; each number also serves those
            between it and the next smaller one of :data:`~sparse_marlin.dispatch.PLAN_TOKENS`.
        progress: show a progress bar.

    Returns:
        For each number of tokens, ascending, what was measured, the choice first (see :func:`.dispatch.cost`).

    Raises:
        ValueError: for no number of tokens, or one that is not positive.
        RuntimeError: if no kernel can run the layer, or one computes something else than the others.
        OSError: if the cache cannot be written.
    """
    wanted = sorted(set(tokens))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"tokens must be positive numbers, got {wanted}")
    if reason := runtime.why_no_kernel(packed, dtype):
        raise RuntimeError(f"cannot tune a {packed.scheme} weight: {reason}")
    table, device = runtime.kernels(packed.scheme, dtype), runtime.device_properties(packed.device.index)
    by_name = {kernel.name: kernel for kernel in table}
    n, k = packed.out_features, packed.in_features
    layer = n, k, packed.scheme, dtype, device, table
    problems = {m: Problem(m, n, k, packed.scheme, dtype) for m in wanted}
    configs = {m: candidates(problem, device, table) for m, problem in problems.items()}
    before = best_plan(*layer)
    if before is None or not all(configs.values()):
        raise RuntimeError(f"no kernel can run this layer on {device.name}")
    random = torch.Generator(packed.device).manual_seed(0)
    x = torch.randn(wanted[-1], k, dtype=dtype, generator=random, device=packed.device)
    found: dict[int, list[Config]] = {m: [] for m in wanted}
    count = sum(map(len, configs.values()))
    with tqdm(total=count, desc=f"{n}x{k}", unit="kernel", disable=not progress) as bar:
        for m, config in measure(to_kernel(packed, dtype), x, configs):
            found[m].append(config)
            bar.update()
            if len(found[m]) == len(configs[m]):
                found[m].sort(key=lambda c: cost(problems[m], device, by_name[c.kernel], c))
                remember(layer, {m: found[m][0]}, before)
    return found
