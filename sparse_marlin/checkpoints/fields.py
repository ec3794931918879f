"""Values of a config that a tool wrote: from closed sets only, with errors that say what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .words import check_bits

__all__ = ["bits", "choice", "flag", "group_size", "reject"]


def choice(config: Mapping[str, Any], key: str, allowed: tuple[object, ...], default: object = ...) -> Any:
    """``config[key]``, one of ``allowed``; strings are compared without regard to case."""
    value = config.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if not any(type(value) is type(a) and value == a for a in allowed):
        got = "nothing" if value is ... else repr(value)
        raise ValueError(f"{key} must be one of {', '.join(map(str, allowed))}, got {got}")
    return value


def flag(config: Mapping[str, Any], key: str, default: object = ...) -> bool:
    return bool(choice(config, key, (True, False), default))


def bits(config: Mapping[str, Any], *keys: str, default: object = ...) -> int:
    """Bits per weight, under the first of ``keys`` that is there."""
    return check_bits(_first(config, keys, default))


def group_size(config: Mapping[str, Any], *keys: str) -> int:
    """Columns per scale, under the first of ``keys`` that is there: -1 (or null) for all, or a positive number."""
    value = _first(config, keys, ...)
    value = -1 if value is None else value
    if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
        raise ValueError(f"{keys[0]} must be -1 or a positive number, got {value!r}")
    return value


def reject(config: Mapping[str, Any], why: str, *keys: str) -> None:
    """Raises ValueError if one of these is set."""
    for key in keys:
        if config.get(key) not in (None, False, {}, []):
            raise ValueError(f"{key} is {config[key]!r:.80}: {why}")


def _first(config: Mapping[str, Any], keys: tuple[str, ...], default: object) -> Any:
    for key in keys:
        if key in config:
            return config[key]
    if default is ...:
        raise ValueError(f"{keys[0]} is missing from the quantization config")
    return default
