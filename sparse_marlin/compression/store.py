"""Finished blocks on disk, so that an interrupted run continues where it was."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..linear import Adapter
from ..packed import TENSOR_NAMES, PackedWeight
from ..scheme import AdapterScheme, Scheme
from .report import LayerReport
from .targets import Target

_FORMAT = 3  # also another one where the solver has changed: a run goes on with the one it began with


@dataclass(frozen=True)
class Result:
    """A finished layer: its compressed weight and adapter, or its pruned weight after a prune-only method.

    ``latent`` [N, K] is what was rounded to the weight's integers, where a refit will go on from there; not stored.
    """

    report: LayerReport
    packed: PackedWeight | None
    pruned: Tensor | None
    adapter: Adapter | None = None
    latent: Tensor | None = None


class Store:
    """Finished blocks in a directory: one safetensors file each, and a manifest that says what they belong to."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        model: nn.Module,
        targets: list[Target],
        windows: list[Tensor],
    ) -> None:
        self.path = path
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for t in targets:
            digest.update(json.dumps([t.name, t.scheme.to_dict()]).encode())
        for name, p in model.state_dict().items():
            digest.update(f"{name} {p.dtype} {zlib.crc32(_bytes(p))}".encode())
        for w in windows:
            digest.update(_bytes(w))
        manifest = {"format": _FORMAT, "fingerprint": digest.hexdigest(), "settings": settings}
        file = path / "manifest.json"
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as e:
                raise ValueError(f"{file} is damaged ({e}): delete {path} and start again") from e
            if not isinstance(found, dict):
                raise ValueError(f"{file} is no manifest of a run: delete {path} and start again")
            if found != manifest:
                raise ValueError(
                    f"{path} holds blocks of another run (other model, settings or calibration data): "
                    f"found {found.get('settings')}, now {settings}; use another checkpoint_dir, or delete it"
                )
        elif path.exists() and any(path.iterdir()):
            raise ValueError(f"checkpoint_dir {path} is neither empty nor the checkpoint of a run")
        else:
            path.mkdir(parents=True, exist_ok=True)
            write(file, lambda f: f.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8"))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def save(self, index: int, results: list[Result]) -> None:
        tensors: dict[str, Tensor] = {}
        layers = []
        for r in results:
            parts = {"weight": r.pruned} if r.packed is None else r.packed.tensors()
            if r.adapter is not None:
                parts |= {f"adapter.{name}": t for name, t in r.adapter.state_dict().items()}
            for name, t in parts.items():
                assert t is not None
                tensors[f"{r.report.name}.{name}"] = t.cpu().contiguous()
            scheme = None if r.packed is None else r.packed.scheme.to_dict()
            adapter = None if r.adapter is None else r.adapter.scheme.to_dict()
            layers.append({"report": asdict(r.report), "scheme": scheme, "adapter": adapter})
        metadata = {"layers": json.dumps(layers)}
        write(self._file(index), lambda f: save_file(tensors, f, metadata))

    def load(self, index: int) -> list[Result] | None:
        return _load(self._file(index), _read)

    def _orders_file(self, index: int) -> Path:
        return self.path / f"permutation-{index:05d}.safetensors"

    def save_orders(self, index: int, orders: dict[str, Tensor], notes: dict[str, str]) -> None:
        """Keeps the orders [heads, width] of channels of a block's layers, and why others have none."""
        tensors = {name: order.to("cpu", torch.int32).contiguous() for name, order in orders.items()}
        write(self._orders_file(index), lambda f: save_file(tensors, f, {"notes": json.dumps(notes)}))

    def load_orders(self, index: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        return _load(self._orders_file(index), _read_orders)


T = TypeVar("T")


def _load(file: Path, read: Callable[[Path], T]) -> T | None:
    """What a block's file holds; None if there is none."""
    if not file.exists():
        return None
    try:
        return read(file)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{file} is damaged ({e}): delete it, and its block is computed again") from e


def _read(file: Path) -> list[Result]:
    results = []
    with safe_open(file, "pt") as f:
        for layer in json.loads(f.metadata()["layers"]):
            report = LayerReport.from_dict(layer["report"])
            prefix = report.name + "."
            tensors = {k.removeprefix(prefix): f.get_tensor(k) for k in f.keys() if k.startswith(prefix)}  # noqa: SIM118
            if layer["scheme"] is None:
                results.append(Result(report, None, tensors["weight"]))
            else:
                scheme = Scheme.from_dict(layer["scheme"])
                parts = {n: tensors[n] for n in TENSOR_NAMES if n in tensors}
                packed = PackedWeight.from_tensors(parts, scheme, report.shape[1])
                adapter = None
                if layer["adapter"] is not None:
                    own = AdapterScheme.from_dict(layer["adapter"])
                    adapter = Adapter.empty(packed.in_features, packed.out_features, own, scheme.dtype)
                    parts = {n.removeprefix("adapter."): t for n, t in tensors.items() if n.startswith("adapter.")}
                    adapter.load_state_dict(parts, assign=True)
                results.append(Result(report, packed, None, adapter))
    return results


def _read_orders(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(file, "pt") as f:
        notes = json.loads(f.metadata()["notes"])
        orders = {name: f.get_tensor(name).long() for name in f.keys()}  # noqa: SIM118
    for name, order in orders.items():
        if not torch.equal(order.sort(1).values, torch.arange(order.shape[1]).expand_as(order)):
            raise ValueError(f"{name} has no order of channels")
    return orders, dict(notes)


def _bytes(t: Tensor) -> memoryview:
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data


def write(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that it is there whole or not at all."""
    part = file.with_name(file.name + ".part")
    write(part)
    os.replace(part, file)
