"""Loading, converting and saving models. Every format is a module with a ``FORMAT``, see :mod:`.reading`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..quantization import note_in_config
from . import awq, compressed_tensors, gptq, marlin, native, plain, reading
from .conversion import TARGETS, Job, convert
from .files import CONFIG_NAME, CheckpointError, read_json
from .lora import export_lora
from .native import check_destination, save
from .reading import Checkpoint, Format

__all__ = [
    "TARGETS",
    "CheckpointError",
    "Job",
    "check_destination",
    "convert",
    "describe",
    "export_lora",
    "is_checkpoint",
    "load",
    "save",
]

# Asked in this order whether they know a config.json: Marlin's files also say that they are GPTQ's.
_FORMATS = tuple(m.FORMAT for m in (native, marlin, gptq, awq, compressed_tensors, plain))

# Older tools leave config.json as it was, and say in a file of their own how the weights are stored.
_SIDECARS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> nn.Module:
    """Loads a causal LM from a local directory, in whichever format it is.

    Everything is checked before the model is returned; nothing in the checkpoint is executed, and no code is fetched.
    Weights are read one layer at a time: the memory needed is that of the model.

    Args:
        path: the directory: one that :func:`save` wrote, GPTQ, AWQ, compressed-tensors (pack-quantized, marlin-24,
            sparse-24-bitmask), Marlin, or a plain one. Weights that are stored in floating point stay so.
        dtype: what the model computes in (float16, bfloat16 or float32); default: what config.json says.
            Tensors that :func:`save` kept in another precision than the rest of the model stay in it.
        device: where to put the model; default: the CPU.

    Returns:
        The transformers model in evaluation mode, its compressed layers as ``CompressedLinear``.

    Raises:
        CheckpointError: if this is no such checkpoint, or anything in it is missing, unexpected or damaged.
        ValueError: for a dtype that layers cannot compute in.
    """
    path = Path(path)
    checkpoint_format, config = _recognise(path)
    model = reading.load(path, config, checkpoint_format, dtype=dtype, device=device)
    note_in_config(model)
    return model


def describe(path: str | Path) -> Checkpoint:
    """Reads and checks what :func:`load` does, up to the headers: no weight is read.

    Raises:
        CheckpointError: as :func:`load`.
    """
    path = Path(path)
    checkpoint_format, config = _recognise(path)
    return reading.open_checkpoint(path, config, checkpoint_format)


def is_checkpoint(path: str | Path) -> bool:
    """Whether :func:`load` alone can load what is at ``path``, because its weights are stored in a special form."""
    try:
        return _recognise(Path(path))[0] is not plain.FORMAT
    except CheckpointError:
        return False


def _recognise(path: Path) -> tuple[Format, dict[str, Any]]:
    """The format of a checkpoint, and its config.json."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: a checkpoint is one, with {CONFIG_NAME} in it")
    file = path / CONFIG_NAME
    config = read_json(file)
    if not any(key in config for key in reading.STORAGE_KEYS):
        for name, sidecar_method in _SIDECARS.items():
            if (path / name).is_file():
                file = path / name
                config["quantization_config"] = {"quant_method": sidecar_method, **read_json(file)}
                break
    for key in reading.STORAGE_KEYS:
        if not isinstance(config.get(key), dict | None):
            raise CheckpointError(f"{file}: {key} must be an object, got {config[key]!r:.80}")
    for checkpoint_format in _FORMATS:
        if checkpoint_format.recognise(config):
            return checkpoint_format, config
    method = (config.get("quantization_config") or {}).get("quant_method")
    advice = "quantize the original model anew, for example with: sparse-marlin compress MODEL OUT"
    if method == "torchao":
        advice = "its weights are pickled objects, which are never read: " + advice
    known = ", ".join(f.name for f in _FORMATS if f is not plain.FORMAT)
    raise CheckpointError(
        f"{file} has quant_method {method!r}; this version reads {known}. To run this model, {advice}"
    )
