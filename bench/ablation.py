"""What each part of the one-shot solve is worth: it is exchanged for a simpler one, and the accuracy measured anew.

    python bench/ablation.py                                    every variant, 2:4 and dense
    python bench/ablation.py --variants one-shot no-correction  these only
    python bench/ablation.py --json bench/results/ablation.json     rows of other variants and models stay there
    python bench/ablation.py --readme bench/results/ablation.json   puts the table into bench/README.md

Setting: that of bench/accuracy.py, without a refit, which would hide a part of the differences. The library has no
options for this: functions of it are exchanged while a variant runs, and a variant whose functions are never called is
an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import accuracy
import readme
import results
import torch
from torch import Tensor

from sparse_marlin.compression import descent, pipeline, solve, stages
from sparse_marlin.compression.moments import Moments
from sparse_marlin.compression.targets import Target
from sparse_marlin.scheme import Scheme

Replacement = tuple[
    ModuleType, str, Callable[..., Any]
]  # the name in the module that uses it, and what takes its place
WEIGHTS = {"2:4": "2:4", "none": "dense"}  # sparsity of a row -> heading
BASE = "one-shot"


@dataclass(frozen=True)
class Variant:
    """One-shot with one thing changed.

    Attributes:
        what: one line for the table.
        replacements: of functions.
        arguments: of ``patch_model``.
        windows: to calibrate on.
        dense: whether it also differs from one-shot for dense weights.
    """

    what: str
    replacements: tuple[Replacement, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    windows: int = 24
    dense: bool = True


@contextlib.contextmanager
def replaced(replacements: tuple[Replacement, ...]) -> Iterator[None]:
    """Exchanges functions.

    Raises:
        RuntimeError: at the end, if one of those that took their places was never called.
    """
    calls = [0] * len(replacements)

    def counted(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def call(*arguments: Any) -> Any:
            calls[index] += 1
            return function(*arguments)

        return call

    with contextlib.ExitStack() as stack:
        for index, (module, name, function) in enumerate(replacements):
            stack.enter_context(mock.patch.object(module, name, counted(index, function)))
        yield
    for (module, name, function), count in zip(replacements, calls, strict=True):
        if not count:
            raise RuntimeError(
                f"{module.__name__} no longer calls {name}: {function.__name__} took its place and was never called"
            )


fit_scales = solve.fit_scales


def largest_scales(w: Tensor, mask: Tensor | None, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Scales that let the largest weight of a group just fit, as in rounding to nearest."""
    largest = w.unflatten(1, (-1, scheme.group_width(w.shape[1]))).abs().amax(2)
    return (largest / (scheme.zero_code - 1)).to(scheme.dtype)


