"""Which layers of a model are compressed, which are not and why, and what memory that needs."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..linear import Adapter, CompressedLinear
from ..scheme import AdapterScheme, Scheme, Sparsity
from .adapters import adapter_scheme
from .report import LayerReport
from .solve import why_no_weight


@dataclass(frozen=True)
class Target:
    """A Linear that will be compressed."""

    name: str  # within the model
    scheme: Scheme
    note: str = ""
    adapter: AdapterScheme | None = None


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's decoder blocks: the ModuleList whose Linears hold the most weights.

    Raises:
        ValueError: if no ModuleList holds a Linear.
    """
    best, size = None, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            linears = [m for m in module.modules() if isinstance(m, (nn.Linear, CompressedLinear))]
            weights = sum(m.in_features * m.out_features for m in linears)
            if weights > size:  # a list inside a block holds fewer than the list of blocks around it
                best, size = (name, module), weights
    if best is None:
        held = {type(m).__name__ for _, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
        raise ValueError(
            f"{type(model).__name__} has no decoder blocks: no ModuleList in it holds an nn.Linear. Its weights are in "
            f"{', '.join(sorted(held)) or 'no module at all'}; use sparse_marlin.compress on single nn.Linear layers"
        )
    return best


def patterns(option: str, value: str | Sequence[str]) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{option}= takes names or shell patterns of layers, got {value!r}")
    return list(patterns)


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, "*." + p) for p in patterns)


def choose_targets(
    model: nn.Module,
    prefix: str,
    skip: list[str],
    only: list[str],
    scheme: Scheme,
    dtype: torch.dtype | None,
    adapter_rank: int | float = 0,
    adapter_bits: int = 16,
    sparsities: Mapping[str, Sparsity | None] | None = None,
) -> tuple[list[Target], list[LayerReport]]:
    """Targets in order, and a report line for every other module with a weight matrix; raises before any work.

    ``sparsities``, if given, has the name of every target, and goes before that of ``scheme``.
    """
    adapters = {id(part) for m in model.modules() if isinstance(m, Adapter) for part in m.modules()}
    holders = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if any(p.dim() >= 2 for p in module.parameters(recurse=False)) and id(module) not in adapters
    }
    for option, patterns in (("skip", skip), ("only", only)):
        for p in patterns:
            if not any(matches(name, [p]) for name in holders):
                tails = {".".join(name.split(".")[i:]) for name in holders for i in range(name.count(".") + 1)}
                near = difflib.get_close_matches(p, sorted(tails), n=4, cutoff=0.4)
                raise ValueError(f"{option}={p!r} matches no layer; near matches: {', '.join(near) or 'none'}")
    uses: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for _, p in module.named_parameters(recurse=False):
            uses.setdefault(id(p), []).append(name)
    head = getattr(model, "get_output_embeddings", lambda: None)()

    targets, skipped, impossible = [], [], []
    for name, module in holders.items():
        inside = name.startswith(prefix + ".")
        shared = [n for n in uses[id(module.weight)] if n != name] if isinstance(module, nn.Linear) else []
        reason = ""
        if isinstance(module, CompressedLinear):
            reason = "already compressed"
        elif isinstance(module, nn.Embedding):
            reason = "embedding"
        elif module is head:
            reason = "output head, left out by default"
        elif type(module) is not nn.Linear:
            reason = f"a {type(module).__name__} is no nn.Linear"
        elif not inside:
            reason = "outside the decoder blocks"
        elif matches(name, skip):
            reason = "skip="
        elif only and not matches(name, only):
            reason = "not in only="
        elif shared:
            reason = f"weight tied to {shared[0]}"
        if reason:
            shape = next(tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() >= 2)
            skipped.append(LayerReport(name, type(module).__name__, shape, "skipped", reason))
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        sparsity = (sparsities or {}).get(name, scheme.sparsity)
        own = replace(scheme, sparsity=sparsity, dtype=dtype or scale_dtype(weight.dtype))
        fitted = own.fit(weight.shape[1])
        adapter = adapter_scheme(adapter_rank, adapter_bits, *weight.shape)
        why = why_no_weight(weight) or fitted.why_not(*weight.shape)
        if why := why or (adapter.why_not(*weight.shape) if adapter else None):
            impossible.append(f"{name}: {why}")
        note = "" if fitted == own else f"in_features {weight.shape[1]} is no multiple of {own.group_size}"
        targets.append(Target(name, fitted, note, adapter))
    if impossible:
        raise ValueError("cannot compress, use skip= to leave out:\n  " + "\n  ".join(impossible))
    if not targets:
        raise ValueError("skip= and only= leave no layer to compress")
    if sparsities is not None and (wrong := sorted({t.name for t in targets} ^ set(sparsities), key=str)):
        raise ValueError(
            "a mapping of sparsities needs exactly the names of the layers that are compressed; missing or unknown: "
            + ", ".join(map(str, wrong[:4]))
        )
    return targets, skipped


def scale_dtype(weight: torch.dtype) -> torch.dtype:
    """The precision that the scales of a weight get by default."""
    return torch.bfloat16 if weight == torch.bfloat16 else torch.float16


def memory_need(model: nn.Module, prefix: str, targets: list[Target], windows: list[Tensor], refit: int = 0) -> str:
    """What compression will hold at its peak, in words; a refit takes ``refit`` bytes."""
    gb = 1e-9
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    linears = [linear_at(model, t.name) for t in targets]
    widest = max(m.in_features for m in linears)
    # Linears of one module that share inputs, as far as sizes tell, are solved on top of each other.
    together: dict[tuple[str, int], int] = {}
    for t, m in zip(targets, linears, strict=True):
        key = (t.name.rpartition(".")[0], m.in_features)
        together[key] = together.get(key, 0) + m.weight.numel()
    largest = max(together.values())
    hidden = getattr(getattr(model, "config", None), "hidden_size", None) or widest
    tokens = sum(w.numel() for w in windows)
    # At most: Linears that share inputs count once.
    per_block = sum(m.in_features for m in linears) // blocks_of(prefix, targets)
    activations = tokens * (3 * hidden + per_block) * next(model.parameters()).element_size()
    solver = 4 * (7 * widest * widest + 9 * largest)
    adapters = sum(
        t.adapter.bits_per_weight(m.out_features, m.in_features, m.weight.dtype) * m.weight.numel() / 8
        for t, m in zip(targets, linears, strict=True)
        if t.adapter
    )
    if adapters:  # the errors of the widest stage, and the eigenvectors of one
        solver += 4 * (3 * widest * widest + 4 * largest)
    parts = {
        "model": weights,
        "adapters": adapters,
        f"activations of {tokens} tokens": activations,
        "Hessians and solver": solver,
        "refit": refit,
    }
    listed = " + ".join(f"{name} {size * gb:.2f}" for name, size in parts.items() if size)
    return f"memory needed: {sum(parts.values()) * gb:.2f} GB = {listed}"


def blocks_of(prefix: str, targets: list[Target]) -> int:
    """In how many blocks the targets are."""
    return len({t.name.removeprefix(prefix).split(".")[1] for t in targets})


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear
