"""The drop-in module for ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from . import ops  # noqa: F401  registers torch.ops.sparse_marlin
from .packed import TENSOR_NAMES, PackedWeight
from .scheme import Scheme


class CompressedLinear(nn.Module):
    """``y = x @ w.T + bias`` with a compressed weight, as ``torch.nn.Linear``.

    The state dict is the canonical form (see :mod:`sparse_marlin.packed`): parameters ``qweight``, ``scales`` and,
    where they apply, ``meta``, ``zero_point``, ``g_idx`` and ``bias``. ``.to(dtype)`` casts scales and bias alone; the
    dtype of the scales is the dtype of the inputs that the layer takes.

    Args:
        packed: the weight [N, K].
        bias: [N] or None, cast to the dtype of the scales.
    """

    qweight: Tensor
    scales: Tensor
    meta: Tensor | None
    zero_point: Tensor | None
    g_idx: Tensor | None
    bias: Tensor | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        if bias is not None and bias.shape != (packed.out_features,):
            raise ValueError(f"bias must be [{packed.out_features}], got {list(bias.shape)}")
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self.scheme = packed.scheme
        tensors: Mapping[str, Tensor] = packed.tensors()
        for name in TENSOR_NAMES:
            self._set(name, tensors.get(name))
        self._set("bias", None if bias is None else bias.detach().to(packed.device, packed.scales.dtype))

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, scheme: Scheme, bias: bool, g_idx: bool = False, device: str = "meta"
    ) -> CompressedLinear:
        """A layer whose tensors have the right shapes and no content yet, to load a state dict into."""
        if reason := scheme.why_not(out_features, in_features):
            raise ValueError(reason)
        n, k, groups = out_features, in_features, scheme.num_groups(in_features)
        stored = k // 2 if scheme.sparsity else k
        packed = PackedWeight(
            scheme,
            k,
            torch.empty(n, -(-stored * scheme.num_bits // 8), dtype=torch.uint8, device=device),
            torch.empty(n, groups, dtype=scheme.dtype, device=device),
            torch.empty(n, -(-k // 8), dtype=torch.uint8, device=device) if scheme.sparsity else None,
            None if scheme.symmetric else torch.empty(n, groups, dtype=torch.uint8, device=device),
            torch.empty(k, dtype=torch.int32, device=device) if g_idx else None,
        )
        return cls(packed, torch.empty(n, dtype=scheme.dtype, device=device) if bias else None)

    def _set(self, name: str, t: Tensor | None) -> None:
        self.register_parameter(name, None if t is None else nn.Parameter(t, requires_grad=False))

    @property
    def packed(self) -> PackedWeight:
        """The weight in canonical form; shares memory with this layer."""
        tensors = {n: t.data for n in TENSOR_NAMES if (t := getattr(self, n)) is not None}
        return PackedWeight.from_tensors(tensors, self.scheme, self.in_features)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] as a dense tensor, in ``dtype`` (default: that of the scales)."""
        return self.packed.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies.

        Args:
            x: [..., K], any strides. Under autocast it is cast as ``nn.Linear`` would cast it.

        Returns:
            [..., N] in the dtype of x (under autocast: the autocast dtype).

        Raises:
            ValueError: if the last dimension is not in_features, or the dtype is not the layer's outside autocast.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"the last dimension of x must be in_features = {self.in_features}, got {list(x.shape)}")
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        elif x.dtype != self.scales.dtype:
            raise ValueError(
                f"x is {x.dtype}, but this layer computes in {self.scales.dtype}: "
                "cast x, call .to(dtype) on the model, or use torch.autocast"
            )
        y: Tensor = torch.ops.sparse_marlin.linear(
            x,
            self.qweight,
            self.scales,
            self.meta,
            self.zero_point,
            self.g_idx,
            self.bias,
            self.scheme.num_bits,
            self.scheme.group_size,
        )
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.scheme}, {self.scheme.bits_per_weight(self.in_features):.3f} bits per weight"
        )
