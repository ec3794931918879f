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
ADAPTER_BITS = (4, 16)


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


@dataclass(frozen=True)
class AdapterScheme:
    """How the low-rank adapter of a compressed weight [N, K] is stored: ``b @ a`` is added to the weight.

    Attributes:
        rank: R of the factors a [R, K] and b [N, R].
        num_bits: 16: both factors in floating point, in the precision of the weight's scheme. 4: both as dense
            symmetric INT4 weights, with 128 columns per scale where that fits.

    Raises:
        ValueError: for a rank that is no positive integer, or another number of bits.
    """

    rank: int
    num_bits: int = 16

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"the rank of an adapter must be a positive integer, got {self.rank!r}")
        _require("adapter_bits", self.num_bits, ADAPTER_BITS)

    def factor(self, in_features: int, dtype: torch.dtype) -> Scheme | None:
        """The scheme of a factor with ``in_features`` columns, its scales in ``dtype``; None for floating point."""
        return None if self.num_bits == 16 else Scheme(4, 128, None, dtype=dtype).fit(in_features)

    def why_not(self, out_features: int, in_features: int) -> str | None:
        """Why a weight ``[out_features, in_features]`` cannot have such an adapter, or ``None`` if it can."""
        if self.rank > min(out_features, in_features):
            return (
                f"an adapter of rank {self.rank} is larger than the weight [{out_features}, {in_features}]: "
                "use a smaller adapter_rank, or a fraction such as 0.1"
            )
        return None

    def bits_per_weight(self, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """Stored bits per weight of the layer that the adapter belongs to, scales included."""
        bits = 0.0
        for rows, columns in ((self.rank, in_features), (out_features, self.rank)):
            scheme = self.factor(columns, dtype)
            each = torch.finfo(dtype).bits if scheme is None else scheme.bits_per_weight(columns)
            bits += rows * columns * each
        return bits / (out_features * in_features)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, the inverse of :meth:`from_dict`."""
        return {"rank": self.rank, "num_bits": self.num_bits}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> AdapterScheme:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ValueError: for missing or unknown keys, or values outside the closed sets.
        """
        if not isinstance(d, dict) or set(d) != {"rank", "num_bits"}:
            raise ValueError(f"an adapter needs exactly the keys ['num_bits', 'rank'], got {d!r:.80}")
        return cls(d["rank"], d["num_bits"])

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" INT{self.num_bits}" if self.num_bits < 16 else "")


def _require(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # `in` alone would accept True for 1 and 4.0 for 4, and fail on unhashable values only later.
    if not any(type(value) is type(a) and value == a for a in allowed):
        choices = ", ".join(str(a).removeprefix("torch.") for a in allowed)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
