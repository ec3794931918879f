"""GPTQ checkpoints, versions 1 and 2, as AutoGPTQ, GPTQModel and transformers write them.

Of a Linear with N output channels, K input columns and G groups, ``bits`` 4 or 8 and F = 32 / bits integers per word:

===========  ==================  ======================================================================
``qweight``  [K / F, N] int32    integer i of a word, in the bits from ``bits`` * i, is column F * row + i
``qzeros``   [G, N / F] int32    zero points, packed along N in the same way; version 1 stores one less
``scales``   [G, N] float        w = (integer - zero) * scale
``g_idx``    [K] int32           group of each column
===========  ==================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..packed import PackedWeight
from ..scheme import Scheme
from . import fields
from .reading import Expected, Format, Layout, Slot, StoredLayer
from .words import WEIGHT_FLOATS, as_type, canonical, canonical_group, check_bits, num_groups, unpack_words


def recognise(config: Mapping[str, Any]) -> bool:
    return (config.get("quantization_config") or {}).get("quant_method") == "gptq"


def read_config(config: Mapping[str, Any]) -> Layout:
    q = config["quantization_config"]
    version = fields.choice(
        q, "checkpoint_format" if "checkpoint_format" in q else "format", ("gptq", "gptq_v2"), "gptq"
    )
    desc_act = fields.flag(q, "desc_act", False)
    symmetric = fields.flag(q, "sym", True)
    group_size = fields.group_size(q, "group_size")
    fields.choice(q, "pack_dtype", ("int32",), "int32")
    fields.reject(
        q, "weights that are multiplied by something else as well cannot be held", "adapter", "lora", "rotation"
    )
    # Overrides for single layers are named by regular expressions, which are never run: the headers tell.
    varied = bool(q.get("dynamic"))
    bits = fields.bits(q, "bits") if not varied else None

    def layer(slot: Slot) -> StoredLayer | None:
        if not slot.has("qweight", "qzeros", "scales", "g_idx"):
            return None
        n, k = slot.out_features, slot.in_features
        num_bits, size = (bits, group_size) if bits is not None else _from_headers(slot)
        groups, per_word = num_groups(k, size), 32 // num_bits
        if k % per_word or n % per_word:
            raise ValueError(f"GPTQ needs multiples of {per_word} rows and columns, got [{n}, {k}]")
        tensors = {
            "qweight": Expected((k // per_word, n), (torch.int32,)),
            "qzeros": Expected((groups, n // per_word), (torch.int32,)),
            "scales": Expected((groups, n), WEIGHT_FLOATS),
            "g_idx": Expected((k,), (torch.int32,)),
        }
        scheme = Scheme(num_bits, canonical_group(k, size), None, symmetric, slot.float_dtype("scales"))

        def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
            packed = from_gptq(stored, num_bits, size, version == "gptq")
            if symmetric and not varied and not packed.scheme.symmetric:
                raise ValueError(
                    f"sym is true in config.json, but the zero points are not all {1 << (num_bits - 1)} as "
                    f"checkpoint_format {version} stores them: one of the two is wrong"
                )
            if packed.g_idx is not None and not desc_act and not varied:
                raise ValueError("desc_act is false in config.json, but g_idx does not run through the groups in order")
            return packed

        return StoredLayer(n, k, scheme, tensors, decode)

    return Layout(layer)


def _from_headers(slot: Slot) -> tuple[int, int]:
    """Bits and group size, by what is stored."""
    shapes = [slot.stored[leaf].shape if leaf in slot.stored else () for leaf in ("qweight", "scales")]
    if any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ValueError("qweight and scales must be stored as matrices")
    (words, _), (groups, _) = shapes
    return check_bits(32 * words // slot.in_features), -1 if groups == 1 else -(-slot.in_features // groups)


def from_gptq(stored: Mapping[str, Tensor], num_bits: int, group_size: int, minus_one: bool) -> PackedWeight:
    """The canonical weight of one layer's tensors (see the head of this module).

    Args:
        minus_one: zero points are stored as in version 1.
    """
    qzeros = stored["qzeros"]
    if minus_one:
        # Words were decremented as wholes: where a zero point is 0, the next one lent it 1, and now gets it back.
        ones = sum(1 << shift for shift in range(0, 32, num_bits))
        qzeros = (qzeros.long() + ones).to(torch.int32)
    return canonical(
        as_type(stored["qweight"].t(), torch.uint8),
        stored["scales"].t(),
        stored["g_idx"].numel(),
        num_bits,
        group_size,
        unpack_words(qzeros, num_bits).t(),
        stored["g_idx"],
    )


FORMAT = Format("gptq", recognise, read_config)
