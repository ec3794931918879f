"""Loading and saving compressed models. Every format is a module with ``recognise`` and ``load``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from . import native
from .files import CONFIG_NAME, CheckpointError, read_json
from .native import save

__all__ = ["CheckpointError", "load", "save"]

# Asked in this order whether they know a config.json.
_FORMATS = (native,)


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
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: a checkpoint is one, with {CONFIG_NAME} in it")
    config = read_json(path / CONFIG_NAME)
    for checkpoint_format in _FORMATS:
        if checkpoint_format.recognise(config):
            return checkpoint_format.load(path, config, dtype=dtype, device=device)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    found = (
        "has no quantization_config: the model is not compressed" if method is None else f"has quant_method {method!r}"
    )
    raise CheckpointError(f"{path / CONFIG_NAME} {found}; this version reads {native.QUANT_METHOD!r}")
