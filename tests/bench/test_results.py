"""Result files: the roofline by hand, round trips, and what may be merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import results
from fakes import make_row
from results import Limits, ResultError, Results

LIMITS = Limits(bandwidth_gbs=1000.0, tflops={"float16": 100.0})


def test_bytes() -> None:
    # 1000 x 2000 weights of 4 bits are 1 MB; ten tokens: 10 * 2000 values in, 10 * 1000 out, two bytes each.
    assert results.bytes_moved(1000, 2000, 10, 4) == 1_000_000 + 60_000


@pytest.mark.parametrize(
    ("tokens", "bits", "sparse", "floor"),
    [
        (10, 4, False, 1.06),  # memory: 1.06 MB at 1 TB/s; 2 * 10 * 2e6 operations need 0.4 us
        (100, 4, False, 4.0),  # the tensor cores: 4e8 operations at 1e14 per second; the memory needs 1.6 us
        (100, 4, True, 2.0),  # at twice the rate
        (100, 16, True, 4.6),  # memory again: 4 MB and 0.6 MB
    ],
)
def test_floor(tokens: int, bits: float, sparse: bool, floor: float) -> None:
    assert LIMITS.floor_us(1000, 2000, tokens, bits, "float16", sparse) == pytest.approx(floor)


def test_round_trip(tmp_path: Path) -> None:
    rows = [make_row(), make_row(sparsity="2:4", M=1)]
    path = tmp_path / "new" / "r.json"
    results.write(path, Results({"commit": "abc"}, rows))
    found = results.read(path)
    assert found == Results({"commit": "abc"}, rows)
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]  # nothing of the atomic write is left
    assert found.select(sparsity="2:4") == [rows[1]]


def test_schema(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.write(path, Results({}, [make_row()]))
    data = json.loads(path.read_text())
    assert set(data) == {"meta", "rows"}
    names = (
        "impl N K M group_size dtype bits sparsity us us_spread gbps tflops roofline_pct speedup_vs_fp16 max_rel_err"
    )
    assert " ".join(data["rows"][0]) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "cannot be read"),
        ("[]", "must hold"),
        ('{"meta": {}, "rows": [{"impl": "x"}]}', r"row 0 .* must have the fields impl, N, .*got \['impl'\]"),
    ],
)
def test_other_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=message):
        results.read(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        results.read(tmp_path / "none.json")


def test_merge_replaces_and_keeps() -> None:
    old = Results({"commit": "c", "gpu": "g", "date": "monday"}, [make_row(us=10.0), make_row(M=1, us=5.0)])
    new = Results({"commit": "c", "gpu": "g", "date": "tuesday"}, [make_row(us=11.0), make_row(M=64, us=20.0)])
    merged = results.merge(old, new)
    assert {r.M: r.us for r in merged.rows} == {1: 5.0, 16: 11.0, 64: 20.0}
    assert merged.meta["date"] == "tuesday"
    assert merged.meta["earlier_runs"] == [{"date": "monday"}]
    third = results.merge(merged, Results({"commit": "c", "gpu": "g", "date": "friday"}, []))
    assert [m["date"] for m in third.meta["earlier_runs"]] == ["monday", "tuesday"]
    assert len(third.rows) == 3


def test_merge_keeps_other_schemes_apart() -> None:
    meta = {"commit": "c", "gpu": "g"}
    variants = [make_row(), make_row(bits=8), make_row(group_size=64), make_row(dtype="bfloat16"), make_row(N=8)]
    assert len(results.merge(Results(meta, [make_row(impl="humming")]), Results(meta, variants)).rows) == 6


def test_merge_of_notes() -> None:
    subject = {"impl": "sparse_marlin", "sparsity": "none", "N": 4096, "K": 4096, "M": 16, "dtype": "float16"}
    meta = {"commit": "c", "gpu": "g", "wrong": [subject, {**subject, "M": 1}], "host_us": [{**subject, "us": 9.0}]}
    later = {"commit": "c", "gpu": "g", "wrong": [{**subject, "M": 32}], "host_us": [{**subject, "us": 8.0}]}
    merged = results.merge(Results(meta, []), Results(later, [make_row()])).meta
    assert [e["M"] for e in merged["wrong"]] == [1, 32]  # that of M = 16 is right now: it has been timed
    assert merged["host_us"] == [{**subject, "us": 8.0}]


def test_merge_of_algorithms() -> None:
    a, b = [16, 32, "float16", 1], [16, 32, "float16", 8]
    meta = {"commit": "c", "gpu": "g", "cusparselt": {"best": [[*a, 1], [*b, 2]], "crashed": [[*a, 5], [*b, 6]]}}
    later = {"commit": "c", "gpu": "g", "cusparselt": {"best": [[*b, 3]], "crashed": [[*b, 6], [*b, 7]]}}
    merged = results.merge(Results(meta, []), Results(later, [])).meta["cusparselt"]
    assert merged == {"best": [[*a, 1], [*b, 3]], "crashed": [[*a, 5], [*b, 6], [*b, 7]]}  # not tried again
    without = results.merge(Results(meta, []), Results({"commit": "c", "gpu": "g"}, [])).meta["cusparselt"]
    assert without == meta["cusparselt"]


@pytest.mark.parametrize("field", ["commit", "gpu"])
def test_merge_refuses(field: str) -> None:
    meta = {"commit": "c", "gpu": "g"}
    with pytest.raises(ResultError, match=rf"holds results of {field} '[cg]', this run is 'other'.*file of their own"):
        results.merge(Results(meta, []), Results({**meta, field: "other"}, []))


def test_commit_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MARLIN_COMMIT", "1234")
    assert results.commit() == "1234"


def test_table_is_aligned() -> None:
    assert results.table(["M", "16"], [["a", "1.0"], ["longer", "100.0"]]).splitlines() == [
        "M          16",
        "a         1.0",
        "longer  100.0",
    ]
