"""The whole model: what is built, that a step is a step, and the program on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import model
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from sparse_marlin import CompressedLinear, Scheme

CPU = torch.device("cpu")


def test_readme_shows_the_committed_results(readme_shows: Callable[..., None]) -> None:
    committed = Path(model.__file__).parent / "results" / "h200" / "model-llama3-8b.json"
    readme_shows(lambda: model.main(["--readme", str(committed)]), f"bench/model.py --readme {committed}")


def test_readme_has_the_weights_side_by_side() -> None:
    def row(weights: str, mode: str, step: float) -> dict[str, Any]:
        return asdict(model.Measurement("m", "float16", weights, mode, 2, 8, 10.0, 1600.0, step, 2e3 / step, 1.0))

    rows = [row("16-bit", "eager", 20.0), row("16-bit", "graph", 2.0), row("2:4", "graph", 1.0)]
    meta = {"model": "m", "dtype": "float16", "bits": 4, "group_size": 128, "weights_gb": {"16-bit": 3.0}, "gpu": "G"}
    meta |= {"commit": "c", "date": "2026-01-02T", "versions": {"torch": "2", "transformers": "5"}}
    text = model.text_of({"meta": meta, "rows": rows})
    assert "| eager | 2 | 8 | 20.00 |  |  | 10.0 |  |  |\n| graph | 2 | 8 | 2.00 |  | 1.00 | 10.0 |  | 10.0 |" in text
    assert "included: 16-bit 3.0. G, float16, INT4 group 128" in text


@pytest.fixture
def config() -> LlamaConfig:
    return LlamaConfig(**model.MODELS["tiny"], tie_word_embeddings=False)


@pytest.mark.parametrize("sparsity", [None, "2:4"])
def test_build(config: LlamaConfig, sparsity: str | None) -> None:
    scheme = Scheme(4, 128, "2:4" if sparsity else None)
    built = model.build(config, scheme, torch.float16, CPU)
    layers = [m for m in built.modules() if isinstance(m, CompressedLinear)]
    assert len(layers) == 2 * 7
    assert {m.scheme.sparsity for m in layers} == {sparsity}
    assert type(built.lm_head) is nn.Linear and built.lm_head.weight.dtype == torch.float16
    assert not any(t.is_meta for t in [*built.parameters(), *built.buffers()])
    assert built.model.rotary_emb.inv_freq.dtype == torch.float32  # values that are computed, and not rounded
    logits = built(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 256) and torch.isfinite(logits).all() and float(logits.std()) > 0


def test_original(config: LlamaConfig) -> None:
    built = model.build(config, None, torch.float16, CPU)
    assert sum(type(m) is nn.Linear for m in built.modules()) == 2 * 7 + 1
    dense = model.build(config, Scheme(4, 128, None), torch.float16, CPU)
    sparse = model.build(config, Scheme(4, 128, "2:4"), torch.float16, CPU)
    assert model.weight_bytes(sparse) < model.weight_bytes(dense) < model.weight_bytes(built)


def test_group_size_fits(config: LlamaConfig) -> None:
    config.intermediate_size = 192
    built = model.build(config, Scheme(4, 128, None), torch.float16, CPU)
    layers = {n: m.scheme.group_size for n, m in built.named_modules() if isinstance(m, CompressedLinear)}
    assert layers["model.layers.0.mlp.down_proj"] == 64 and layers["model.layers.0.mlp.up_proj"] == 128


@torch.no_grad()
def test_caches_agree(config: LlamaConfig) -> None:
    """A step with the static cache is the step with the growing one, and sees all tokens before it."""
    built = model.build(config, Scheme(4, 128, "2:4", dtype=torch.float32), torch.float32, CPU)
    growing, static = (model.Decoder(built, 2, 8, 4, mode) for mode in ("eager", "graph"))
    torch.testing.assert_close(growing.prefill(), static.prefill())
    for d in (growing, static):
        d.step()
        d.step()
    last = [d._call(built, d.next, d.position) for d in (growing, static)]
    torch.testing.assert_close(last[0], last[1], rtol=1e-4, atol=1e-5)
    whole = built(torch.cat([growing.tokens, *[growing.next] * 3], 1), use_cache=False, logits_to_keep=1).logits
    torch.testing.assert_close(last[0], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_lengths_are_visited_before_they_are_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that grows has another length in each step, and what is planned for a length is no part of its step."""
    now, length, seen = 0.0, 0, set[int]()

    class Decoder:
        steps = 4
        cache: object = None

        def __init__(self) -> None:
            self.mode = mode

        def prefill(self) -> None:
            nonlocal length, now
            assert self.cache is None, "two caches at a time"
            length, self.cache = 8, object()
            now += 3e-3

        def step(self) -> None:
            nonlocal length, now
            length += 1
            now += 1e-3 if length in seen or mode == "graph" else 50e-3
            seen.add(length)

        def prepare(self) -> Callable[[], None]:
            prepared.append(length)
            for _ in range(3):
                self.step()
            return self.step

    prepared: list[int] = []
    monkeypatch.setattr(model.time, "perf_counter", lambda: now)
    prefill, step = model.measure(Decoder(), lambda: None)  # type: ignore[arg-type]
    assert prefill == pytest.approx(3) and step == pytest.approx(1)
    assert prepared == [8] * (2 if mode == "eager" else 1)  # compiling and capturing are not done twice
    assert length == 8 + 3 + Decoder.steps


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    arguments = ["--model", "tiny", "--batch", "1", "3", "--prompt", "8", "--modes", "eager", "--steps", "2"]
    assert model.main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert [(r["weights"], r["batch"]) for r in data["rows"]] == [
        (w, b) for w in ("16-bit", "dense", "2:4") for b in (1, 3)
    ]
    for r in data["rows"]:
        assert r["decode_tokens_per_s"] == pytest.approx(1e3 * r["batch"] / r["decode_ms"], rel=1e-3)
        assert r["prefill_tokens_per_s"] == pytest.approx(1e3 * r["batch"] * 8 / r["prefill_ms"], rel=1e-3)
    meta = data["meta"]
    assert set(meta["weights_gb"]) == {"16-bit", "dense", "2:4"} and meta["failed"] == []
    assert meta["command"].startswith("python bench/model.py --model tiny")
    out = capsys.readouterr().out
    assert "step ms 2:4" in out and "x)" in out


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    arguments = ["--model", "tiny", "--prompt", "8", "--modes", "eager", "--steps", "1", "--device", "cpu"]
    arguments += ["--json", str(path), "--resume"]
    assert model.main([*arguments, "--batch", "1", "--weights", "dense"]) == 0
    first = json.loads(path.read_text())["rows"]
    assert model.main([*arguments, "--batch", "1", "2", "--weights", "dense", "2:4"]) == 0
    data = json.loads(path.read_text())
    assert data["rows"][:1] == first  # kept to the last digit
    assert [(r["weights"], r["batch"]) for r in data["rows"][1:]] == [("dense", 2), ("2:4", 1), ("2:4", 2)]
    assert set(data["meta"]["weights_gb"]) == {"dense", "2:4"}
    path.write_text(json.dumps({**data, "meta": {**data["meta"], "group_size": 32}}))
    with pytest.raises(SystemExit, match="2"):
        model.main([*arguments, "--batch", "1"])
    assert "results of group_size 32, this run is 128" in capsys.readouterr().err
    path.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        model.main([*arguments, "--batch", "1"])
    assert "holds no results of this program" in capsys.readouterr().err


