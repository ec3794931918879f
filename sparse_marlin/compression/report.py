"""What became of every layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerReport:
    """One module that holds a weight matrix.

    Attributes:
        name: dotted module name.
        kind: class name of the module.
        shape: shape of its weight.
        status: ``compressed``, ``pruned`` (by a prune-only method) or ``skipped``.
        note: why it was skipped, or what was out of the ordinary.
        scheme: how it is stored.
        method: how it was compressed; ``+refit`` where it was trained afterwards.
        error_before: relative output error that magnitude pruning and rounding to nearest would have made.
        error_after: relative output error that was made. Both in the 2-norm over the calibration inputs: for
            ``one-shot`` against the layer's output in the original model, otherwise against the original layer's output
            for the same inputs; without calibration inputs the relative error of the weight. A refit lowers the error
            of what its block leads to, for which that of a single layer may rise.
        bits_per_weight: stored bits per dense weight, scales included.
        damping: fraction of its mean that was added to the Hessian's diagonal.
        rows: calibration inputs that the layer saw.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    status: Literal["compressed", "pruned", "skipped"]
    note: str = ""
    scheme: str = ""
    method: str = ""
    error_before: float | None = None
    error_after: float | None = None
    bits_per_weight: float | None = None
    damping: float | None = None
    rows: int = 0

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> LayerReport:
        return cls(**{**d, "shape": tuple(d["shape"])})


@dataclass
class Report:
    """Every weight matrix of a model in order, how it was compressed or why it was not; prints as a table."""

    layers: list[LayerReport] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def compressed(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.status == "compressed"]

    @property
    def bits_per_weight(self) -> float:
        """Average over the weights of the compressed layers."""
        sizes = [(layer.shape[0] * layer.shape[1], layer.bits_per_weight or 0.0) for layer in self.compressed]
        total = sum(n for n, _ in sizes)
        return sum(n * b for n, b in sizes) / total if total else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"settings": self.settings, "layers": [asdict(layer) for layer in self.layers]}

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The report for a rich console."""
        table = Table(title=f"{len(self.compressed)} of {len(self.layers)} layers compressed")
        for title in ("layer", "shape", "scheme", "method", "error before", "after", "bits/weight", "note"):
            table.add_column(title, justify="right" if title in ("error before", "after", "bits/weight") else "left")
        for layer in self.layers:
            table.add_row(
                layer.name,
                "×".join(map(str, layer.shape)),
                layer.scheme or layer.kind,
                layer.method or layer.status,
                _number(layer.error_before),
                _number(layer.error_after),
                _number(layer.bits_per_weight),
                layer.note,
            )
        return table

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3f}"
