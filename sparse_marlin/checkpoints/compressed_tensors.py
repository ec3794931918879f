"""Checkpoints of compressed-tensors (llm-compressor): pack-quantized, marlin-24, sparse-24-bitmask, dense.

Of a Linear with N output channels, K input columns and G groups, ``bits`` 4 or 8 and F = 32 / bits integers per word:

======================  ========================  ===================================================================
pack-quantized
``weight_packed``       [N, ceil(K / F)] int32    integers of a row in order, low bits first
``weight_scale``        [N, G] float              w = (integer - zero) * scale
``weight_shape``        [2] int64 or int32        N, K
``weight_zero_point``   [ceil(N / F), G] int32    asymmetric only, packed along N. Before packing existed: [N, G] int8,
                                                  less the zero code
``weight_g_idx``        [K] int32                 group of each column (or -1), in older files with act-order
marlin-24               see :mod:`.marlin`
sparse-24-bitmask
``compressed``          [N, K / 2] float          the two kept weights of each quad of columns, in order
``bitmask``             [N, ceil(K / 8)] uint8    a bit per column, low bits first
``shape``               [2, 1] int64              N, K
======================  ========================  ===================================================================

Which layers are stored how is taken from the headers, and held against the config: the patterns in ``targets`` and
``ignore`` are regular expressions, and nothing that a checkpoint contains is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..packed import PackedWeight, unpack_nibbles
from ..scheme import Scheme
from . import fields
from .marlin import stored_24
from .reading import Expected, Format, Layout, Slot, StoredLayer
from .words import WEIGHT_FLOATS, as_type, canonical, canonical_group, num_groups, unpack_words

QUANT_METHOD = "compressed-tensors"

_FORMATS = ("dense", "pack-quantized", "marlin-24")
_SPARSE_FORMATS = ("dense", "sparse-24-bitmask")
_INTS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class _Args:
    """How the weights of one group of layers are quantized."""

    format: str
    num_bits: int
    group_size: int
    symmetric: bool
    g_idx: bool


def recognise(config: Mapping[str, Any]) -> bool:
    if "compression_config" in config or "sparsity_config" in config:  # their names before quantization_config
        return not config.get("quantization_config") or _is_ours(config["quantization_config"])
    return _is_ours(config.get("quantization_config"))


def _is_ours(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("quant_method") == QUANT_METHOD


def read_config(config: Mapping[str, Any]) -> Layout:
    q = config.get("quantization_config") or config.get("compression_config") or {}
    sparsity = q.get("sparsity_config") or config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise ValueError(f"sparsity_config must be an object, got {sparsity!r:.80}")
    default = fields.choice(q, "format", (*_FORMATS, "mixed-precision", *_SPARSE_FORMATS), "dense")
    sparse_format = fields.choice(sparsity, "format", _SPARSE_FORMATS, "dense")
    fields.reject(q, "a model whose keys and values are quantized cannot be run here", "kv_cache_scheme")
    fields.reject(q, "weights that are transformed cannot be run here", "transform_config")
    groups = q.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"config_groups must be an object, got {groups!r:.80}")
    args = [_read_group(name, group, default) for name, group in groups.items()]

    def layer(slot: Slot) -> StoredLayer | None:
        if slot.has("compressed", "bitmask"):
            if "sparse-24-bitmask" not in (sparse_format, default):
                raise ValueError("it is stored as a bitmask, but sparsity_config.format is not sparse-24-bitmask")
            return _bitmask(slot)
        if slot.has("scale_packed", "meta"):
            return _marlin_24(slot, args)
        if slot.has("weight_packed", "weight_scale", "weight_shape"):
            return _pack_quantized(slot, args)
        return None

    return Layout(layer)


def _read_group(name: object, group: Any, default: str) -> _Args:
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        raise ValueError(f"config_groups.{name} must be an object with weights, got {group!r:.80}")
    try:
        reason = "a model whose activations are quantized cannot be run here"
        fields.reject(group, reason, "input_activations", "output_activations")
        kind = fields.choice({"format": group.get("format") or default}, "format", _FORMATS)
        fields.choice(weights, "type", ("int",), "int")
        fields.choice(weights, "dynamic", (False,), False)
        strategy = fields.choice({"strategy": weights.get("strategy") or "group"}, "strategy", ("group", "channel"))
        size = -1 if strategy == "channel" else fields.group_size(weights, "group_size")
        order = fields.choice(weights, "actorder", (None, False, True, "group", "weight", "static", "dynamic"), None)
        symmetric = fields.flag(weights, "symmetric", True)
        return _Args(kind, fields.bits(weights, "num_bits"), size, symmetric, order in (True, "group", "dynamic"))
    except ValueError as e:
        raise ValueError(f"config_groups.{name}: {e}") from e


def _pick(slot: Slot, args: Sequence[_Args], kind: str) -> _Args:
    """The group of the config that a layer belongs to, by its headers."""
    possible = sorted({a for a in args if a.format == kind}, key=str)
    # Where there is no choice, tensors that do not fit are reported one by one, against what they should be.
    fitting = possible if len(possible) == 1 else [a for a in possible if _fits(slot, a)]
    if fitting:
        return fitting[0]
    shapes = ", ".join(f"{leaf} {list(t.shape)}" for leaf, t in sorted(slot.stored.items()))
    said = "; ".join(str(a).removeprefix("_Args") for a in possible) or f"none has the format {kind}"
    shape = [slot.out_features, slot.in_features]
    raise ValueError(f"{shape} is stored as {shapes}, which no group in config_groups describes: {said}")


def _fits(slot: Slot, a: _Args) -> bool:
    n, k, groups = slot.out_features, slot.in_features, num_groups(slot.in_features, a.group_size)
    if a.format == "pack-quantized":
        shapes = {"weight_packed": (n, -(-k * a.num_bits // 32)), "weight_scale": (n, groups)}
    else:
        shapes = {"weight_packed": (k // 32, n * a.num_bits // 2), "scale_packed": (groups, n)}
    return (
        all(leaf in slot.stored and slot.stored[leaf].shape == shape for leaf, shape in shapes.items())
        and ("weight_zero_point" in slot.stored) == (not a.symmetric)
        and ("weight_g_idx" in slot.stored) == a.g_idx
    )


def _pack_quantized(slot: Slot, args: Sequence[_Args]) -> StoredLayer:
    n, k = slot.out_features, slot.in_features
    a = _pick(slot, args, "pack-quantized")
    groups = num_groups(k, a.group_size)
    tensors = {
        "weight_packed": Expected((n, -(-k * a.num_bits // 32)), (torch.int32,)),
        "weight_scale": Expected((n, groups), WEIGHT_FLOATS),
        "weight_shape": Expected((2,), _INTS),
    }
    if not a.symmetric:
        unpacked = slot.has("weight_zero_point") and slot.stored["weight_zero_point"].dtype == torch.int8
        tensors["weight_zero_point"] = (
            Expected((n, groups), (torch.int8,))
            if unpacked
            else Expected((-(-n * a.num_bits // 32), groups), (torch.int32,))
        )
    if a.g_idx:
        tensors["weight_g_idx"] = Expected((k,), _INTS[::-1])
    scheme = Scheme(a.num_bits, canonical_group(k, a.group_size), None, a.symmetric, slot.float_dtype("weight_scale"))

    def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
        if (shape := stored["weight_shape"].tolist()) != [n, k]:
            raise ValueError(f"weight_shape must be [{n}, {k}] for this model, got {shape}")
        return from_pack_quantized(stored, n, k, a.num_bits, a.group_size)

    return StoredLayer(n, k, scheme, tensors, decode)


def from_pack_quantized(stored: Mapping[str, Tensor], n: int, k: int, num_bits: int, group_size: int) -> PackedWeight:
    """The canonical weight [n, k] of one layer's tensors (see the head of this module)."""
    codes = as_type(stored["weight_packed"], torch.uint8)
    nbytes = -(-k * num_bits // 8)
    qweight = codes[:, :nbytes].clone()
    if k * num_bits % 8:
        qweight[:, -1] &= 15  # the canonical form pads with zeros
    zeros = stored.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int8:
        zeros = (zeros.short() + (1 << (num_bits - 1))).to(torch.uint8)
    elif zeros is not None:
        zeros = unpack_words(zeros.t(), num_bits)[:, :n].t()
    g_idx = stored.get("weight_g_idx")
    if g_idx is not None and bool((g_idx == -1).all()):
        g_idx = None
    return canonical(qweight, stored["weight_scale"], k, num_bits, group_size, zeros, g_idx)


def _marlin_24(slot: Slot, args: Sequence[_Args]) -> StoredLayer:
    a = _pick(slot, args, "marlin-24")
    # The tool compares the group size with the number of stored columns, K / 2, before it reorders the scales.
    return stored_24(slot, a.num_bits, a.group_size, ("weight_packed", "meta", "scale_packed"), 2 * a.group_size)


def _bitmask(slot: Slot) -> StoredLayer:
    n, k = slot.out_features, slot.in_features
    if k % 4:
        raise ValueError(f"a 2:4 weight needs a multiple of 4 columns, got {k}")
    tensors = {
        "compressed": Expected((n, k // 2), WEIGHT_FLOATS),
        "bitmask": Expected((n, -(-k // 8)), (torch.uint8,)),
        "shape": Expected((2, 1), _INTS),
    }

    def decode(stored: Mapping[str, Tensor]) -> Tensor:
        if (shape := stored["shape"].flatten().tolist()) != [n, k]:
            raise ValueError(f"shape must be [{n}, {k}] for this model, got {shape}")
        return from_bitmask(stored["compressed"], stored["bitmask"], k)

    return StoredLayer(n, k, None, tensors, decode)


def from_bitmask(compressed: Tensor, bitmask: Tensor, k: int) -> Tensor:
    """The floating-point weight [N, k] of its kept values [N, k / 2] and their positions [N, ceil(k / 8)]."""
    quads = unpack_nibbles(bitmask, k // 4)
    mask = (quads.unsqueeze(2) >> torch.arange(4, dtype=torch.uint8)) & 1
    if not bool((mask.sum(2) == 2).all()):
        raise ValueError("bitmask does not keep exactly two of every four weights")
    weight = compressed.new_zeros(compressed.shape[0], k)
    return weight.masked_scatter_(mask.bool().view(weight.shape), compressed.reshape(-1))


# ------------------------------------------------------------------------------------------------------------- export


def export_schemes(schemes: Mapping[str, Scheme], in_features: Mapping[str, int]) -> dict[str, Scheme]:
    """The schemes under which layers are exported: dense, and with one size of groups for all, where there is one.

    Smaller groups hold the same weights, at the price of more scales; and engines do best, some of them only, with
    models whose layers are all alike.
    """
    sizes = [s.group_size for s in schemes.values() if s.group_size != -1]
    common = min(sizes, default=-1)
    fits = common != -1 and all(in_features[name] % common == 0 for name in schemes)
    return {name: replace(s, sparsity=None, group_size=common if fits else s.group_size) for name, s in schemes.items()}


def to_pack_quantized(packed: PackedWeight, scheme: Scheme | None = None) -> dict[str, Tensor]:
    """The tensors of a canonical weight as pack-quantized; what 2:4 pruned is an integer that means zero.

    Args:
        scheme: from :func:`export_schemes`: its groups are parts of the weight's own; default: these.

    Raises:
        ValueError: for a weight that this format has no place for.
    """
    s, n, k = packed.scheme, packed.out_features, packed.in_features
    scheme = scheme or s
    if packed.g_idx is not None:
        raise ValueError(
            "its groups follow the activation order (g_idx), which compressed-tensors does not read any more: "
            "convert to sparse-marlin instead"
        )
    codes, _ = packed.unpack()
    parts = scheme.num_groups(k) // s.num_groups(k)
    tensors = {
        "weight_packed": _pack_words(codes, s.num_bits),
        "weight_scale": packed.scales.repeat_interleave(parts, 1),
        "weight_shape": torch.tensor([n, k]),
    }
    if not scheme.symmetric:
        zeros = packed.zero_point
        zeros = torch.full_like(packed.scales, s.zero_code).to(torch.uint8) if zeros is None else zeros
        if (largest := int(zeros.max())) > s.max_code:
            raise ValueError(f"its zero points reach {largest}; {s.num_bits} bits hold {s.max_code}")
        tensors["weight_zero_point"] = _pack_words(zeros.repeat_interleave(parts, 1).t(), s.num_bits).t().contiguous()
    return tensors


def _pack_words(values: Tensor, num_bits: int) -> Tensor:
    """[R, ceil(C * num_bits / 32)] int32 from [R, C] uint8."""
    values = pad(values, (0, -values.shape[1] % (32 // num_bits)))
    if num_bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return as_type(values, torch.int32)


def quantization_config(schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The block of a config.json for weights from :func:`to_pack_quantized`.

    Args:
        schemes: of every compressed layer.
        ignore: the Linears that are not compressed.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for name, s in schemes.items():
        groups.setdefault((s.num_bits, s.group_size, s.symmetric), []).append(name)
    return {
        "quant_method": QUANT_METHOD,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {
            f"group_{i}": {
                # One name for all is how engines know best that fused projections are alike.
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": symmetric,
                    "strategy": "channel" if size == -1 else "group",
                    "group_size": None if size == -1 else size,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
            for i, ((bits, size, symmetric), names) in enumerate(groups.items())
        },
    }


FORMAT = Format(QUANT_METHOD, recognise, read_config)