def test_runs_beside_each_other_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    arguments = ["--model", "tiny", "--prompt", "8", "--modes", "eager", "--steps", "1", "--device", "cpu"]
    arguments += ["--json", str(path), "--resume"]

    def failed(weights: str, batch: int) -> dict[str, Any]:
        return {"weights": weights, "mode": "eager", "batch": batch, "prompt": 8, "reason": "out of memory"}

    assert model.main([*arguments, "--batch", "1", "--weights", "2:4"]) == 0
    data = json.loads(path.read_text())
    data["meta"]["failed"] = [failed("dense", 1), failed("2:4", 3)]  # the first of these works now
    path.write_text(json.dumps(data))
    assert model.main([*arguments, "--batch", "1", "--weights", "dense"]) == 0
    merged = json.loads(path.read_text())
    assert [r["weights"] for r in merged["rows"]] == ["dense", "2:4"] and merged["rows"][1:] == data["rows"]
    assert merged["meta"]["failed"] == [failed("2:4", 3)]
    assert set(merged["meta"]["weights_gb"]) == {"dense", "2:4"}


def test_failures_do_not_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = model.measure

    def measure(decoder: model.Decoder, synchronize: object) -> tuple[float, float]:
        if decoder.batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return original(decoder, lambda: None)

    monkeypatch.setattr(model, "measure", measure)
    path = tmp_path / "m.json"
    arguments = ["--model", "tiny", "--batch", "2", "1", "--prompt", "4", "--modes", "eager", "--steps", "1"]
    assert model.main([*arguments, "--device", "cpu", "--weights", "dense", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert [r["batch"] for r in data["rows"]] == [1]
    assert "out of memory" in data["meta"]["failed"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama3-8"], "no model 'llama3-8': did you mean llama3-8b"),
        (["--model", "llama3-8b"], "llama3-8b needs a GPU"),
        (["--model", "tiny", "--batch", "0"], "--batch must be 1 or more, got 0"),
        (["--model", "tiny", "--steps", "0"], "--steps must be 1 or more"),
        (["--model", "tiny", "--modes", "graph"], "graph needs a GPU"),
        (["--model", "tiny", "--resume"], "--resume needs --json FILE"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        model.main([*arguments, "--device", "cpu"])
    assert message in capsys.readouterr().err