def unweighted_scales(w: Tensor, mask: Tensor | None, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Scales that minimise the squared error of the weights, whatever their inputs are."""
    return fit_scales(w, mask, scheme, None)


def same_scales(w: Tensor, codes: Tensor, mask: Tensor | None, scales: Tensor, scheme: Scheme, h: Tensor) -> Tensor:
    """The scales that the integers were rounded with."""
    return scales


class DiagonalPairs(solve.Pairs):
    """Removes the two weights of a quad whose removals cost least one by one: SparseGPT's criterion."""

    def remove(self, quad: int, w: Tensor) -> tuple[Tensor, Tensor]:
        if quad == len(self._chosen):
            cost = (w / self.u[quad].diagonal().unsqueeze(1)).square()
            chosen = (cost[self.first] + cost[self.second]).argmin(0)
            self._chosen.append(chosen)
            self._masks.append(self.keep[:, chosen])
        return super().remove(quad, w)


class ColumnPairs(DiagonalPairs):
    """Also compensates for a removal in the columns after it alone, as SparseGPT does."""

    def remove(self, quad: int, w: Tensor) -> tuple[Tensor, Tensor]:
        super().remove(quad, w)  # chooses
        w, errors = w.clone(), torch.zeros_like(w)
        u = self.u[quad]
        for i in range(4):
            errors[i] = torch.where(self._masks[quad][i], 0, w[i] / u[i, i])
            w[i:] -= u[i, i:].unsqueeze(1) * errors[i]
        return w * self._masks[quad], errors


def original_target(weight: Tensor, moments: Moments) -> Tensor:
    """The weight itself: each layer answers for its own errors only."""
    return weight


def one_stage(targets: list[Target], inputs: Any) -> list[list[Target]]:
    """All layers of a block are calibrated before the first of them is compressed."""
    return [targets]


def no_descent(w: Tensor, latent: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """What the sweep through the columns has chosen."""
    return latent, mask


class FixedQuads(descent._Quads):
    """Of all candidates for a quad, those that leave its mask alone."""

    def choose(self, j: int, pull: Tensor, old: Tensor, latent: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        self.allowed = kept[self._first] & kept[self._second]
        return super().choose(j, pull, old, latent, kept)

    def candidates(self, j: int, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, error = super().candidates(j, pull)
        return first, second, torch.where(self.allowed, error, torch.inf)


def stored_order(hessian: Tensor, width: int) -> Tensor:
    """The columns as they are stored."""
    return torch.arange(hessian.shape[0], device=hessian.device)


VARIANTS = {
    BASE: Variant("one-shot, as it is"),
    "largest-scales": Variant("scales from the largest weight", ((solve, "fit_scales", largest_scales),)),
    "unweighted-scales": Variant("scales by the plain squared error", ((solve, "fit_scales", unweighted_scales),)),
    "same-scales": Variant("scales not fitted again", ((solve, "refit_scales", same_scales),)),
    "diagonal-mask": Variant("mask by SparseGPT's criterion", ((solve, "Pairs", DiagonalPairs),), dense=False),
    "column-mask": Variant(
        "... and its compensation, column after column", ((solve, "Pairs", ColumnPairs),), dense=False
    ),
    "no-correction": Variant(
        "errors of earlier layers not made up for", ((stages, "corrected_target", original_target),)
    ),
    "one-stage": Variant("all layers of a block at once", ((pipeline, "split_stages", one_stage),)),
    "no-descent": Variant("integers and mask not fitted to the scales", ((solve, "descend", no_descent),)),
    "fixed-mask": Variant("... integers alone, not the mask", ((descent, "_Quads", FixedQuads),), dense=False),
    "stored-order": Variant("columns in the order they are stored in", ((solve, "solving_order", stored_order),)),
    "damping-0.001": Variant("damping 0.1 %", arguments={"damping": 0.001}),
    "damping-0.1": Variant("damping 10 %", arguments={"damping": 0.1}),
    "windows-96": Variant("96 calibration windows", windows=96),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="VARIANT")
    parser.add_argument("--sparsity", nargs="+", choices=WEIGHTS, default=[*WEIGHTS])
    accuracy.add_options(parser, "bench/README.md")
    args = parser.parse_args()
    if args.readme:
        text = text_of(json.loads(args.readme.read_text(encoding="utf-8")))
        readme.replace_text("ablation", text, readme.OF_BENCHMARKS)
        return
    order = {"sparsity": [*WEIGHTS], "variant": [*VARIANTS]}
    try:
        kept = accuracy.Kept(args, "bench/ablation.py", ("model", "sparsity", "variant"), order)
    except results.ResultError as e:
        parser.error(str(e))
    setting = accuracy.Setting(args)
    for sparsity in args.sparsity:
        for name in args.variants:
            variant = VARIANTS[name]
            if sparsity == "none" and not variant.dense:
                continue
            how = {"sparsity": None if sparsity == "none" else sparsity, "method": "one-shot", **variant.arguments}
            with replaced(variant.replacements):
                row = setting.measure(how, variant.windows)
            print(f"{WEIGHTS[sparsity]:5} {name:18} {accuracy.line_of(row)}", flush=True)
            kept.add({"model": setting.name, "variant": name, **row})


def text_of(found: dict[str, Any]) -> str:
    """What bench/README.md says of a file that ``--json`` has written: a line per variant, all models beside it."""
    rows = accuracy.rows_of(found)
    names = [name for name in VARIANTS if any(r["variant"] == name for r in rows)]
    settings = [
        (model, sparsity)
        for model, of_model in accuracy.by_model(rows).items()
        for sparsity in WEIGHTS
        if any(r["sparsity"] == sparsity for r in of_model)
    ]
    cells = {(r["model"], r["sparsity"], r["variant"]): f"{r['perplexity']:.2f} ({r['kl']:.3f})" for r in rows}
    table = readme.table(
        ["changed", *(f"{model}, {WEIGHTS[sparsity]}" for model, sparsity in settings)],
        [[VARIANTS[name].what, *(cells.get((*s, name), "") for s in settings)] for name in names],
    )
    return f"{table}\n\nPerplexity (KL to the original) of {accuracy.caption_of(found['meta'], rows)}"


if __name__ == "__main__":
    main()
