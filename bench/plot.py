"""Plots and the README's tables from committed results: python bench/plot.py compare.json --peers humming.json --readme

speedup-DTYPE    how many times as fast as cuBLAS, against M, a panel per weight, with what the memory and the tensor
                 cores would allow
layers-DTYPE     the same for a few M as bars, weight by weight
bytes-DTYPE      time against bytes moved at the smallest M, with the line of the measured bandwidth

Each is written as PNG and SVG. --readme puts the first one and a table into README.md. Others may have been measured in
runs of their own, in which cuBLAS and ours stood beside them: --peers draws the speedups that they reached there among
the rest, and --readme makes a table of each of those runs. No time is compared with one of another run.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import readme
import results
from results import BASE, Results, Row

OURS = "sparse_marlin"
BAR_TOKENS = (1, 16, 128, 1024)
TABLE_TOKENS = (1, 16, 64, 256, 1024, 4096)
PANELS_PER_LINE = 4

Series = tuple[str, str]  # impl and sparsity

# Ours stand out; the rest share what is left, in the order of their names.
_OWN_COLORS = {(OURS, "none"): "#d62728", (OURS, "2:4"): "#1f77b4"}
_COLORS = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#ff7f0e", "#17becf", "#bcbd22", "#7f7f7f")


def label(series: Series) -> str:
    impl, sparsity = series
    return impl if sparsity == "none" else f"{impl} 2:4"


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Everything but cuBLAS: ours first, then by name."""
    found = {(r.impl, r.sparsity) for r in rows if r.impl != BASE}
    return sorted(found, key=lambda s: (not s[0].startswith(OURS), s))


def colors(rows: Sequence[Row]) -> dict[Series, str]:
    rest = [s for s in series_of(rows) if s not in _OWN_COLORS]
    return {**_OWN_COLORS, **{s: _COLORS[i % len(_COLORS)] for i, s in enumerate(rest)}}


def ideal_speedup(row: Row) -> float:
    """What a row's implementation would reach at the roofline."""
    return row.speedup_vs_fp16 * 100 / row.roofline_pct


def shapes_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return sorted({(r.N, r.K) for r in rows}, key=lambda s: (s[0] * s[1], s))


def conditions(meta: dict[str, Any], rows: Sequence[Row]) -> str:
    """One line that says where the numbers are from."""
    row = next(r for r in rows if r.impl.startswith(OURS))
    group = "one scale per channel" if row.group_size == -1 else f"group {row.group_size}"
    machine = meta.get("gpu") or "CPU"
    version = meta.get("versions", {}).get("torch")
    return (
        f"{machine}, {row.dtype}, INT{row.bits} {group}, CUDA graphs with cold L2, torch {version}, "
        f"commit {str(meta.get('commit'))[:9]}, {str(meta.get('date'))[:10]}"
    )


