"""AWQ checkpoints in the GEMM layout, as AutoAWQ, GPTQModel and llm-awq's converters write them.

Of a Linear with N output channels, K input columns and G groups, always with 4 bits:

===========  ====================  ==============================================================
``qweight``  [K, N / 8] int32      nibble i of a word is output channel 8 * word + 2 * (i % 4) + i // 4
``qzeros``   [G, N / 8] int32      zero points in the same order
``scales``   [G, N] float          w = (integer - zero) * scale
===========  ====================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..packed import PackedWeight, pack_nibbles
from ..scheme import Scheme
from . import fields
from .reading import Expected, Format, Layout, Slot, StoredLayer
from .words import WEIGHT_FLOATS, canonical, canonical_group, num_groups, unpack_words


def recognise(config: Mapping[str, Any]) -> bool:
    return (config.get("quantization_config") or {}).get("quant_method") == "awq"


def read_config(config: Mapping[str, Any]) -> Layout:
    q = config["quantization_config"]
    if fields.bits(q, "bits", "w_bit") != 4:
        raise ValueError("AWQ weights have 4 bits")
    for key in ("version", "format", "checkpoint_format"):
        fields.choice(q, key, ("gemm",), "gemm")
    group_size = fields.group_size(q, "group_size", "q_group_size")
    has_zeros = fields.flag(q, "zero_point", True)

    def layer(slot: Slot) -> StoredLayer | None:
        if not slot.has("qweight", "qzeros", "scales"):
            return None
        n, k = slot.out_features, slot.in_features
        if n % 8:
            raise ValueError(f"AWQ needs a multiple of 8 output channels, got {n}")
        groups = num_groups(k, group_size)
        tensors = {
            "qweight": Expected((k, n // 8), (torch.int32,)),
            "qzeros": Expected((groups, n // 8), (torch.int32,)),
            "scales": Expected((groups, n), WEIGHT_FLOATS),
        }
        scheme = Scheme(4, canonical_group(k, group_size), None, not has_zeros, slot.float_dtype("scales"))

        def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
            packed = from_awq(stored, group_size)
            if not has_zeros and not packed.scheme.symmetric:
                raise ValueError("zero_point is false in config.json, but the zero points are not all 8")
            return packed

        return StoredLayer(n, k, scheme, tensors, decode)

    return Layout(layer)


def from_awq(stored: Mapping[str, Tensor], group_size: int) -> PackedWeight:
    """The canonical weight of one layer's tensors (see the head of this module)."""
    return canonical(
        pack_nibbles(_in_order(stored["qweight"]).t().contiguous()),
        stored["scales"].t(),
        stored["qweight"].shape[0],
        4,
        group_size,
        _in_order(stored["qzeros"]).t(),
    )


def _in_order(words: Tensor) -> Tensor:
    """[R, 8 * C] uint8 integers from [R, C] words: the even ones are in the low half, the odd ones in the high half."""
    return unpack_words(words, 4).view(words.shape[0], -1, 2, 4).transpose(2, 3).reshape(words.shape[0], -1)


FORMAT = Format("awq", recognise, read_config)
