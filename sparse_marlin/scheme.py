"""How one weight matrix is stored: bits, group size, sparsity, symmetry and the precision of its scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Sparsity = Literal["2:4"]

NUM_BITS = (4, 8)
GROUP_SIZES = (-1, 32, 64, 128)
SPARSITIES = (None, "2:4")
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Scheme:
    """The storage scheme of one compressed weight; validated on construction, immutable afterwards.

    Attributes:
        num_bits: bits per stored integer, 4 or 8.
        group_size: consecutive input columns that share a scale: 32, 64 or 128, or -1 for one scale per output channel.
        sparsity: ``"2:4"`` (two of every four consecutive columns are kept) or ``None``.
        symmetric: integers are centred on ``2 ** (num_bits - 1)``; otherwise each group has a zero point.
            2:4 weights are always symmetric: a pruned weight is exactly zero.
        dtype: floating-point type whose precision the scales have, and in which they are saved.

    Raises:
        ValueError: for a value outside these sets, or an asymmetric 2:4 scheme.
    """

    num_bits: int = 4
    group_size: int = 128
    sparsity: Sparsity | None = "2:4"
    symmetric: bool = True
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        _require("bits", self.num_bits, NUM_BITS)
        _require("group_size", self.group_size, GROUP_SIZES)
        _require("sparsity", self.sparsity, SPARSITIES)
        _require("symmetric", self.symmetric, (True, False))
        _require("dtype", self.dtype, SCALE_DTYPES)
        if self.sparsity is not None and not self.symmetric:
            raise ValueError("a 2:4 scheme must be symmetric: pruned weights have to be exactly zero")

    @property
    def zero_code(self) -> int:
        """The stored integer that means zero in a symmetric scheme."""
        return 1 << (self.num_bits - 1)

    @property
    def max_code(self) -> int:
        """The largest stored integer."""
        return (1 << self.num_bits) - 1

    def num_groups(self, in_features: int) -> int:
        """Number of scales per output channel for a weight with ``in_features`` columns."""
        return 1 if self.group_size == -1 else in_features // self.group_size

    def group_width(self, in_features: int) -> int:
        """Number of columns that share a scale for a weight with ``in_features`` columns."""
        return in_features if self.group_size == -1 else self.group_size

    def why_not(self, out_features: int, in_features: int) -> str | None:
        """Why a weight ``[out_features, in_features]`` cannot be stored this way, or ``None`` if it can."""
        if out_features < 1 or in_features < 1:
            return f"a weight needs at least one row and one column, got [{out_features}, {in_features}]"
        if self.sparsity is not None and in_features % 4:
            return (
                f"in_features must be a multiple of 4 for 2:4 sparsity, got {in_features}: "
                "use sparsity=None or leave this layer out with skip="
            )
        if self.group_size != -1 and in_features % self.group_size:
            return (
                f"in_features must be a multiple of group_size, got {in_features} and {self.group_size}: "
                f"group_size={self.fit(in_features).group_size} would fit"
            )
        return None

    def fit(self, in_features: int) -> Scheme:
        """This scheme with the largest group size, at most its own, that divides ``in_features`` (else -1)."""
        sizes = [g for g in GROUP_SIZES[:0:-1] if g <= self.group_size and in_features % g == 0]
        return replace(self, group_size=sizes[0] if sizes else -1)

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per dense weight, scales and zero points included."""
        value = self.num_bits / 2 + 1 if self.sparsity else float(self.num_bits)
        per_group = torch.finfo(self.dtype).bits + (0 if self.symmetric else 8)
        return value + per_group / self.group_width(in_features)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, the inverse of :meth:`from_dict`."""
        return {
            "num_bits": self.num_bits,
            "group_size": self.group_size,
            "sparsity": self.sparsity,
            "symmetric": self.symmetric,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Scheme:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ValueError: for missing or unknown keys, or values outside the closed sets; nothing is evaluated.
        """
        expected = {"num_bits", "group_size", "sparsity", "symmetric", "dtype"}
        if not isinstance(d, dict) or set(d) != expected:
            raise ValueError(f"a scheme needs exactly the keys {sorted(expected)}, got {d!r}")
        dtypes = {str(t).removeprefix("torch."): t for t in SCALE_DTYPES}
        _require("dtype", d["dtype"], tuple(dtypes))
        return cls(d["num_bits"], d["group_size"], d["sparsity"], d["symmetric"], dtypes[d["dtype"]])

    def __str__(self) -> str:
        kind = "2:4 " if self.sparsity else ""
        group = "per channel" if self.group_size == -1 else f"group {self.group_size}"
        return f"{kind}INT{self.num_bits} {group}" + ("" if self.symmetric else " asymmetric")


def _require(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # `in` alone would accept True for 1 and 4.0 for 4, and fail on unhashable values only later.
    if not any(type(value) is type(a) and value == a for a in allowed):
        choices = ", ".join(str(a).removeprefix("torch.") for a in allowed)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
