"""Loading and saving compressed models. Every format is a module with ``recognise``, ``open_checkpoint``, ``load``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from . import native
from .files import CONFIG_NAME, CheckpointError, read_json
from .native import check_destination, save

__all__ = ["CheckpointError", "check_destination", "describe", "is_checkpoint", "load", "save"]

# Asked in this order whether they know a config.json.
_FORMATS: tuple[ModuleType, ...] = (native,)


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> nn.Module:
    """Loads a compressed causal LM from a local directory.

    Everything is checked before the model is returned; nothing in the checkpoint is executed, and no code is fetched.
    Weights are read one tensor at a time, straight onto ``device``: the memory needed is that of the model.

    Args:
        path: the directory that :func:`save` wrote.
        dtype: what the model computes in (float16, bfloat16 or float32); default: what it computed in when saved.
            Tensors that were kept in another precision than the rest of the model stay in it.
        device: where to put the model; default: the CPU.

    Returns:
        The transformers model in evaluation mode, its compressed layers as ``CompressedLinear``.

    Raises:
        CheckpointError: if this is no such checkpoint, or anything in it is missing, unexpected or damaged.
        ValueError: for a dtype that layers cannot compute in.
    """
    path = Path(path)
    checkpoint_format, config = _recognise(path)
    model: nn.Module = checkpoint_format.load(path, config, dtype=dtype, device=device)
    return model


def describe(path: str | Path) -> native.Checkpoint:
    """Reads and checks what :func:`load` does, up to the headers: no weight is read.

    Raises:
        CheckpointError: as :func:`load`.
    """
    path = Path(path)
    checkpoint_format, config = _recognise(path)
    checkpoint: native.Checkpoint = checkpoint_format.open_checkpoint(path, config)
    return checkpoint


def is_checkpoint(path: str | Path) -> bool:
    """Whether :func:`load` is the way to load what is at ``path``."""
    try:
        _recognise(Path(path))
    except CheckpointError:
        return False
    return True


def _recognise(path: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The format of a checkpoint, and its config.json."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: a checkpoint is one, with {CONFIG_NAME} in it")
    config = read_json(path / CONFIG_NAME)
    for checkpoint_format in _FORMATS:
        if checkpoint_format.recognise(config):
            return checkpoint_format, config
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    found = (
        "has no quantization_config: the model is not compressed" if method is None else f"has quant_method {method!r}"
    )
    raise CheckpointError(f"{path / CONFIG_NAME} {found}; this version reads {native.QUANT_METHOD!r}")
