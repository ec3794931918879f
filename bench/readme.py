"""Replaces a generated part of README.md: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def replace(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """Writes a table, first column left-aligned and the others right-aligned, and a caption below it.

    Raises:
        ValueError: if README.md does not hold each of the two marks once.
    """
    table = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    replace_text(name, f"{lines}\n\n{caption}")


def replace_text(name: str, new: str) -> None:
    """Writes any text.

    Raises:
        ValueError: if README.md does not hold each of the two marks once.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = README.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{README} must hold each of the lines {begin} and {end} once")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    README.write_text(f"{head}{begin}\n{new}\n{end}{tail}", encoding="utf-8")