def draw(found: Results, folder: Path, others: Sequence[Results] = ()) -> list[Path]:
    """Draws everything there is rows for; of ``others`` the speedups alone, which are relative to their own runs.

    Raises:
        ValueError: if there is nothing of ours among the rows, or if others are of another GPU.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "font.sans-serif": ["DejaVu Sans", "Arial"]})
    if not any(r.impl.startswith(OURS) for r in found.rows):
        raise ValueError("there are no rows of sparse_marlin to draw")
    everything = with_peers(found, others)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for dtype in sorted({r.dtype for r in found.rows}):
        rows = [r for r in found.rows if r.dtype == dtype]
        if not any(r.impl.startswith(OURS) for r in rows):
            continue
        for name, draw_one in (("speedup", _speedup), ("layers", _layers), ("bytes", _bytes)):
            beside = [r for r in everything.rows if r.dtype == dtype]
            figure = draw_one(rows if draw_one is _bytes else beside, found.meta)
            written += [
                _save_png(figure, folder / f"{name}-{dtype}.png"),
                _save_svg(figure, folder / f"{name}-{dtype}.svg"),
            ]
    return written


def _save_png(figure: Any, path: Path) -> Path:
    from PIL import Image  # matplotlib needs it too

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=90)
    # A palette makes it a third of the size.
    image = Image.open(data).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    return path


def _save_svg(figure: Any, path: Path) -> Path:
    from matplotlib import rc_context

    data = io.StringIO()
    # Text stays text, and no date or random name makes a file differ from its last version.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparse_marlin"}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", re.sub(r"\n\s*", "\n", data.getvalue()))  # half of it are digits and blanks
    path.write_text(text, encoding="utf-8")
    return path


def _speedup(rows: Sequence[Row], meta: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    shapes = shapes_of(rows)
    across = min(PANELS_PER_LINE, len(shapes))
    down = math.ceil(len(shapes) / across)
    figure = Figure(figsize=(max(6.0, 3.2 * across), 2.8 * down + 1.0), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    color = colors(rows)
    handles: dict[str, Any] = {}
    for axis, shape in zip(axes.flat, shapes, strict=False):
        here = [r for r in rows if shape == (r.N, r.K)]
        for series in series_of(here):
            own = sorted((r for r in here if (r.impl, r.sparsity) == series), key=lambda r: r.M)
            tokens = [r.M for r in own]
            style: dict[str, Any] = {"linewidth": 2.0, "marker": "."} if series[0] == OURS else {"linewidth": 1.0}
            line = axis.plot(
                tokens, [r.speedup_vs_fp16 for r in own], color=color[series], label=label(series), **style
            )
            handles.setdefault(label(series), line[0])
            if series[0] == OURS:
                ideal = axis.plot(
                    tokens, [ideal_speedup(r) for r in own], linestyle=":", linewidth=1.2, color=color[series]
                )
                handles.setdefault(f"roofline of {label(series)}", ideal[0])
        handles.setdefault(f"{BASE} = 1", axis.axhline(1, color="black", linewidth=0.8))
        axis.set_title(f"{shape[0]} x {shape[1]}", fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    first = axes[0, 0]  # the others share its axes
    first.set_xscale("log", base=2)
    ticks = sorted({r.M for r in rows})
    first.set_xticks(ticks, [str(m) for m in ticks])
    first.minorticks_off()
    # For the measured curves: the ideal of small layers, far above what latency allows, may leave the picture.
    first.set_ylim(0, 1.4 * max(max(r.speedup_vs_fp16 for r in rows), 1.0))
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(shapes) - across) : len(shapes)]:  # the lowest ones that there are
        axis.tick_params(axis="x", labelrotation=60, labelbottom=True)
        axis.set_xlabel("M, tokens")
    figure.supylabel(f"times the speed of {BASE}, {rows[0].dtype}")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(conditions(meta, rows), fontsize=8)
    return figure


def _layers(rows: Sequence[Row], meta: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    present = {r.M for r in rows}
    tokens = [m for m in BAR_TOKENS if m in present] or sorted(present)[:3]
    shapes, series, color = shapes_of(rows), series_of(rows), colors(rows)
    figure = Figure(figsize=(max(6.0, 1.2 * len(shapes) + 2), 1.7 * len(tokens) + 1.2), layout="constrained")
    axes = figure.subplots(len(tokens), 1, squeeze=False, sharex=True)
    width = 0.85 / max(1, len(series))
    for axis, m in zip(axes.flat, tokens, strict=True):
        for i, s in enumerate(series):
            speed = {(r.N, r.K): r.speedup_vs_fp16 for r in rows if (r.impl, r.sparsity) == s and m == r.M}
            places = [j + (i - (len(series) - 1) / 2) * width for j, shape in enumerate(shapes) if shape in speed]
            heights = [speed[shape] for shape in shapes if shape in speed]
            axis.bar(places, heights, width, color=color[s], label=label(s))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel(f"M = {m}")
        axis.grid(axis="y", alpha=0.3)
    axes[-1, 0].set_xticks(range(len(shapes)), [f"{n}x{k}" for n, k in shapes], rotation=30, ha="right")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"times the speed of {BASE}\n{conditions(meta, rows)}", fontsize=8)
    return figure


def _bytes(rows: Sequence[Row], meta: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    m = min(r.M for r in rows)
    here = [r for r in rows if m == r.M]
    color = {**colors(rows), (BASE, "none"): "black"}
    figure = Figure(figsize=(6.5, 4.8), layout="constrained")
    axis = figure.subplots()
    moved = {r.key: r.gbps * r.us / 1e3 for r in here}  # MB
    for series in [(BASE, "none"), *series_of(here)]:
        own = sorted((r for r in here if (r.impl, r.sparsity) == series), key=lambda r: moved[r.key])
        axis.plot(
            [moved[r.key] for r in own],
            [r.us for r in own],
            marker="o",
            markersize=4,
            linewidth=0.8,
            color=color[series],
            label=label(series),
        )
    if bandwidth := meta.get("bandwidth_gbs"):
        ends = [min(moved.values()), max(moved.values())]
        name = f"measured bandwidth, {bandwidth:.4g} GB/s"
        axis.plot(ends, [e / bandwidth * 1e3 for e in ends], linestyle=":", color="gray", label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("MB moved: weight as stored, x and y")
    axis.set_ylabel(f"us, M = {m}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle(conditions(meta, rows), fontsize=8)
    return figure


def speed_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[tuple[int, int]]]:
    """Columns and lines of the README's table, and the weights that it is about.

    A cell is the geometric mean over all weights of the times of cuBLAS's speed; an implementation that lacks one of
    them has no number there, since means over different weights do not compare. One without a number has no line.
    """
    shapes = shapes_of(rows)
    present = {r.M for r in rows}
    tokens = [m for m in TABLE_TOKENS if m in present] or sorted(present)
    lines = []
    for series in series_of(rows):
        cells = []
        for m in tokens:
            speed = {(r.N, r.K): r.speedup_vs_fp16 for r in rows if (r.impl, r.sparsity) == series and m == r.M}
            cells.append(f"{statistics.geometric_mean(speed.values()):.2f}" if set(speed) == set(shapes) else "")
        if any(cells):
            lines.append([label(series), *cells])
    return ["M", *map(str, tokens)], lines, shapes


def combine(found: Sequence[Results]) -> Results:
    """The rows of several files of one GPU and commit; the last file's meta.

    Raises:
        ResultError: if they are of different GPUs or commits.
    """
    combined = found[0]
    for other in found[1:]:
        combined = results.merge(combined, other)
    return combined


def with_peers(found: Results, others: Sequence[Results]) -> Results:
    """With the rows that others have in runs of their own.

    Raises:
        ValueError: for a run on another GPU.
    """
    for o in others:
        if o.meta.get("gpu") != found.meta.get("gpu"):
            raise ValueError(f"a run beside others is of {o.meta.get('gpu')}, the results of {found.meta.get('gpu')}")
    foreign = [r for o in others for r in o.rows if r.impl != BASE and not r.impl.startswith(OURS)]
    return Results(found.meta, [*found.rows, *foreign])


def update_readme(found: Results, others: Sequence[Results], dtype: str, image: Path) -> None:
    """Replaces the README's plot and tables."""
    rows = [r for r in found.rows if r.dtype == dtype]
    columns, lines, shapes = speed_table(rows)
    where = Path(os.path.relpath(image, readme.README.parent)).as_posix()
    about = conditions(found.meta, rows)
    readme.replace_text("speedup", f"![times the speed of {BASE} against the number of tokens]({where})\n\n{about}.")
    weights = ", ".join(f"{n}x{k}" for n, k in shapes)
    caption = (
        f"Times the speed of {BASE}, by tokens M: geometric mean over the weights (N x K) {weights}. {about}. "
        f"Reads of {found.meta.get('bandwidth_gbs', 0):.0f} GB/s measured in the same run."
    )
    readme.replace("comparison", columns, lines, caption)
    if others:
        readme.replace_text("peers", peers_text(others))


