"""Solves the Linears of a block, stage after stage: those that are fed the same tensor together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..packed import PackedWeight
from ..scheme import Scheme
from .adapters import compress_with_adapters
from .blocks import Recorded
from .moments import Collected, Moments, corrected_target
from .report import LayerReport
from .solve import PRUNE_ONLY, UNCALIBRATED, compress_weight, default_method, output_error
from .store import Result
from .targets import Target, linear_at


def split_stages(targets: list[Target], inputs: Recorded) -> list[list[Target]]:
    """Targets in the order in which they are called, those that share an input (and their namesakes) together.

    Later stages are calibrated on what the compressed earlier ones put out. All experts' matrices of one kind are one
    stage, so that there are as many stages as a block is deep.
    """
    stages: list[set[str]] = []  # last parts of names
    for batch in inputs:
        for _, names in batch:
            leaves = {name.rpartition(".")[2] for name in names}
            together = [s for s in stages if s & leaves]
            if together:
                together[0].update(leaves, *together[1:])
                stages = [s for s in stages if s not in together[1:]]
            else:
                stages.append(leaves)
    leaf = {t.name: t.name.rpartition(".")[2] for t in targets}
    known = set().union(*stages)
    groups = [[t for t in targets if leaf[t.name] in stage] for stage in stages]
    rest = [t for t in targets if leaf[t.name] not in known]  # what no batch reached
    return [*groups, rest] if rest else groups


def solve_stage(
    model: nn.Module, targets: list[Target], collected: Collected, method: str, damping: float, keep_latent: bool
) -> list[Result]:
    """Solves layers that share inputs and scheme together, as one tall matrix: rows do not influence each other."""
    together: dict[Any, list[Target]] = {}
    for t in targets:
        alone = collected.of(t.name) is None
        together.setdefault(t.name if alone else (collected.keys(t.name), t.scheme), []).append(t)
    results: dict[str, Result] = {}
    for group in together.values():
        moments = collected.of(group[0].name)
        hessian = None if moments is None else moments.hessian.matrix
        scheme = group[0].scheme
        weights = [linear_at(model, t.name).weight.detach().float() for t in group]
        own = method if moments is not None or method in UNCALIBRATED else _uncalibrated(method, scheme)
        target = torch.cat(weights)
        if moments is not None:
            target = corrected_target(target, moments)
        rows_of = [(w.shape[0], t.adapter) for t, w in zip(group, weights, strict=True)]
        solution, adapters = compress_with_adapters(target, hessian, scheme, own, damping, rows_of)
        row = 0
        for t, w, adapter in zip(group, weights, adapters, strict=True):
            rows = slice(row, row + w.shape[0])
            row += w.shape[0]
            approximation = solution.weight[rows]
            if adapter is not None:
                approximation = approximation + adapter.dequantize()
            extra = 0.0 if t.adapter is None else t.adapter.bits_per_weight(w.shape[0], w.shape[1], scheme.dtype)
            packed = None
            if solution.packed is not None:
                tensors = {n: v[rows].contiguous() for n, v in solution.packed.tensors().items()}
                packed = PackedWeight.from_tensors(tensors, scheme, w.shape[1])
            notes = [t.note, collected.broken.get(t.name, "")]
            if moments is None and t.name not in collected.broken:
                notes.append("saw no calibration input: rounded to nearest")
            if moments is None and adapter is not None:
                notes.append("adapter fitted to the weight alone")
            report = LayerReport(
                name=t.name,
                kind="Linear",
                shape=tuple(w.shape),
                status="pruned" if packed is None else "compressed",
                note="; ".join(filter(None, notes)),
                scheme=str(scheme),
                method=own,
                error_before=_error(w, _baseline(w, scheme), moments),
                error_after=_error(w, approximation, moments),
                bits_per_weight=None if packed is None else scheme.bits_per_weight(w.shape[1]) + extra,
                damping=solution.damping,
                rows=0 if moments is None else moments.hessian.rows,
                adapter_rank=0 if t.adapter is None else t.adapter.rank,
                adapter_bits_per_weight=extra,
            )
            latent = solution.latent[rows] if keep_latent and solution.latent is not None else None
            results[t.name] = Result(report, packed, solution.weight[rows] if packed is None else None, adapter, latent)
    return [results[t.name] for t in targets]


def _error(weight: Tensor, approximation: Tensor, moments: Moments | None) -> float:
    return output_error(weight, approximation, None) if moments is None else moments.error(weight, approximation)


def with_error(result: Result, linear: nn.Linear, collected: Collected) -> Result:
    """With the error of the final weight, for the inputs that the layer has in the finished block."""
    assert result.packed is not None
    own = result.packed.dequantize(torch.float32)
    if result.adapter is not None:
        own += result.adapter.dequantize()
    error = _error(linear.weight.detach().float(), own, collected.of(result.report.name))
    return replace(result, report=replace(result.report, error_after=error), latent=None)


def _uncalibrated(method: str, scheme: Scheme) -> str:
    """What stands in for ``method`` where a layer has no Hessian."""
    return "magnitude" if method in PRUNE_ONLY else default_method(scheme.sparsity, calibrated=False)


def _baseline(w: Tensor, scheme: Scheme) -> Tensor:
    """Magnitude pruning and rounding to nearest: what the report compares with."""
    return compress_weight(w, None, scheme, default_method(scheme.sparsity, calibrated=False)).weight
