"""The README's table of accuracy comes from the committed result file, and that file names no folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy
import pytest
import results
import torch

RESULTS = Path(accuracy.__file__).parent / "results" / "accuracy.json"


def test_readme_shows_the_committed_results(readme_shows: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--readme", str(RESULTS)])
    readme_shows(accuracy.main, f"bench/accuracy.py --readme {RESULTS}")


def test_every_row_is_a_known_method_in_its_place() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    for rows in accuracy.by_model(found["rows"]).values():
        names = [r["method"] for r in rows]
        assert names == [m for m in accuracy.METHODS for _ in range(names.count(m))]
    rows = accuracy.rows_of(found)
    row = rows[0]
    text = accuracy.text_of({**found, "rows": [row]}, [row["model"]])
    assert "minutes" not in text
    assert f"\n| original |  | float32 | 32.00 | {row['perplexity']:.2f} | 0.000 | 100.0% |\n" in text
    assert "windows of 512 tokens of the first half" in text and "evaluated on 24 of the second" in text


def test_models_have_a_table_each() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = accuracy.rows_of(found)[:2]
    other = [{**r, "model": "another", "perplexity": 77.123} for r in rows]
    both = {**found, "rows": [*other, *rows]}
    name = rows[0]["model"]
    assert accuracy.text_of(both, [name]) == accuracy.text_of({**found, "rows": rows}, [name])
    second = accuracy.text_of(both, ["another"])
    assert second.count("77.12") == 2 and "\n\nanother, group 64" in second and name not in second
    named = [{**r, "model": model} for model in ("a-model", "smollm2-135m-instruct") for r in rows]
    assert list(accuracy.by_model(named)) == ["smollm2-135m-instruct", "a-model"]  # the one that is embedded first


def test_program_keeps_the_rows_of_other_models(
    small_neox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "WINDOW", 16)
    path = tmp_path / "rows.json"
    text = tmp_path / "text.txt"
    text.write_text(accuracy.sample_text()[:20_000], encoding="utf-8")

    def run(model: Path, *more: str) -> list[dict[str, Any]]:
        arguments = ["--model", str(model), "--text", str(text), "--calibration-windows", "4", "--device", "cpu"]
        arguments += ["--evaluation-windows", "2", "--json", str(path), *more]
        monkeypatch.setattr("sys.argv", ["accuracy.py", *arguments])
        accuracy.main()
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return rows

    first = run(small_neox, "--methods", "one-shot", "fp")
    assert [(r["model"], r["method"]) for r in first] == [("small-neox", "fp"), ("small-neox", "one-shot")]
    assert first[0]["kl"] == 0 and first[1]["kl"] > 0 and first[1]["bits"] == pytest.approx(3.25)
    (tmp_path / "b").symlink_to(small_neox, target_is_directory=True)
    again = run(tmp_path / "b", "--methods", "one-shot")  # the model's name is that of the directory itself
    assert [r["perplexity"] for r in again] == [r["perplexity"] for r in first]
    other = small_neox.rename(tmp_path / "a-copy")
    both = run(other, "--methods", "rtn", "fp")
    assert [(r["model"], r["method"]) for r in both] == [
        ("a-copy", "fp"), ("a-copy", "rtn"), ("small-neox", "fp"), ("small-neox", "one-shot"),
    ]  # fmt: skip
    assert both[0]["perplexity"] == both[2]["perplexity"]
    with pytest.raises(SystemExit, match="2"):
        run(other, "--methods", "fp", "--seed", "1")
    assert "rows of seed 0, this run is of 1" in capsys.readouterr().err
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == both


def test_runs_share_a_file(tmp_path: Path) -> None:
    def kept(seed: int) -> accuracy.Kept:
        args = argparse.Namespace(
            json=tmp_path / "rows.json", device="cpu", text=None, group_size=64, evaluation_windows=2, seed=seed
        )
        return accuracy.Kept(args, "bench/accuracy.py", ("model", "method"), {"method": ["fp", "rtn"]})

    first, second = kept(0), kept(0)
    with pytest.raises(results.ResultError, match="rows of seed 0, this run is of 1"):
        kept(1)  # before any of them has a row
    first.add({"model": "m", "method": "rtn", "kl": 1})
    second.add({"model": "m", "method": "fp", "kl": 2})
    first.add({"model": "m", "method": "rtn", "kl": 3})
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert [(r["method"], r["kl"]) for r in rows] == [("fp", 2), ("rtn", 3)]


def test_windows_are_drawn_alike_whatever_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = accuracy.Setting.__new__(accuracy.Setting)
    setting.args, setting.first = argparse.Namespace(seed=5), torch.arange(5000)
    calibration, held_out = setting.windows(24)
    assert len(calibration) == 24 and len(held_out) == 8 and {w.shape for w in calibration} == {(1, accuracy.WINDOW)}
    assert all(torch.equal(a, b) for a, b in zip(calibration, setting.windows(96)[0], strict=False))


def test_a_command_keeps_the_names_of_files_alone() -> None:
    words = ["python", "bench/accuracy.py", "--model", "/data/small/", "--text", "./a text.txt", "--seed", "1"]
    assert results.command(words[1], words[2:]) == "python bench/accuracy.py --model small --text 'a text.txt' --seed 1"
    assert "/" not in json.loads(RESULTS.read_text(encoding="utf-8"))["meta"]["command"].removeprefix("python bench/")


def test_rows_with_a_refit_are_what_they_are_without_one_and_trained() -> None:
    for name, how in accuracy.METHODS.items():
        if name.endswith("+refit"):
            assert how == {**(accuracy.METHODS[name.removesuffix("+refit")] or {}), "refit": True}
    assert {"gptq+refit", "one-shot-dense+refit", "one-shot+refit"} <= accuracy.METHODS.keys()
