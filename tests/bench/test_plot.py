"""Plots and the README's table from rows whose values are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plot
import pytest
import readme
import results
from fakes import make_row
from results import Results, Row

pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install sparse-marlin[plot]")

META: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "gpu": "NVIDIA H200",
    "date": "2026-12-01T10:00:00",
    "versions": {"torch": "2.11.0"},
    "bandwidth_gbs": 4500.0,
}
SHAPES = [
    (4096, 4096),
    (1024, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (1024, 8192),
    (28672, 8192),
    (8192, 28672),
    (73728, 18432),
]
TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
OTHERS = ["torch_int4", "humming", "vllm_marlin", "vllm_machete", "bitsandbytes"]


def rows() -> list[Row]:
    """As a full run of one dtype would give: ours twice as fast as cuBLAS, 2:4 three times, at half of the roofline."""
    found = []
    for n, k in SHAPES:
        for m in TOKENS:
            base = n * k * 2 / 4.5e6 + m * n * k / 3e8
            problem = {"N": n, "K": k, "M": m}
            found.append(
                make_row(impl="cublas", bits=16, us=base, gbps=4000.0, speedup_vs_fp16=1.0, group_size=0, **problem)
            )
            for impl, sparsity, speed in [
                ("sparse_marlin", "none", 2.0),
                ("sparse_marlin", "2:4", 3.0),
                ("sparse_marlin:sm80", "2:4", 2.5),
                ("cusparselt", "2:4", 1.2),
                *((name, "none", 1.5) for name in OTHERS),
            ]:
                found.append(
                    make_row(
                        impl=impl,
                        sparsity=sparsity,
                        us=base / speed,
                        speedup_vs_fp16=speed,
                        roofline_pct=50.0,
                        gbps=1000.0,
                        **problem,
                    )
                )
    return found


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plot.draw(Results(META, rows()), tmp_path_factory.mktemp("plots"))


def test_files(drawn: list[Path]) -> None:
    assert sorted(p.name for p in drawn) == sorted(
        f"{name}-float16.{suffix}" for name in ("speedup", "layers", "bytes") for suffix in ("png", "svg")
    )
    for path in drawn:
        assert 1_000 < path.stat().st_size < 150_000, path
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")


def test_speedup_says_what_it_shows(drawn: list[Path]) -> None:
    path = next(p for p in drawn if p.name == "speedup-float16.svg")
    text = " ".join(t.strip() for t in ElementTree.parse(path).getroot().itertext() if t.strip())
    for part in (
        "73728 x 18432",
        "roofline of sparse_marlin 2:4",
        "humming",
        "NVIDIA H200, float16, INT4 group 128",
        "commit 012345678, 2026-12-01",
        "cublas = 1",
        "M, tokens",
    ):
        assert part in text, part


def test_curves() -> None:
    """The lines hold the rows' numbers; the roofline is that of the same row."""
    figure = plot._speedup(rows(), META)
    panel = next(a for a in figure.axes if a.get_title() == "8192 x 28672")
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert list(lines["sparse_marlin 2:4"].get_xdata()) == TOKENS
    assert set(lines["sparse_marlin 2:4"].get_ydata()) == {3.0}
    dotted = [line for line in panel.get_lines() if line.get_linestyle() == ":"]
    assert sorted({line.get_ydata()[0] for line in dotted}) == [4.0, 6.0]  # at half of the roofline
    assert len([a for a in figure.axes if a.get_visible()]) == len(SHAPES)


def test_bars() -> None:
    figure = plot._layers(rows(), META)
    first = figure.axes[0]
    assert first.get_ylabel() == "M = 1"
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in first.containers}
    assert heights["sparse_marlin"] == [2.0] * len(SHAPES)
    assert heights["cusparselt 2:4"] == [1.2] * len(SHAPES)
    assert next(iter(figure.axes[-1].get_xticklabels())).get_text() == "1024x4096"


def test_bytes() -> None:
    figure = plot._bytes(rows(), META)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    memory = lines["measured bandwidth, 4500 GB/s"]
    mb, us = list(memory.get_xdata()), list(memory.get_ydata())
    assert [x / y * 1e3 for x, y in zip(mb, us, strict=True)] == pytest.approx([4500.0, 4500.0])
    ours = lines["sparse_marlin"]
    assert list(ours.get_xdata()) == pytest.approx([1000.0 * y / 1e3 for y in ours.get_ydata()])
    assert "us, M = 1" in figure.axes[0].get_ylabel()


