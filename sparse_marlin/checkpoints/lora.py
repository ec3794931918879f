"""Adapters as a LoRA in the files of PEFT, for engines that hold weights of other formats but can add a LoRA to them.

``adapter_model.safetensors`` holds ``base_model.model.<module>.lora_A.weight`` [R, K] and ``...lora_B.weight`` [N, R],
``adapter_config.json`` what PEFT's ``LoraConfig`` needs. Every module's scaling ``lora_alpha / r`` is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import Adapter, compressed_layers
from .files import check_free, whole_directory, write_file, write_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def export_lora(model: nn.Module, path: str | Path) -> None:
    """Writes the adapters of a model as a LoRA that PEFT, and what reads its files, can load.

    It belongs to the compressed weights without their adapters: to what ``packed.dequantize()`` of each layer gives, or
    to the checkpoint that ``convert(..., lora=)`` writes beside it.

    Args:
        model: a model with compressed layers, some of which have an adapter. INT4 factors are dequantized.
        path: directory to write; its parent must exist, and it must not, or be empty.

    Raises:
        ValueError: if no layer has an adapter.
        FileExistsError: if something is at ``path``.
    """
    layers = compressed_layers(model)
    adapters = {name: (m.adapter, m.scheme.dtype) for name, m in layers.items() if m.adapter is not None}
    if not adapters:
        raise ValueError("no layer of this model has an adapter: compress it with adapter_rank=")
    write_lora(Path(path), adapters)


def write_lora(path: Path, adapters: Mapping[str, tuple[Adapter, torch.dtype]]) -> None:
    """Writes adapters, each in the dtype beside it. The directory appears whole or not at all."""
    check_free(path)
    tensors: dict[str, Tensor] = {}
    for name, (adapter, dtype) in adapters.items():
        a, b = adapter.factors()
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    with whole_directory(path) as scratch:
        write_json(scratch / CONFIG_NAME, _config({name: a.scheme.rank for name, (a, _) in adapters.items()}))
        write_file(scratch / WEIGHTS_NAME, tensors, tensors)


def _config(ranks: Mapping[str, int]) -> dict[str, Any]:
    largest = max(ranks.values())
    smaller = {name: rank for name, rank in ranks.items() if rank != largest}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": None,
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
