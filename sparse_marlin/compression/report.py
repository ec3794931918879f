"""What became of every layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
        bits_per_weight: stored bits per dense weight, scales and adapter included.
        damping: fraction of its mean that was added to the Hessian's diagonal.
        rows: calibration inputs that the layer saw.
        adapter_rank: rank of the adapter, 0 without one.
        adapter_bits_per_weight: the adapter's part of ``bits_per_weight``.
        permuted: whether its columns were put into another order, see :mod:`~sparse_marlin.compression.permutation`.
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
    adapter_rank: int = 0
    adapter_bits_per_weight: float = 0.0
    permuted: bool = False

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> LayerReport:
        return cls(**{**d, "shape": tuple(d["shape"])})


@dataclass(frozen=True)
class Mix:
    """A model whose most sensitive layers are dense, and the others 2:4.

    Attributes:
        dense_layers: how many layers are dense.
        bits_per_weight: stored bits per weight of all compressed layers, scales included.
        model_bytes: of the whole model: the compressed layers as they are stored, all else as it is in memory.
        loss_increase: predicted increase of the loss, in nats per token.
        step_us: predicted microseconds that the compressed layers take for one decoding step on a recorded GPU, by the
            number of sequences.
    """

    dense_layers: int
    bits_per_weight: float
    model_bytes: int
    loss_increase: float
    step_us: dict[int, float]


@dataclass(frozen=True)
class Sensitivity:
    """Layers that have one structure together, and the loss that each structure should cost.

    Attributes:
        layers: names.
        sparse: expected increase of the loss if they alone become 2:4, in nats per token.
        dense: the same if they become dense.
    """

    layers: tuple[str, ...]
    sparse: float
    dense: float


@dataclass(frozen=True)
class Structure:
    """How ``sparsity="auto"`` chose which layers are dense, and what came of it.

    Attributes:
        target: ``target_bits`` or ``max_loss_increase``.
        wanted: its value.
        bits_per_weight: what was reached.
        loss_increase: what was measured on the compressed model, in nats per token.
        original_loss: mean next-token loss of the original model on the same windows, in nats per token.
        dense: the layers that are dense; all other compressed layers are 2:4.
        device: the GPU that times are predicted for.
        sensitivities: all layers, the first to become dense first.
        curve: mixes from all 2:4 to all dense.
        measured: number of dense layers and measured increase of the loss of every compression that was tried.
    """

    target: str
    wanted: float
    bits_per_weight: float
    loss_increase: float
    original_loss: float
    dense: tuple[str, ...]
    device: str
    sensitivities: tuple[Sensitivity, ...]
    curve: tuple[Mix, ...]
    measured: tuple[tuple[int, float], ...]

    def table(self) -> Table:
        """The curve for a rich console, with what was chosen."""
        table = curve_table(self.curve, self.device)
        table.caption = (
            f"{self.target}={self.wanted:g}: {len(self.dense)} layers dense, {self.bits_per_weight:.3f} bits per weight"
            f", loss {self.loss_increase:+.4f} nats per token (measured; original {self.original_loss:.4f})"
        )
        return table


def curve_table(curve: Sequence[Mix], device: str) -> Table:
    table = Table(title=f"from all layers 2:4 to all dense; a decoding step's compressed layers on an {device}")
    for title in (
        "dense layers",
        "bits/weight",
        "model MB",
        "loss increase",
        *(f"us, batch {b}" for b in curve[0].step_us),
    ):
        table.add_column(title, justify="right")
    for mix in curve:
        times = (f"{us:.1f}" for us in mix.step_us.values())
        row = (f"{mix.bits_per_weight:.3f}", f"{mix.model_bytes / 1e6:.1f}", f"{mix.loss_increase:+.4f}")
        table.add_row(str(mix.dense_layers), *row, *times)
    return table


@dataclass
class Report:
    """Every weight matrix of a model in order, how it was compressed or why it was not; prints as a table."""

    layers: list[LayerReport] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    structure: Structure | None = None  # of sparsity="auto"

    @property
    def compressed(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.status == "compressed"]

    @property
    def bits_per_weight(self) -> float:
        """Average over the weights of the compressed layers."""
        return self._average([layer.bits_per_weight or 0.0 for layer in self.compressed])

    @property
    def adapter_cost(self) -> float:
        """Bytes of the adapters, in units of the compressed weights without them."""
        adapters = self._average([layer.adapter_bits_per_weight for layer in self.compressed])
        return adapters / (self.bits_per_weight - adapters)

    def _average(self, bits: list[float]) -> float:
        sizes = [layer.shape[0] * layer.shape[1] for layer in self.compressed]
        return sum(n * b for n, b in zip(sizes, bits, strict=True)) / sum(sizes) if sizes else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        structure = {} if self.structure is None else {"structure": asdict(self.structure)}
        return {"settings": self.settings, "layers": [asdict(layer) for layer in self.layers], **structure}

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The report for a rich console."""
        cost = self.adapter_cost
        caption = (
            f"adapters add {cost:.0%} to the bytes of the compressed weights: where memory is the limit, as in "
            f"decoding, a layer takes about {1 + cost:.2f} times as long, and the time of two or three small launches"
        )
        table = Table(
            title=f"{len(self.compressed)} of {len(self.layers)} layers compressed",
            caption=caption if cost > 0 else None,
        )
        for title in ("layer", "shape", "scheme", "method", "error before", "after", "bits/weight", "note"):
            table.add_column(title, justify="right" if title in ("error before", "after", "bits/weight") else "left")
        for layer in self.layers:
            table.add_row(
                layer.name,
                "×".join(map(str, layer.shape)),
                (layer.scheme or layer.kind) + (f" + rank {layer.adapter_rank}" if layer.adapter_rank else ""),
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
