"""Adapters as a LoRA: what the files hold, what PEFT makes of them, and that no conversion drops them silently."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from safetensors.torch import load_file
from torch import nn

import sparse_marlin
from sparse_marlin import CompressedLinear, compress
from sparse_marlin.checkpoints import TARGETS, convert, export_lora
from sparse_marlin.cli import main

both_bits = pytest.mark.parametrize("bits", [4, 16])


def model_with_adapters(bits: int, dtype: torch.dtype = torch.float32) -> Any:
    """Two ranks, and layers without an adapter."""
    torch.manual_seed(1)
    model = saved.llama(dtype)
    ranks = {"q_proj": 16, "k_proj": 0, "down_proj": 8}
    for name, m in list(model.named_modules()):
        if type(m) is nn.Linear and "layers" in name:
            rank = ranks.get(name.rpartition(".")[2], 16)
            saved.replace(model, name, compress(m, group_size=64, adapter_rank=rank, adapter_bits=bits))
    return model


def dense_twin(model: Any, adapters: bool) -> Any:
    """The model with ordinary Linears: of what the layers multiply by, or of the compressed weights alone."""
    twin = copy.deepcopy(model)
    for name, m in model.named_modules():
        if isinstance(m, CompressedLinear) and ".adapter." not in name:
            linear = nn.Linear(m.in_features, m.out_features, bias=False)
            linear.weight.data = m.dequantize() if adapters else m.packed.dequantize()
            saved.replace(twin, name, linear)
    return twin


@both_bits
def test_the_files_hold_what_the_layers_add(bits: int, tmp_path: Path) -> None:
    model = model_with_adapters(bits)
    export_lora(model, tmp_path / "lora")
    assert sorted(p.name for p in (tmp_path / "lora").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    names = {n for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.adapter is not None}
    assert len(names) == 12 and set(config["target_modules"]) == names
    assert set(tensors) == {f"base_model.model.{n}.lora_{f}.weight" for n in names for f in "AB"}
    for name in names:
        layer = model.get_submodule(name)
        a, b = (tensors[f"base_model.model.{name}.lora_{f}.weight"] for f in "AB")
        assert a.dtype == b.dtype == torch.float16
        rank = config["rank_pattern"].get(name, config["r"])
        assert config["alpha_pattern"].get(name, config["lora_alpha"]) == rank == layer.adapter.scheme.rank
        assert a.shape == (rank, layer.in_features) and b.shape == (layer.out_features, rank)
        difference = b.float() @ a.float() - layer.adapter.dequantize()
        assert difference.norm() <= (0 if bits == 16 else 1e-3) * layer.adapter.dequantize().norm()


@both_bits
def test_peft_computes_the_same(bits: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: it is no dependency, and only reads this")
    model = model_with_adapters(bits)
    export_lora(model, tmp_path / "lora")
    base = dense_twin(model, adapters=False)
    alone = saved.logits(base)
    with_lora = peft.PeftModel.from_pretrained(base, str(tmp_path / "lora")).eval()
    wanted = saved.logits(dense_twin(model, adapters=True))
    assert (saved.logits(with_lora) - wanted).norm() < (1e-3 if bits == 16 else 5e-3) * wanted.norm()  # float16 factors
    assert (alone - wanted).norm() > 0.05 * wanted.norm()


@both_bits
@pytest.mark.parametrize("to", TARGETS)
def test_converting_splits_them_off_or_refuses(bits: int, to: Any, tmp_path: Path) -> None:
    model = model_with_adapters(bits)
    sparse_marlin.save(model, tmp_path / "own")
    with pytest.raises(ValueError, match=r"12 layers have low-rank adapters.*q_proj.*--lora DIR.*adapter_rank=0"):
        convert(tmp_path / "own", tmp_path / "out", to, progress=False)
    for lora in ("out", "out/lora"):
        with pytest.raises(ValueError, match="must be two directories"):
            convert(tmp_path / "own", tmp_path / "out", to, lora=tmp_path / lora, progress=False)
    with pytest.raises(FileExistsError, match="own exists already"):
        convert(tmp_path / "own", tmp_path / "out", to, lora=tmp_path / "own", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["own"]

    convert(tmp_path / "own", tmp_path / "out", to, lora=tmp_path / "lora", progress=False)
    export_lora(model, tmp_path / "direct")
    for file in (tmp_path / "direct").iterdir():
        written = (tmp_path / "lora" / file.name).read_bytes()
        assert written == file.read_bytes()
    converted = sparse_marlin.load(tmp_path / "out")
    for name, m in model.named_modules():
        if isinstance(m, CompressedLinear) and ".adapter." not in name:
            other = converted.get_submodule(name)
            assert other.adapter is None and torch.equal(other.dequantize(), m.packed.dequantize())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct", "lora", "out", "own"]


def test_models_without_adapters(tmp_path: Path) -> None:
    model = saved.compress_blocks(saved.llama())
    with pytest.raises(ValueError, match=r"no layer of this model has an adapter.*adapter_rank="):
        export_lora(model, tmp_path / "lora")
    sparse_marlin.save(model, tmp_path / "own")
    with pytest.raises(ValueError, match="no layer has an adapter: leave lora out"):
        convert(tmp_path / "own", tmp_path / "out", lora=tmp_path / "lora", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another path"):
        export_lora(model_with_adapters(16), tmp_path / "lora")
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        export_lora(model_with_adapters(16), tmp_path / "no" / "lora")
    assert [p.name for p in (tmp_path / "lora").iterdir()] == ["notes"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    saved.llama().save_pretrained(tmp_path / "model")
    saved.tokenizer().save_pretrained(tmp_path / "model")
    source, own, out, lora = (str(tmp_path / name) for name in ("model", "own", "out", "lora"))
    options = ["--samples", "2", "--sequence-length", "8", "--group-size", "32", "--adapter-bits", "4"]
    assert main(["compress", source, own, *options, "--adapter-rank", "65"]) == 1
    assert "rank 65 is larger" in capsys.readouterr().err
    assert main(["compress", source, own, *options, "--adapter-rank", "-0.5"]) == 1
    assert "adapter_rank must be" in capsys.readouterr().err
    assert main(["compress", source, own, *options, "--adapter-rank", "0.1"]) == 0
    assert "adapters add" in capsys.readouterr().out
    assert main(["inspect", own]) == 0
    assert "rank 16 INT4" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", own, out, "--to", "pack-quantized"]) == 1
    assert "--lora DIR" in capsys.readouterr().err
    assert main(["convert", own, out, "--to", "pack-quantized", "--lora", lora]) == 0
    assert f"its adapters in {lora}" in " ".join(capsys.readouterr().out.replace("\n", "").split())