def peers_text(runs: Sequence[Results]) -> str:
    """A table of runs beside others, each over the weights for which it has all of them at every M, and what they are.

    Raises:
        ValueError: if a run has no such weight or several dtypes, bits or sizes of groups, or if the runs' M differ.
    """
    table, notes, heads = [], [], set()
    for number, found in enumerate(runs, 1):
        columns, lines, note = _peers(found)
        heads.add(tuple(columns[1:]))
        table += [[str(number) if i == 0 else "", *line] for i, line in enumerate(lines)]
        notes.append(f"{number}. {note}.")
    if len(heads) != 1:
        raise ValueError(f"runs beside others need the same M to stand in one table, these have {sorted(heads)}")
    listed = "\n".join(notes)
    return f"{readme.table(['run', 'M', *heads.pop()], table)}\n\n{listed}"


def _peers(found: Results) -> tuple[list[str], list[list[str]], str]:
    """Columns, lines and conditions of one run."""
    kinds = {(r.dtype, r.bits, r.group_size) for r in found.rows if r.impl.startswith(OURS)}
    if len(kinds) != 1:
        raise ValueError(f"a run beside others needs one dtype and one scheme, this one has {sorted(kinds)}")
    all_series = series_of(found.rows)
    had = {(r.impl, r.sparsity, r.N, r.K, r.M) for r in found.rows}
    tokens = {r.M for r in found.rows}
    shared = [(n, k) for n, k in shapes_of(found.rows) if all((*s, n, k, m) in had for s in all_series for m in tokens)]
    if not shared:
        raise ValueError("a run beside others needs a weight for which it has all of them at every M")
    columns, lines, shapes = speed_table([r for r in found.rows if (r.N, r.K) in shared])
    weights = ", ".join(f"{n}x{k}" for n, k in shapes)
    versions = found.meta.get("versions", {})
    named = ", ".join(f"{impl} {versions[impl]}" for impl, _ in all_series if impl in versions and impl != OURS)
    mean = "geometric mean over " if len(shapes) > 1 else ""
    return columns, lines, f"{named}; {mean}{weights}. {conditions(found.meta, found.rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of bench/compare.py")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], metavar="FILE", help="runs beside others")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to draw (default: beside the first file)")
    parser.add_argument("--readme", action="store_true", help="put the speedups into README.md")
    parser.add_argument("--dtype", default="float16", help="of the README's plot and table (default: float16)")
    args = parser.parse_args(arguments)
    try:
        found = combine([results.read(f) for f in args.files])
        others = [results.read(f) for f in args.peers]
        dtypes = {r.dtype for r in found.rows if r.impl.startswith(OURS)}
        if args.readme and args.dtype not in dtypes:
            raise ValueError(f"--dtype {args.dtype}: the files have rows of ours for {', '.join(sorted(dtypes))}")
        folder = args.out or args.files[0].parent
        for path in draw(found, folder, others):
            print(f"drew {path}")
        if args.readme:
            update_readme(found, others, args.dtype, folder / f"speedup-{args.dtype}.svg")
    except ValueError as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
