"""What is timed, what is extrapolated from it, and that two runs are compared bit for bit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compression_time
import model
import pytest
import torch

from sparse_marlin.compression import pipeline, refit

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "SETTING", refit.Refit(steps=2))
    monkeypatch.setitem(model.MODELS["tiny"], "num_hidden_layers", 5)


def test_missing_blocks_are_those_between_the_first_and_the_last() -> None:
    row, tensors = compression_time.measure("tiny", "one-shot", 3, 2, CPU)
    assert len(row.block_s) == 3 and row.blocks == 3 and row.layers == 5 and row.tokens == 2 * 512
    assert sum(row.block_s) <= row.total_s * 1.001
    assert row.whole_s == pytest.approx(row.total_s + 2 * row.block_s[1], rel=1e-3)
    whole = model.build(
        compression_time.LlamaConfig(**model.MODELS["tiny"], tie_word_embeddings=False), None, torch.bfloat16, CPU
    )
    missing = row.whole_peak_gb - row.peak_gb
    assert row.weights_gb + missing == pytest.approx(model.weight_bytes(whole) / 2**30, rel=0.05)
    assert row.bits_per_weight == pytest.approx(3.125)
    assert {torch.uint8, torch.bfloat16} <= {t.dtype for t in tensors}  # integers, and what stays as it was


def test_progress_that_is_not_shown_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_time.Clock, "__call__", lambda self, blocks, **options: blocks)
    with pytest.raises(RuntimeError, match="nothing was timed"):
        compression_time.measure("tiny", "one-shot", 2, 1, CPU)
    assert pipeline.tqdm is compression_time.tqdm


def test_same_bits() -> None:
    a = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
    assert compression_time.same_bits([a, a], [a.clone(), a])
    other = a.clone()
    other[0] = -1
    zeros = torch.zeros(2)
    assert not compression_time.same_bits([a], [other])
    assert not compression_time.same_bits([zeros], [-zeros])
    assert not compression_time.same_bits([zeros], [zeros.half()])
    assert not compression_time.same_bits([zeros], [zeros.view(1, 2)])
    assert not compression_time.same_bits([a], [a, a])


@pytest.mark.parametrize("differ", [False, True])
def test_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, differ: bool
) -> None:
    if differ:
        values = itertools.count(1)

        def build(*given: Any) -> torch.nn.Module:
            built = model.build(*given)
            built.lm_head.weight[0, 0] = next(values)
            return built

        monkeypatch.setattr(compression_time, "build", build)
    path = tmp_path / "c.json"
    arguments = ["--model", "tiny", "--blocks", "2", "--windows", "2", "--device", "cpu", "--json", str(path)]
    methods = ["--methods", "one-shot"] if differ else []
    assert compression_time.main([*arguments, "--repeat", *methods]) == differ
    found = json.loads(path.read_text(encoding="utf-8"))
    expected = ["one-shot"] if differ else ["one-shot", "one-shot+refit"]
    assert [r["method"] for r in found["rows"]] == expected
    assert {r["same_bits"] for r in found["rows"]} == {not differ}
    meta = found["meta"]
    assert meta["gpu"] is None and meta["group_size"] == 128 and meta["versions"]["torch"] == torch.__version__
    assert meta["command"].startswith("python bench/compression_time.py --model tiny")
    out = capsys.readouterr().out
    assert ("OTHER BITS" in out) == differ and "all 5, extrapolated" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama3-8"], "no model 'llama3-8': did you mean llama3-8b"),
        (["--model", "llama3-8b"], "llama3-8b needs a GPU"),
        (["--model", "tiny", "--blocks", "1"], "--blocks must be 2 to 5 .* got 1"),
        (["--model", "tiny", "--blocks", "6"], "got 6"),
        (["--model", "tiny", "--windows", "0"], "--windows must be 1 or more, got 0"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compression_time.main([*arguments, "--device", "cpu"])
    assert re.search(message, capsys.readouterr().err)


def test_readme_shows_the_committed_results(readme_shows: Callable[..., None]) -> None:
    committed = Path(compression_time.__file__).parent / "results" / "h200" / "compression.json"
    command = ["--readme", str(committed)]
    readme_shows(lambda: compression_time.main(command), f"bench/compression_time.py --readme {committed}")
    found = json.loads(committed.read_text(encoding="utf-8"))
    assert "gave the same bits" in compression_time.text_of(found)
    for same, said in ((None, "."), (False, "some gave OTHER bits.")):
        found["rows"][0]["same_bits"] = same
        text = compression_time.text_of(found)
        assert said in text and "gave the same bits" not in text
