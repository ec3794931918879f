"""The ``quantization_config`` of a model's config: which modules are compressed, and how.

:mod:`sparse_marlin.checkpoints.native` shows one, and reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .linear import CompressedLinear, compressed_layers
from .scheme import AdapterScheme, Scheme

QUANT_METHOD = "sparse_marlin"
FORMAT_VERSION = 2
WITHOUT_ADAPTERS = 1  # what earlier versions of the library read too

Stored = tuple[Scheme, AdapterScheme | None]  # how a module is stored


def quantization_config(modules: Mapping[str, Stored]) -> dict[str, Any]:
    """The block of a config.json that says how the modules are compressed."""
    groups: dict[Stored, list[str]] = {}
    for name, stored in modules.items():
        groups.setdefault(stored, []).append(name)
    adapters = any(adapter is not None for _, adapter in groups)
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION if adapters else WITHOUT_ADAPTERS,
        "groups": [
            {
                "scheme": scheme.to_dict(),
                **({"adapter": None if adapter is None else adapter.to_dict()} if adapters else {}),
                "modules": names,
            }
            for (scheme, adapter), names in sorted(groups.items(), key=lambda item: -len(item[1]))
        ],
    }


def stored_as(layers: Mapping[str, CompressedLinear]) -> dict[str, Stored]:
    """How layers in memory will be stored."""
    return {name: (m.scheme, None if m.adapter is None else m.adapter.scheme) for name, m in layers.items()}


def note_in_config(model: nn.Module) -> None:
    """Makes a model's config say how its layers are compressed, so that its own ``save_pretrained`` writes that too."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    if layers := compressed_layers(model):
        config.quantization_config = quantization_config(stored_as(layers))
    elif (getattr(config, "quantization_config", None) or {}).get("quant_method") == QUANT_METHOD:
        del config.quantization_config
