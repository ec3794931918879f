"""``sparsity="auto"``: the layers that 2:4 hurts most stay dense, so that a size or a loss is met.

Layers that are fed the very same tensor within one module (q, k and v; gate and up) get one structure, since engines
fuse them. Sets of layers are ordered by the loss that being dense saves (which :mod:`.sensitivity` estimates) per bit
that it costs, and dense ones are taken from the start of that order: a knapsack by ratio. The estimates rank the sets.
How they add up is measured: on mixes of the solved layers along the order, which make the curve, and on what is
compressed in the end, whose ratio to the curve corrects it: a layer that is compressed in its place also makes up for
the layers before it.

``target_bits`` takes one compression after that. ``max_loss_increase`` compresses, measures the loss on the held-out
windows and chooses again, by the measured ratio to the curve, until it is met within 5 % or no set of layers lies in
between: :data:`MAX_RUNS` compressions at most. The rest, solving both structures and some passes over a quarter of the
windows, costs about as much as one more.

The last quarter of the calibration windows is held out: nothing is calibrated on it, and all losses are means over the
tokens that it predicts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..dispatch import RECORDED, recorded_us
from ..linear import CompressedLinear
from ..quantization import note_in_config
from ..scheme import Scheme
from . import refit as refitting
from .calibration import calibration_windows
from .hessian import NonFiniteError
from .permutation import Permuted, annotated, permute_channels
from .report import Mix, Report, Sensitivity, Structure, curve_table
from .sensitivity import Probe, Variants, estimate, solve_both
from .solve import METHODS_24, METHODS_DENSE
from .store import Store, write
from .targets import Target, choose_targets, decoder_blocks, linear_at, memory_need, patterns

MAX_RUNS = 5
TOLERANCE = 0.05  # of the target
HELD_OUT = 4  # one window of so many
_POINTS = 9  # of the curve, and one mix in two of them is measured
_BATCHES = (1, 16)  # sequences of a decoding step
_GPU = "h200"

log = logging.getLogger("sparse_marlin")


def patch_auto(
    compress: Callable[..., Report],
    model: nn.Module,
    bits: int,
    group_size: int,
    *,
    target_bits: float | None,
    max_loss_increase: float | None,
    calibration: Any,
    tokenizer: Any,
    method: str,
    skip: str | Sequence[str],
    only: str | Sequence[str],
    dtype: torch.dtype | None,
    damping: float,
    num_samples: int,
    sequence_length: int,
    seed: int,
    device: torch.device | str | None,
    checkpoint_dir: str | Path | None,
    progress: bool,
    on_nonfinite: str,
    refit: bool,
    permute: bool,
) -> Report:
    """:func:`~sparse_marlin.compression.pipeline.patch_model` with ``sparsity="auto"``, which documents the arguments.

    It is also what compresses here, as ``compress``, with a structure for every layer.

    A ``checkpoint_dir`` also keeps the solved layers, their sensitivities and every compression that is tried; another
    target reuses the former.

    Raises:
        ValueError: for what patch_model refuses, and unless exactly one target is given and can be met; before any
            work. That not even dense layers keep ``max_loss_increase`` is only known at the end: all are dense then, a
            warning says so, and the report has what was reached.
        NonFiniteError: if the original model's own loss on the held-out windows is not finite.
    """
    check_settings(method, target_bits, max_loss_increase)
    prefix, blocks = decoder_blocks(model)
    if any(isinstance(m, CompressedLinear) for m in blocks.modules()):
        raise ValueError("sparsity='auto' needs a model of which nothing is compressed yet: it compares with that one")
    scheme = Scheme(bits, group_size, "2:4", dtype=dtype or torch.float16)
    sparse, _ = choose_targets(model, prefix, patterns("skip", skip), patterns("only", only), scheme, dtype)
    sizes = Sizes(model, sparse)
    if target_bits is not None:
        sizes.check(target_bits)
    windows = calibration_windows(
        model, calibration, tokenizer, num_samples, sequence_length, seed, progress, hold_out=HELD_OUT
    )
    calibrating, held_out = hold_out(windows)
    if progress:
        setting = refitting.SETTING
        refit_bytes = refitting.memory_need(model, prefix, sparse, calibrating, setting) if refit else 0
        print(_memory_need(model, prefix, sizes, calibrating, held_out, refit_bytes), file=sys.stderr)

    settings = {"method": "one-shot", "damping": damping, "on_nonfinite": on_nonfinite, "seed": seed}
    directory = None if checkpoint_dir is None else Path(checkpoint_dir)
    store = None
    if directory is not None:
        store = Store(directory, {**settings, "sparsity": "auto", "permute": permute}, model, sparse, windows)
    stores: list[Store] = []
    permuted: Permuted = {}
    was_training = model.training
    model.eval()
    try:
        if permute:
            permuted = permute_channels(model, prefix, blocks, sparse, calibrating, store, device, progress)
        if directory is not None:  # after that, which changes the model's fingerprint
            stores = [
                Store(directory / name, settings, model, targets, calibrating)
                for name, targets in (("sparse24", sparse), ("dense", sizes.dense_targets))
            ]
        probe = Probe(model, prefix, blocks, held_out, device, progress)
        found = None if directory is None else _load(directory / "structure.json")
        if found is None:
            variants = solve_both(
                model,
                prefix,
                blocks,
                sparse,
                sizes.dense_targets,
                calibrating,
                damping,
                on_nonfinite,
                stores,
                device,
                progress,
            )
            found = measure(probe, variants, sizes, seed)
            if directory is not None:
                text = json.dumps(found.to_dict(), indent=1) + "\n"
                write(directory / "structure.json", lambda f: f.write_text(text, encoding="utf-8"))
            del variants
        curve = Curve(found, sizes)
        if progress:
            _print(
                curve.points(1.0), f"; original loss {found.loss:.4f}, increases before layers are fitted in sequence"
            )

        def attempt(dense: frozenset[str]) -> tuple[Report, float]:
            report = compress(
                model,
                {t.name: None if t.name in dense else "2:4" for t in sparse},
                bits,
                group_size,
                calibration=calibrating,
                skip=skip,
                only=only,
                dtype=dtype,
                damping=damping,
                seed=seed,
                device=device,
                checkpoint_dir=None if directory is None else directory / f"run-{_digest(dense, refit)}",
                progress=progress,
                on_nonfinite=on_nonfinite,
                refit=refit,
            )
            return report, probe.loss("measuring the loss") - found.loss

        if target_bits is not None:
            dense = curve.within(target_bits)
            report, increase = attempt(dense)
            measured = [(len(dense), increase)]
            ratio = increase / curve.increase_of(dense)
            target, wanted = "target_bits", target_bits
        else:
            assert max_loss_increase is not None
            report, runs = search(model, sparse, curve, max_loss_increase, attempt)
            dense, increase = curve.prefix(runs[-1][0]), runs[-1][1]
            measured = [(len(curve.prefix(n)), m) for n, m in runs]
            ratio = increase / curve.increase_of(dense)
            target, wanted = "max_loss_increase", max_loss_increase
    finally:
        model.train(was_training)
    report.structure = Structure(
        target=target,
        wanted=wanted,
        bits_per_weight=report.bits_per_weight,
        loss_increase=increase,
        original_loss=found.loss,
        dense=tuple(t.name for t in sparse if t.name in dense),
        device=RECORDED[_GPU].name,
        sensitivities=tuple(curve.groups),
        curve=curve.points(ratio if ratio > 0 else 1.0),
        measured=tuple(measured),
    )
    report.layers = annotated(report.layers, permuted)
    report.settings |= {"sparsity": "auto", "permute": permute, target: wanted, "held_out_windows": len(held_out)}
    return report


def check_settings(method: str, target_bits: float | None, max_loss_increase: float | None) -> None:
    """Raises ValueError unless the method goes with both structures, and there is one target."""
    both = [m for m in METHODS_24 if m in METHODS_DENSE]
    if method != "auto" and method not in both:
        raise ValueError(
            f"method must be one of auto, {', '.join(both)} for sparsity='auto', got {method!r}: others do not go with "
            "both 2:4 and dense layers"
        )
    if (target_bits is None) == (max_loss_increase is None):
        raise ValueError(
            "sparsity='auto' needs either target_bits (stored bits per weight) or max_loss_increase (nats per token), "
            f"got {'neither' if target_bits is None else 'both'}"
        )
    for name, value in (("target_bits", target_bits), ("max_loss_increase", max_loss_increase)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def hold_out(windows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The windows to calibrate on, and the last quarter of them, at least one, each by itself [1, T], to measure on.

    Raises:
        ValueError: if fewer than two can predict a token.
    """
    count = sum(len(w) for w in windows)
    held = max(1, count // HELD_OUT)
    rest, left = [], count - held  # of the rows, as many are calibrated on
    for w in windows:
        rest.append(w[:left])
        left -= len(rest[-1])
    # Copies, since no gradient passes by tensors that were made in inference mode.
    last = [row.clone().unsqueeze(0) for w, kept in zip(windows, rest, strict=True) for row in w[len(kept) :]]
    rest = [w for w in rest if len(w)]
    if not rest or all(row.shape[1] < 2 for row in last):
        raise ValueError(
            "sparsity='auto' calibrates on some windows and measures losses on others, the last quarter: "
            f"it needs at least 2 windows of at least 2 tokens, got {count} of up to {max(w.shape[1] for w in windows)}"
        )
    return rest, [row for row in last if row.shape[1] > 1]


class Sizes:
    """What the targets take in either structure."""

    def __init__(self, model: nn.Module, sparse: list[Target]) -> None:
        self.sparse_targets = sparse
        self.dense_targets = [replace(t, scheme=replace(t.scheme, sparsity=None)) for t in sparse]
        self.shapes = {t.name: tuple(linear_at(model, t.name).weight.shape) for t in sparse}
        self.weights = sum(n * k for n, k in self.shapes.values())
        self._sparse = {t.name: t.scheme for t in sparse}
        self._dense = {t.name: t.scheme for t in self.dense_targets}
        own = sum(linear_at(model, t.name).weight.nbytes for t in sparse)
        self._other_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - own

    def scheme(self, name: str, dense: bool) -> Scheme:
        return (self._dense if dense else self._sparse)[name]

    def bits(self, names: Sequence[str], dense: frozenset[str]) -> float:
        """Stored bits of layers, of which some are dense."""
        sizes = ((n, self.shapes[n], self.scheme(n, n in dense)) for n in names)
        return sum(rows * k * s.bits_per_weight(k) for _, (rows, k), s in sizes)

    def average(self, dense: frozenset[str]) -> float:
        """Stored bits per weight of all layers."""
        return self.bits(list(self.shapes), dense) / self.weights

    def check(self, target_bits: float) -> None:
        """Raises ValueError for a target that no mix of structures meets."""
        low, high = self.average(frozenset()), self.average(frozenset(self.shapes))
        if not low - 5e-4 <= target_bits <= high + 5e-4:  # as far as the message rounds
            raise ValueError(
                f"target_bits must be between {low:.3f} (all layers 2:4) and {high:.3f} (all dense) for this model, "
                f"got {target_bits}"
            )

    def mix(self, dense: frozenset[str], loss_increase: float) -> Mix:
        bits = self.bits(list(self.shapes), dense)
        step_us = {
            b: sum(recorded_us(b, rows, k, self.scheme(n, n in dense), _GPU) for n, (rows, k) in self.shapes.items())
            for b in _BATCHES
        }
        return Mix(len(dense), bits / self.weights, self._other_bytes + round(bits / 8), loss_increase, step_us)


def _memory_need(
    model: nn.Module, prefix: str, sizes: Sizes, calibrating: list[Tensor], held_out: list[Tensor], refit: int
) -> str:
    """What the choice holds at its peak, in words; the model is there to the end."""
    text = memory_need(model, prefix, sizes.sparse_targets, calibrating, refit)
    names = list(sizes.shapes)
    packed = (sizes.bits(names, frozenset()) + sizes.bits(names, frozenset(names))) / 8
    widest = max(k for _, k in sizes.shapes.values())
    hidden = getattr(getattr(model, "config", None), "hidden_size", None) or widest
    blocks = len(decoder_blocks(model)[1])
    between = (blocks + 2) * sum(w.numel() for w in held_out) * hidden * next(model.parameters()).element_size()
    return (
        f"{text}; and {(packed + between) / 1e9:.2f} on the CPU to choose structures = both of every layer "
        f"{packed / 1e9:.2f} + hidden states of {len(held_out)} held-out windows {between / 1e9:.2f}"
    )


@dataclass(frozen=True)
class Measured:
    """What is known of the original model.

    Attributes:
        loss: of the original model.
        groups: estimates for layers that share a structure, the first to become dense first.
        trials: number of groups that were dense, and by how much that mix of separately solved layers raised the loss.
    """

    loss: float
    groups: list[Sensitivity]
    trials: list[tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        groups = [{"layers": list(g.layers), "sparse": g.sparse, "dense": g.dense} for g in self.groups]
        return {"loss": self.loss, "groups": groups, "trials": [list(t) for t in self.trials]}


def _load(file: Path) -> Measured | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        groups = [Sensitivity(tuple(g["layers"]), float(g["sparse"]), float(g["dense"])) for g in found["groups"]]
        return Measured(float(found["loss"]), groups, [(int(n), float(x)) for n, x in found["trials"]])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{file} is damaged ({e}): delete it, and it is measured again") from e


def measure(probe: Probe, variants: Variants, sizes: Sizes, seed: int) -> Measured:
    """Estimates for every set of layers, in the order in which they become dense, and the losses of some mixes."""
    loss, groups = estimate(probe, variants, list(sizes.shapes), seed)
    order = {name: i for i, name in enumerate(sizes.shapes)}

    def worth(g: Sensitivity) -> tuple[float, int]:
        extra = sizes.bits(g.layers, frozenset(g.layers)) - sizes.bits(g.layers, frozenset())
        return -(g.sparse - g.dense) / extra, order[g.layers[0]]

    curve = Curve(Measured(loss, sorted(groups, key=worth), []), sizes)
    trials = []
    for n in curve.evenly(1 + _POINTS // 2):
        dense = curve.prefix(n)
        mixed = {name: pair[name in dense] for name, pair in variants.items()}
        increase = probe.loss(f"measuring {len(dense)} dense layers", mixed) - loss
        if math.isfinite(increase):
            trials.append((n, increase))
    if len(trials) < 2:
        raise NonFiniteError("the losses of compressed mixes on the held-out windows are not finite")
    return Measured(loss, curve.groups, trials)


class Curve:
    """Mixes, by the number n of sets of layers that are dense, in the order of their worth, and their losses."""

    def __init__(self, found: Measured, sizes: Sizes) -> None:
        self.groups, self.sizes = found.groups, sizes
        # Estimated loss of a mix beyond that of all dense; the few bits make it strictly decreasing.
        gains = [max(g.sparse - g.dense, 0.0) for g in self.groups]
        total = sum(gains) or 1.0
        weights = [len(g.layers) / len(sizes.shapes) for g in self.groups]
        self._rest = [sum(gains[n:]) / total + 1e-6 * sum(weights[n:]) for n in range(len(self.groups) + 1)]
        # Ascending by the estimate. A mix with fewer dense layers is taken to be no better.
        anchors = sorted((self._rest[n], x) for n, x in found.trials)
        self._x = [x for x, _ in anchors]
        self._y = [max(y for _, y in anchors[: i + 1]) for i in range(len(anchors))]

    def prefix(self, n: int) -> frozenset[str]:
        return frozenset(name for g in self.groups[:n] for name in g.layers)

    def at(self, n: int) -> float:
        """The increase of the loss, between those that were measured as the estimates say; more than 0."""
        return self._between(self._rest[n])

    def increase_of(self, dense: frozenset[str]) -> float:
        gains = [max(g.sparse - g.dense, 0.0) for g in self.groups]
        left = [x for g, x in zip(self.groups, gains, strict=True) if g.layers[0] not in dense]
        return self._between(sum(left) / (sum(gains) or 1.0))

    def _between(self, x: float) -> float:
        i = min(max(bisect_left(self._x, x), 1), len(self._x) - 1)
        (x0, y0), (x1, y1) = ((self._x[j], self._y[j]) for j in (i - 1, i))
        y = y0 + (y1 - y0) * min(max((x - x0) / (x1 - x0), 0.0), 1.0)
        return max(y, 1e-6)

    def evenly(self, count: int) -> list[int]:
        """Numbers of sets whose bits are spread evenly from all 2:4 to all dense."""
        bits = [self.sizes.average(self.prefix(n)) for n in range(len(self.groups) + 1)]
        wanted = [bits[0] + (bits[-1] - bits[0]) * i / (count - 1) for i in range(count)]
        return sorted({min(range(len(bits)), key=lambda n: (abs(bits[n] - w), n)) for w in wanted})

    def points(self, ratio: float) -> tuple[Mix, ...]:
        return tuple(self.sizes.mix(self.prefix(n), ratio * self.at(n)) for n in self.evenly(_POINTS))

    def within(self, target_bits: float) -> frozenset[str]:
        """The dense layers of the best mix of at most so many bits per weight: sets in order, as long as they fit."""
        dense: frozenset[str] = frozenset()
        for g in self.groups:
            if self.sizes.average(dense | set(g.layers)) <= target_bits + 1e-9:
                dense |= set(g.layers)
        return dense


def search(
    model: nn.Module,
    targets: list[Target],
    curve: Curve,
    wanted: float,
    attempt: Callable[[frozenset[str]], tuple[Report, float]],
) -> tuple[Report, list[tuple[int, float]]]:
    """Compresses until the loss grows by what is wanted, and leaves the best attempt in the model.

    Returns:
        Its report; numbers of dense sets and increases of all attempts, the best last.
    """
    originals = {t.name: _kept(linear_at(model, t.name)) for t in targets}
    best: tuple[Report, dict[str, nn.Module]] | None = None
    runs: list[tuple[int, float]] = []
    while len(runs) < MAX_RUNS and (n := _next(runs, curve, wanted)) is not None:
        if runs:
            for name, linear in originals.items():
                model.set_submodule(name, _kept(linear))
        report, increase = attempt(curve.prefix(n))
        if not math.isfinite(increase):
            increase = math.inf
        runs.append((n, increase))
        log.info("%d sets of layers dense: the loss grew by %.4f", n, increase)
        if best is None or _rank(runs[-1], wanted) < _rank(runs[-2], wanted):
            best = report, {name: model.get_submodule(name) for name in originals}
        else:
            runs[-2:] = runs[:-3:-1]  # the best stays last
    assert best is not None
    report, layers = best
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    note_in_config(model)
    if runs[-1][1] > (1 + TOLERANCE) * wanted:
        log.warning("max_loss_increase=%g is not kept: %.4f was reached", wanted, runs[-1][1])
    return report, runs


def _rank(found: tuple[int, float], wanted: float) -> tuple[bool, float]:
    """Less is better: few dense sets among those that keep the target, else a small increase."""
    n, increase = found
    return (False, n) if increase <= (1 + TOLERANCE) * wanted else (True, increase)


def _next(runs: list[tuple[int, float]], curve: Curve, wanted: float) -> int | None:
    """The number of dense sets to try next, or None if no other can be better."""
    if any(abs(increase - wanted) <= TOLERANCE * wanted for _, increase in runs):
        return None
    low = max((n for n, increase in runs if increase > wanted), default=-1)  # too few are dense
    high = min((n for n, increase in runs if increase <= wanted), default=len(curve.groups) + 1)
    between = range(low + 1, high)
    if not between:
        return None
    if len(runs) >= 3:  # the ratio is not what it takes: at least a quarter of what is left goes
        between = between[len(between) // 4 : len(between) - len(between) // 4]
    # Ratios of what was measured to the curve change slowly along it: the logarithm goes between the nearest two.
    known = sorted((n, math.log(max(increase, 1e-6) / curve.at(n))) for n, increase in runs if increase < math.inf)

    def ratio(n: int) -> float:
        if not known:
            return 0.0
        right = min(max(bisect_left(known, (n, -math.inf)), 1), len(known) - 1)
        (n0, r0), (n1, r1) = known[right - 1 if len(known) > 1 else 0], known[right]
        return r0 if n0 == n1 else r0 + (r1 - r0) * min(max((n - n0) / (n1 - n0), 0.0), 1.0)

    return min(between, key=lambda n: (abs(math.log(curve.at(n) / wanted) + ratio(n)), n))


def _kept(linear: nn.Linear) -> nn.Linear:
    """A copy with parameters of its own on the same memory: moving the original away leaves them where they are."""
    kept = copy.copy(linear)
    kept._parameters = {
        n: None if p is None else nn.Parameter(p.data, p.requires_grad) for n, p in linear._parameters.items()
    }
    return kept


def _digest(dense: frozenset[str], refit: bool) -> str:
    return hashlib.sha256("\n".join([str(refit), *sorted(dense)]).encode()).hexdigest()[:12]


def _print(curve: tuple[Mix, ...], note: str) -> None:
    Console(stderr=True, width=100, highlight=False).print(curve_table(curve, RECORDED[_GPU].name + note))
