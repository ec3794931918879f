"""The plans that were found by measuring, in the user's cache: by GPU, shape, scheme and kernels."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path

import torch

from .dispatch import PLAN_TOKENS, Config, Device, Kernel, choice_of, parse_plan, plan, plan_text
from .samples import cache_directory
from .scheme import Scheme

Layer = tuple[int, int, Scheme, torch.dtype, Device, Sequence[Kernel]]


def tuned_plan(
    N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]
) -> str | None:
    """The plan that :func:`sparse_marlin.tuning.tune` found for this shape on this GPU, or None."""
    found = _remembered().get(_key(N, K, scheme, dtype, device, kernels))
    if found is None:
        return None
    try:
        steps = parse_plan(found)
    except ValueError:
        return None
    return found if {c.kernel for c in steps.values()} <= {k.name for k in kernels} else None


def best_plan(
    N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]
) -> str | None:
    """The plan for a layer: what was measured, else what the cost model expects; None if no kernel can run it."""
    layer = N, K, scheme, dtype, device, kernels
    return tuned_plan(*layer) or plan(*layer)


def tuned_file() -> Path:
    """Where the plans are kept; deleting it forgets them."""
    return cache_directory() / "tuned.json"


def _key(N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]) -> str:
    # Other kernels, after an update, make what was measured worthless.
    table = hashlib.sha256(repr(tuple(kernels)).encode()).hexdigest()[:12]
    return f"{device.name}, {device.multiprocessors} SMs, {N}x{K}, {scheme}, {str(dtype)[6:]}, kernels {table}"


@cache
def _remembered() -> dict[str, str]:
    try:
        plans = json.loads(tuned_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in plans.items() if isinstance(v, str)} if isinstance(plans, dict) else {}


def remember(layer: Layer, chosen: Mapping[int, Config], otherwise: str) -> None:
    """Puts choices into the remembered plan for a layer; for other numbers of tokens it stays, or is ``otherwise``."""
    file = tuned_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that tune at once, neither loses what it found
        _remembered.cache_clear()
        steps = parse_plan(tuned_plan(*layer) or otherwise)
        limits = {*PLAN_TOKENS, *chosen, *(int(limit) for limit in steps if isfinite(limit))}
        merged = {m: chosen.get(m) or choice_of(steps, m) for m in sorted(limits)}
        plans = _remembered() | {_key(*layer): plan_text(merged)}
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    _remembered.cache_clear()
