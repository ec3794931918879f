"""Changes between two runs: what counts as one, and what is said."""

from __future__ import annotations

from pathlib import Path

import changes
import pytest
import readme
import results
from fakes import make_row
from results import Results


def files(tmp_path: Path, old: list[results.Row], new: list[results.Row]) -> list[str]:
    for name, rows in (("old", old), ("new", new)):
        results.write(tmp_path / f"{name}.json", Results({"commit": name, "gpu": "H200"}, rows))
    return [str(tmp_path / "old.json"), str(tmp_path / "new.json")]


@pytest.mark.parametrize(
    ("old_us", "new_us", "spread", "verdict"),
    [
        (100.0, 102.9, 0.0, ""),  # below three percent
        (100.0, 103.5, 0.0, "REGRESSION"),
        (100.0, 96.0, 0.0, "faster"),
        (100.0, 104.0, 2.5, ""),  # the two spreads together are five percent
        (100.0, 106.0, 2.5, "REGRESSION"),
    ],
)
def test_verdict(old_us: float, new_us: float, spread: float, verdict: str) -> None:
    change = changes.Change(make_row(us=old_us, us_spread=spread), make_row(us=new_us, us_spread=spread))
    assert change.verdict(3.0) == verdict


def test_only_common_measurements() -> None:
    old = [make_row(M=1), make_row(M=16), make_row(impl="humming")]
    new = [make_row(M=16, us=12.0), make_row(M=32), make_row(M=1)]
    assert [(c.new.M, round(c.pct)) for c in changes.compare(old, new)] == [(16, 20), (1, 0)]


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = [make_row(M=1, us=10.0), make_row(M=16, us=10.0), make_row(M=64, us=10.0), make_row(impl="cublas", us=20.0)]
    new = [make_row(M=1, us=12.0), make_row(M=16, us=10.1), make_row(M=64, us=8.0), make_row(impl="cublas", us=20.2)]
    arguments = files(tmp_path, old, new)
    assert changes.main(arguments) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[3][:7] == ["sparse_marlin", "4096x4096", "1", "float16", "INT4", "none", "128"]
    assert lines[3][7:] == ["10.0", "12.0", "+20.0%", "3.0%", "REGRESSION"]
    assert lines[4][2] == "64" and lines[4][-1] == "faster"
    assert "cublas" not in out  # one percent is noise
    assert ["16", "2", "1.0%", "1.0%", "1.0%"] in lines
    assert changes.main([*arguments, "--check"]) == 1
    assert changes.main([*arguments, "--check", "--noise", "25"]) == 0
    assert "none of 4 times changed by more than the noise" in capsys.readouterr().out
    changes.main([*arguments, "--all"])
    assert "cublas" in capsys.readouterr().out


def test_regression_of_others_is_no_failure(tmp_path: Path) -> None:
    arguments = files(tmp_path, [make_row(impl="humming", us=10.0)], [make_row(impl="humming", us=20.0)])
    assert changes.main([*arguments, "--check"]) == 0


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        changes.main(files(tmp_path, [make_row(M=1)], [make_row(M=2)]))
    assert "no measurement in common" in capsys.readouterr().err


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        changes.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert "cannot be read as a result file" in capsys.readouterr().err


def test_noise_in_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "README.md"
    text.write_text("before\n<!-- begin noise -->\nold\n<!-- end noise -->\nafter\n")
    monkeypatch.setattr(readme, "README", text)
    arguments = files(tmp_path, [make_row(M=1, us=10.0)], [make_row(M=1, us=10.2)])
    changes.main([*arguments, "--readme"])
    lines = text.read_text().splitlines()
    assert "| 1 | 1 | 2.0% | 2.0% | 2.0% |" in lines
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
