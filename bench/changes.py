"""What changed between two runs of the benchmark: python bench/changes.py OLD.json NEW.json

A change counts if it is larger than the noise: --noise percent of the time, or the spreads of the two measurements
together where that is more. The last table is about all rows: of two runs of the same commit, it is the noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import readme
import results
from results import Row

NOISE_PCT = 3.0


@dataclass(frozen=True)
class Change:
    """One measurement, before and after."""

    old: Row
    new: Row

    @property
    def pct(self) -> float:
        """Change of the time, in percent: positive is slower."""
        return 100 * (self.new.us / self.old.us - 1)

    def noise_pct(self, least: float) -> float:
        """The change that the measurements allow to see."""
        return max(least, 100 * (self.old.us_spread + self.new.us_spread) / self.old.us)

    def verdict(self, least: float) -> str:
        """``REGRESSION``, ``faster``, or nothing."""
        if abs(self.pct) <= self.noise_pct(least):
            return ""
        return "REGRESSION" if self.pct > 0 else "faster"


def compare(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """The measurements that both have, in the order of the new ones."""
    before = {r.key: r for r in old}
    return [Change(before[r.key], r) for r in new if r.key in before]


def table(changes: Sequence[Change], least: float) -> str:
    """The changes, largest first."""
    lines = []
    for c in sorted(changes, key=lambda c: -abs(c.pct)):
        r = c.new
        lines.append(
            [
                r.impl,
                f"{r.N}x{r.K}",
                str(r.M),
                r.dtype,
                f"INT{r.bits}" if r.bits < 16 else str(r.bits),
                r.sparsity,
                str(r.group_size),
                f"{c.old.us:.1f}",
                f"{r.us:.1f}",
                f"{c.pct:+.1f}%",
                f"{c.noise_pct(least):.1f}%",
                c.verdict(least),
            ]
        )
    columns = ["impl", "N x K", "M", "dtype", "bits", "sparsity", "group", "old us", "new us", "change", "noise", ""]
    return results.table(columns, lines)


def by_tokens(changes: Sequence[Change]) -> list[list[str]]:
    """Per M: the number of measurements, and the median, 90th percentile and largest of the differences' sizes."""
    lines = []
    for m in sorted({c.new.M for c in changes}):
        sizes = sorted(abs(c.pct) for c in changes if m == c.new.M)
        high = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        lines.append([str(m), str(len(sizes)), f"{statistics.median(sizes):.1f}%", f"{high:.1f}%", f"{sizes[-1]:.1f}%"])
    return lines


BY_TOKENS = ["M", "measurements", "median", "90th percentile", "largest"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--noise", type=float, default=NOISE_PCT, metavar="PERCENT", help=f"default {NOISE_PCT:g}")
    parser.add_argument("--all", action="store_true", help="list the measurements without a change as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 if ours has a regression")
    parser.add_argument("--readme", action="store_true", help="put the differences of two runs per M into README.md")
    args = parser.parse_args(arguments)
    try:
        old, new = results.read(args.old), results.read(args.new)
    except results.ResultError as e:
        parser.error(str(e))
    changes = compare(old.rows, new.rows)
    if not changes:
        parser.error(f"{args.old} and {args.new} have no measurement in common")
    for name, found in (("old", old), ("new", new)):
        print(f"{name}: {found.meta.get('gpu')}, commit {found.meta.get('commit')}, {found.meta.get('date')}")
    shown = [c for c in changes if args.all or c.verdict(args.noise)]
    print(table(shown, args.noise) if shown else f"none of {len(changes)} times changed by more than the noise")
    print(f"\nsize of the difference, all {len(changes)} measurements\n{results.table(BY_TOKENS, by_tokens(changes))}")
    if args.readme:
        same = "the same commit" if old.meta.get("commit") == new.meta.get("commit") else "two commits"
        caption = (
            f"Difference of the times of two runs of {same} on {new.meta.get('gpu')}, all implementations: "
            "smaller ones say nothing."
        )
        readme.replace("noise", BY_TOKENS, by_tokens(changes), caption)
    ours = [c for c in changes if c.new.impl.startswith("sparse_marlin") and c.verdict(args.noise) == "REGRESSION"]
    return 1 if args.check and ours else 0


if __name__ == "__main__":
    sys.exit(main())