def test_table() -> None:
    # Geometric mean of 2 and 8 is 4; humming lacks one weight at M = 16.
    some = [
        make_row(N=1, K=1, M=1, speedup_vs_fp16=2.0),
        make_row(N=2, K=2, M=1, speedup_vs_fp16=8.0),
        make_row(N=1, K=1, M=16, speedup_vs_fp16=3.0),
        make_row(N=2, K=2, M=16, speedup_vs_fp16=3.0),
        make_row(N=1, K=1, M=1, impl="humming", speedup_vs_fp16=1.0),
        make_row(N=2, K=2, M=1, impl="humming", speedup_vs_fp16=4.0),
        make_row(N=1, K=1, M=16, impl="humming", speedup_vs_fp16=1.0),
    ]
    columns, lines, shapes = plot.speed_table(some)
    assert columns == ["M", "1", "16"]
    assert lines == [["sparse_marlin", "4.00", "3.00"], ["humming", "2.00", ""]]
    assert shapes == [(1, 1), (2, 2)]


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "README.md"
    marks = "".join(f"<!-- begin {n} -->\n<!-- end {n} -->\n" for n in ("speedup", "comparison", "peers"))
    text.write_text(f"# title\n{marks}end\n")
    monkeypatch.setattr(readme, "README", text)
    folder = tmp_path / "bench" / "results"
    for i, shapes in enumerate((SHAPES[:1], SHAPES[-1:])):
        chosen = [r for r in rows() if (r.N, r.K) in shapes and r.M in (1, 16)]
        results.write(folder / f"{i}.json", Results(META, chosen))
    beside = [
        make_row(N=8, K=8, M=m, impl=impl, speedup_vs_fp16=speed)
        for impl, speed in (("sparse_marlin", 4.0), ("humming", 1.25))
        for m in (1, 16)
    ]
    # Of the second weight it lacks one M of one implementation.
    beside += [make_row(N=16, K=8, M=m, impl=i, speedup_vs_fp16=9.0) for m, i in ((1, "humming"), (1, "sparse_marlin"))]
    other = {**META, "commit": "fedcba987", "versions": {"torch": "2.11.0", "humming": "0.1"}}
    results.write(folder / "peers.json", Results(other, beside))
    files = [str(folder / f"{name}.json") for name in ("0", "1", "peers")]
    assert plot.main([*files[:2], "--readme", "--peers", files[2]]) == 0
    written = text.read_text()
    assert "| 1 | sparse_marlin | 4.00 | 4.00 |\n|  | humming | 1.25 | 1.25 |\n\n1. humming 0.1; 8x8." in written
    assert "commit fedcba987" in written and "commit 012345678" in written
    assert "humming" in (folder / "speedup-float16.svg").read_text()
    assert "](bench/results/speedup-float16.svg)" in written
    assert (folder / "speedup-float16.svg").exists()
    assert "| sparse_marlin 2:4 | 3.00 | 3.00 |" in written
    assert "73728x18432" in written and "Reads of 4500 GB/s" in written and "NVIDIA H200" in written
    two = Results(other, [*beside, make_row(N=8, K=8, M=1, dtype="bfloat16")])
    with pytest.raises(ValueError, match="needs one dtype"):
        plot.peers_text([two])
    both = plot.peers_text([Results(other, beside)] * 2)
    assert both.count("| humming |") == 2 and "| 2 | sparse_marlin |" in both and "\n2. humming 0.1; 8x8." in both
    with pytest.raises(ValueError, match="the same M"):
        plot.peers_text([Results(other, beside), Results(other, [r for r in beside if r.M == 1])])
    some = [r for r in rows() if r.M == 1]
    plot.update_readme(Results(META, some), [], "float16", folder / "speedup-float16.svg")
    assert "| sparse_marlin 2:4 | 3.00 |\n" in text.read_text()  # in place of the old one
    assert "humming 0.1; geometric" not in text.read_text() and "humming 0.1; 8x8." in text.read_text()  # stays
    assert text.read_text().startswith("# title\n") and text.read_text().endswith("-->\nend\n")


def test_drawn_again_is_the_same(tmp_path: Path) -> None:
    some = [r for r in rows() if r.M == 1 and r.N == 4096]
    first, second = (plot._save_svg(plot._layers(some, META), tmp_path / f"{i}.svg") for i in range(2))
    assert first.read_bytes() == second.read_bytes()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(tmp_path / "a.json", Results(META, [make_row()]))
    results.write(tmp_path / "b.json", Results({**META, "gpu": "another"}, [make_row()]))
    results.write(tmp_path / "c.json", Results(META, [make_row(impl="humming")]))
    for arguments, message in (
        (["a.json", "b.json"], "this run is 'another'"),
        (["c.json"], "no rows of sparse_marlin"),
        (["a.json", "--readme", "--dtype", "bfloat16"], "the files have rows of ours for float16"),
        (["none.json"], "cannot be read"),
        (["a.json", "--peers", "none.json"], "cannot be read"),
        (["a.json", "--peers", "b.json"], "a run beside others is of another, the results of NVIDIA H200"),
    ):
        with pytest.raises(SystemExit, match="2"):
            plot.main([str(tmp_path / a) if a.endswith(".json") else a for a in arguments])
        assert message in capsys.readouterr().err
