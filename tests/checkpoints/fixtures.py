"""The checkpoints in tests/data/checkpoints: what the tools made, and what they make of it themselves."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparse_marlin import CompressedLinear

DATA = Path(__file__).parent.parent / "data" / "checkpoints"
UNREADABLE = ("gptq-3bit",)
ALL = sorted(p.name for p in DATA.iterdir() if (p / "reference.json").is_file() and p.name not in UNREADABLE)
FLOATING = ("ct-bitmask", "ct-dense-24")  # nothing in these is quantized
QUANTIZED = [name for name in ALL if name not in FLOATING]
TOKENS = torch.arange(12).unsqueeze(0)


def reference(name: str) -> Any:
    return json.loads((DATA / name / "reference.json").read_text())


def copy(name: str, to: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(DATA / name, to)
    return to


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"})


def edit_config(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def dequantized(model: nn.Module, layer: str, dtype: torch.dtype) -> Tensor:
    m = model.get_submodule(layer)
    return m.dequantize(dtype) if isinstance(m, CompressedLinear) else m.weight.detach().to(dtype)


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(model: nn.Module, expected: dict[str, Any]) -> dict[str, str]:
    """Hashes of the weights of the layers that a reference lists, in the precision that it gives."""
    return {layer: digest(dequantized(model, layer, getattr(torch, e["dtype"]))) for layer, e in expected.items()}


def twin(model: nn.Module, dtypes: dict[str, torch.dtype]) -> nn.Module:
    """The model with ordinary Linears that hold the dequantized weights, in place."""
    for layer, dtype in dtypes.items():
        m = model.get_submodule(layer)
        weight = dequantized(model, layer, dtype).float()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=m.bias is not None)
        linear.weight.data = weight
        if m.bias is not None:
            linear.bias.data = m.bias.data.float()
        parent, _, leaf = layer.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
    return model
