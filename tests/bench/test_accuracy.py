"""The README's table of accuracy comes from the committed result file, and that file names no folder."""

from __future__ import annotations

import json
from pathlib import Path

import accuracy
import pytest
import readme
import results

RESULTS = Path(accuracy.__file__).parent / "results" / "accuracy.json"


def test_readme_shows_the_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = readme.README.read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(before, encoding="utf-8")
    monkeypatch.setattr(readme, "README", copy)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--readme", str(RESULTS)])
    accuracy.main()
    assert copy.read_text(encoding="utf-8") == before, f"run bench/accuracy.py --readme {RESULTS}"


def test_every_row_is_a_known_method_in_its_place() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    names = [r["method"] for r in rows]
    assert names == [m for m in accuracy.METHODS for _ in range(names.count(m))]
    columns, cells, caption = accuracy.table_of({**json.loads(RESULTS.read_text(encoding="utf-8")), "rows": rows[:1]})
    assert "minutes" not in columns
    assert cells == [("original", "", "float32", "32.00", f"{rows[0]['perplexity']:.2f}", "0.000", "100.0%")]
    assert "windows of 512 tokens of the first half" in caption and "evaluated on 24 of the second" in caption


def test_a_command_keeps_the_names_of_files_alone() -> None:
    words = ["python", "bench/accuracy.py", "--model", "/data/small/", "--text", "./a text.txt", "--seed", "1"]
    assert results.command(words[1], words[2:]) == "python bench/accuracy.py --model small --text 'a text.txt' --seed 1"
    assert "--json accuracy.json" in json.loads(RESULTS.read_text(encoding="utf-8"))["meta"]["command"]


def test_rows_with_a_refit_are_what_they_are_without_one_and_trained() -> None:
    for name, how in accuracy.METHODS.items():
        if name.endswith("+refit"):
            assert how == {**(accuracy.METHODS[name.removesuffix("+refit")] or {}), "refit": True}
    assert {"gptq+refit", "one-shot-dense+refit", "one-shot+refit"} <= accuracy.METHODS.keys()
