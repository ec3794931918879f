"""Conversion between formats: same weights, a shard at a time, whole or not at all, and resumed where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fixtures
import pytest
import saved
import torch
from safetensors.torch import load_file

import sparse_marlin
from sparse_marlin import CompressedLinear, Scheme
from sparse_marlin.checkpoints import TARGETS, CheckpointError, conversion, convert, describe, files
from sparse_marlin.cli import main


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def shard(path: Path, sizes: int = 20_000) -> Path:
    """Splits a checkpoint into files, tensors in order of their names: layers are torn apart."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    old, files.MAX_SHARD_BYTES = files.MAX_SHARD_BYTES, sizes
    try:
        files.write_tensors(path, {name: tensors[name] for name in sorted(tensors)})
    finally:
        files.MAX_SHARD_BYTES = old
    return path


def exportable(name: str) -> bool:
    return "actorder" not in name


@pytest.mark.parametrize("name", fixtures.QUANTIZED)
@pytest.mark.parametrize("to", TARGETS)
def test_weights_stay_the_same(name: str, to: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if to == "pack-quantized" and not exportable(name):
        with pytest.raises(ValueError, match=r"cannot be stored as pack-quantized: .*g_idx"):
            convert(fixtures.DATA / name, out, to, progress=False)
        assert not list(tmp_path.iterdir())
        return
    convert(fixtures.DATA / name, out, to, progress=False)
    before, after = sparse_marlin.load(fixtures.DATA / name), sparse_marlin.load(out)
    expected = fixtures.reference(name)["weights"]
    assert fixtures.digests(after, expected) == {layer: e["sha256"] for layer, e in expected.items()}
    ours, theirs = before.state_dict(), after.state_dict()
    assert list(ours) == list(theirs)
    if to == "sparse-marlin":
        assert all(torch.equal(t, theirs[n]) and t.dtype == theirs[n].dtype for n, t in ours.items())
    for layer in expected:
        was, now = before.get_submodule(layer).scheme, after.get_submodule(layer).scheme
        assert now == (was if to == "sparse-marlin" else replace(was, group_size=now.group_size))
    assert describe(out).format == {"sparse-marlin": "sparse_marlin"}.get(to, "compressed-tensors")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", fixtures.FLOATING)
@pytest.mark.parametrize("bits", [4, 8])
def test_floating_point_2_4_is_quantized_under_its_mask(name: str, bits: int, tmp_path: Path) -> None:
    source, out = fixtures.DATA / name, tmp_path / "out"
    with pytest.raises(ValueError, match=r"not quantized.*--bits 4"):
        convert(source, out, progress=False)
    convert(source, out, bits=bits, group_size=32, progress=False)
    before, after = sparse_marlin.load(source), sparse_marlin.load(out)
    for layer in fixtures.reference(name)["weights"]:
        m = after.get_submodule(layer)
        assert m.scheme == Scheme(bits, 32, "2:4", dtype=torch.bfloat16)
        weight = before.get_submodule(layer).weight.detach()
        assert not bool((m.dequantize() != 0).logical_and(weight == 0).any())
        assert float((m.dequantize() - weight).norm() / weight.norm()) < {4: 0.12, 8: 0.01}[bits]
    assert type(after.lm_head) is torch.nn.Linear


def test_a_dense_model_is_refused_when_no_mask_is_found(tmp_path: Path) -> None:
    source = fixtures.copy("ct-dense-24", tmp_path / "m")
    fixtures.edit_tensors(source, lambda t: [v.add_(1) for v in t.values()])
    with pytest.raises(ValueError, match=r"no layer is 2:4.*sparse-marlin compress"):
        convert(source, tmp_path / "out", bits=4, progress=False)
    with pytest.raises(ValueError, match="quantized already"):
        convert(fixtures.DATA / "gptq-v1", tmp_path / "out", bits=4, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_shards_are_converted_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shard(fixtures.copy("gptq-v1", tmp_path / "m"))
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(fixtures.DATA / "gptq-v1", whole, progress=False)
    written: list[int] = []
    write = files.write_file
    monkeypatch.setattr(
        conversion, "write_file", lambda f, t, n: (written.append(sum(v.nbytes for v in t.values())), write(f, t, n))
    )
    jobs: list[Any] = []
    convert(source, out, progress=False, announce=jobs.append)
    assert len(written) == len(list(out.glob("*.safetensors"))) > 3
    assert max(written) <= jobs[0].peak_bytes
    assert 2 * max(written) < sum(written)
    assert (out / "tokenizer.json").is_file()
    assert not (out / "modeling_evil.py").exists()
    ours, theirs = sparse_marlin.load(whole).state_dict(), sparse_marlin.load(out).state_dict()
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resumed_result_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    source = shard(fixtures.copy("gptq-v2-asym", tmp_path / "m"), 12_000)
    convert(source, tmp_path / "at-once", progress=False)
    out, write, count = tmp_path / "out", files.write_file, 0

    def failing(file: Path, tensors: Any, names: Any) -> None:
        nonlocal count
        count += 1
        if count == stop:
            file.write_bytes(b"half a file")
            raise OSError("disk full")
        write(file, tensors, names)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_file", failing)
        with pytest.raises(OSError, match="disk full"):
            convert(source, out, progress=False)
    assert not out.exists()
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_file", lambda f, t, n: (again.append(f.name), write(f, t, n)))
        convert(source, out, progress=False)
    assert len(again) == len(list(out.glob("*.safetensors"))) - (stop - 1), "finished shards are not written again"
    assert contents(out) == contents(tmp_path / "at-once")


def test_another_source_does_not_continue_an_old_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shard(fixtures.copy("gptq-v1", tmp_path / "m"))
    write, count = files.write_file, 0

    def failing(file: Path, tensors: Any, names: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError("disk full")
        write(file, tensors, names)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_file", failing)
        with pytest.raises(OSError, match="disk full"):
            convert(source, tmp_path / "out", progress=False)
    other = tmp_path / "other"
    other.mkdir()
    convert(fixtures.DATA / "awq", tmp_path / "out", progress=False)
    convert(fixtures.DATA / "awq", other, progress=False)
    assert contents(tmp_path / "out") == contents(other)


def test_killed_and_started_again(tmp_path: Path) -> None:
    source = shard(fixtures.copy("ct-marlin-24", tmp_path / "m"), 8_000)
    convert(source, tmp_path / "at-once", progress=False)
    code = (
        "import sys, time; import sparse_marlin; from sparse_marlin.checkpoints import convert\n"
        "from sparse_marlin.checkpoints import conversion as m; write = m.write_file\n"
        "m.write_file = lambda *a: (write(*a), time.sleep(0.3))\n"
        f"convert({str(source)!r}, {str(tmp_path / 'out')!r}, progress=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    record = tmp_path / ".out.converting" / "progress.json"
    for _ in range(600):
        if record.is_file():
            break
        time.sleep(0.05)
    with pytest.raises(FileExistsError, match="being written by another process"):
        convert(source, tmp_path / "out", progress=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert record.is_file()
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", progress=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "at-once")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["at-once", "m", "out"]


def test_compressed_here_and_exported(tmp_path: Path) -> None:
    """What this library compressed, 2:4 and dense, 4 and 8 bits, is the same model as pack-quantized."""
    model = saved.compress_blocks(saved.llama(tie_word_embeddings=True))
    sparse_marlin.save(model, tmp_path / "own", tokenizer=saved.tokenizer())
    convert(tmp_path / "own", tmp_path / "out", "pack-quantized", progress=False)
    exported = sparse_marlin.load(tmp_path / "out")
    assert torch.equal(saved.logits(exported), saved.logits(model))
    schemes = {n: m.scheme for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    for name, scheme in schemes.items():
        assert exported.get_submodule(name).scheme.sparsity == scheme.sparsity
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {g["weights"]["group_size"] for g in config["config_groups"].values()} == {32}
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("file", "full", "link"):
        with pytest.raises(FileExistsError, match="choose another path"):
            convert(fixtures.DATA / "awq", tmp_path / name, progress=False)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        convert(fixtures.DATA / "awq", tmp_path / "no" / "parent", progress=False)
    with pytest.raises(ValueError, match="to must be one of sparse-marlin, pack-quantized"):
        convert(fixtures.DATA / "awq", tmp_path / "out", "gptq", progress=False)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "link"]


def test_damage_in_the_last_shard_leaves_nothing(tmp_path: Path) -> None:
    source = fixtures.copy("gptq-v1", tmp_path / "m")
    fixtures.edit_tensors(source, lambda t: t["model.layers.0.self_attn.v_proj.scales"].fill_(torch.nan))
    shard(source)
    with pytest.raises(CheckpointError, match=r"model-\d+-of-.*v_proj.scales holds values that are not finite"):
        convert(source, tmp_path / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_tied_head(tmp_path: Path) -> None:
    source = fixtures.copy("gptq-v1", tmp_path / "m")
    fixtures.edit_config(source, lambda c: c.update(tie_word_embeddings=True))
    fixtures.edit_tensors(source, lambda t: t.pop("lm_head.weight"))
    for to in TARGETS:
        convert(source, tmp_path / to, to, progress=False)
        model: Any = sparse_marlin.load(tmp_path / to)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    fixtures.edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    sparse_marlin.load(source)
    fixtures.edit_tensors(source, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model\.embed_tokens"):
        sparse_marlin.load(source)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(fixtures.DATA / "ct-marlin-24"), str(tmp_path / "out")
    assert main(["convert", source, out, "--to", "pack-quantized"]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"{source}: compressed-tensors, 7 compressed layers; 1 file(s) to write, about 0.00 GB")
    assert main(["inspect", out]) == 0
    assert main(["convert", source, out]) == 1
    assert "choose another path" in capsys.readouterr().err
    assert (
        main(["convert", str(fixtures.DATA / "ct-bitmask"), str(tmp_path / "b"), "--bits", "4", "--group-size", "32"])
        == 0
    )
    assert main(["convert", str(fixtures.DATA / "gptq-3bit"), str(tmp_path / "c")]) == 1
    assert "3-bit" in capsys.readouterr().err


@pytest.mark.parametrize("name", [n for n in fixtures.QUANTIZED if exportable(n)])
def test_export_is_what_compressed_tensors_has_read(name: str, tmp_path: Path) -> None:
    """tests/data/checkpoints/check_export.py has loaded these very bytes with compressed-tensors and transformers."""
    convert(fixtures.DATA / name, tmp_path / "out", "pack-quantized", progress=False)
    known = json.loads((fixtures.DATA / "export.json").read_text())[name]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest() == known["sha256"]
    assert config == known["quantization_config"]


def test_compressing_a_2_4_model_keeps_its_mask() -> None:
    """Magnitude pruning of what is 2:4 already removes nothing."""
    model = sparse_marlin.load(fixtures.DATA / "ct-bitmask")
    layers = fixtures.reference("ct-bitmask")["weights"]
    before = {layer: model.get_submodule(layer).weight.detach().clone() for layer in layers}
    tokens = torch.arange(32).view(2, 16)
    sparse_marlin.patch_model(model, "2:4", 8, 32, method="magnitude+rtn", calibration=tokens, progress=False)
    for layer, weight in before.items():
        m = model.get_submodule(layer)
        assert isinstance(m, CompressedLinear)
        assert not bool((m.dequantize() != 0).logical_and(weight == 0).any())
