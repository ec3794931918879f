"""Replaces a generated part of a README: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
OF_BENCHMARKS = Path(__file__).resolve().parent / "README.md"


def replace(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """Writes a table into README.md, and a caption below it.

    Raises:
        ValueError: if README.md does not hold each of the two marks once.
    """
    replace_text(name, f"{table(columns, rows)}\n\n{caption}")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown: the first column to the left, the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def replace_text(name: str, new: str, path: Path | None = None) -> None:
    """Writes any text, into README.md unless told otherwise.

    Raises:
        ValueError: if the file does not hold each of the two marks once.
    """
    path = path or README
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} must hold each of the lines {begin} and {end} once")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    path.write_text(f"{head}{begin}\n{new}\n{end}{tail}", encoding="utf-8")
