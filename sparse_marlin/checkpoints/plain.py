"""Checkpoints with plain floating-point weights, which may be 2:4 all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import reading
from .reading import Format, Layout


def recognise(config: Mapping[str, Any]) -> bool:
    return not any(config.get(key) for key in reading.STORAGE_KEYS)


def read_config(config: Mapping[str, Any]) -> Layout:
    return Layout(lambda slot: None)


FORMAT = Format("plain", recognise, read_config)
