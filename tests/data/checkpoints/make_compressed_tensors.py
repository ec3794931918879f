"""Makes the fixtures ct-*, by compressed-tensors itself in the last version that writes 2:4.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.14.0.1
    VENV/bin/python tests/data/checkpoints/make_compressed_tensors.py

Scales are those of the largest weight of each group. The tool cannot decompress marlin-24: the reference is what its
own quantize and dequantize make of the weights, in the precision in which it compresses them.
"""

from __future__ import annotations

import common
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import Sparse24BitMaskConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle import apply_quantization_config, dequantize, quantize
from torch import Tensor, nn


def scheme(targets: list[str], bits: int, group: int, symmetric: bool = True, actorder: str | None = None) -> object:
    strategy = "channel" if group == -1 else "group"
    weights = QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy=strategy,
        group_size=None if group == -1 else group,
        symmetric=symmetric,
        actorder=actorder,
    )
    return QuantizationScheme(targets=targets, weights=weights)


def set_parameters(module: nn.Module, args: QuantizationArgs) -> None:
    """Scales, zero points and the order of the columns, as an observer and GPTQ would set them."""
    w = module.weight.data
    n, k = w.shape
    size = args.group_size or k
    columns = torch.arange(k)
    if args.actorder:
        columns = torch.randperm(k)
        module.weight_g_idx.data.copy_(columns.argsort() // size)
    groups = w[:, columns].float().view(n, k // size, size)
    steps = 2**args.num_bits - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = groups.abs().amax(2) / (steps // 2) if args.symmetric else (high - low) / steps
    scale = scale.to(w.dtype)
    module.weight_scale.data.copy_(scale)
    if not args.symmetric:
        zero = -(2 ** (args.num_bits - 1)) - (low / scale.float()).round()
        module.weight_zero_point.data.copy_(zero.to(torch.int8))


def reference(module: nn.Module, args: QuantizationArgs, dtype: torch.dtype) -> Tensor:
    """The weight as the tool quantizes and dequantizes it."""
    scale, zero = module.weight_scale.data.to(dtype), getattr(module, "weight_zero_point", None)
    g_idx = module.weight_g_idx.data if args.actorder else None
    q = quantize(module.weight.data.to(dtype), scale, zero, args, dtype=torch.int8, g_idx=g_idx)
    return dequantize(q, scale, zero, args, g_idx=g_idx)


@torch.no_grad()
def quantized(name: str, model: nn.Module, kind: str, *schemes: object, two_four: bool = False) -> None:
    path = common.fresh(name)
    if two_four:
        common.prune_24(model)
    groups = {f"group_{i}": s for i, s in enumerate(schemes)}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=kind)
    apply_quantization_config(model, config)
    weights = {}
    for layer, module in common.linears(model).items():
        args = module.quantization_scheme.weights
        set_parameters(module, args)
        weights[layer] = reference(module, args, torch.float16 if kind == "marlin-24" else module.weight.dtype)
    plain = type(model)(model.config).to(model.dtype)
    plain.load_state_dict(model.state_dict(), strict=False)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=kind)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    common.record(path, plain, weights)


@torch.no_grad()
def sparse(name: str, model: nn.Module, *, bitmask: bool) -> None:
    path = common.fresh(name)
    common.prune_24(model)
    weights = {layer: m.weight.data.clone() for layer, m in common.linears(model).items()}
    plain = type(model)(model.config).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    config = Sparse24BitMaskConfig(
        format="sparse-24-bitmask" if bitmask else "dense",
        targets=["Linear"],
        ignore=["lm_head"],
        global_sparsity=0.5,
        registry_requires_subclass=False,
    )
    compressor = ModelCompressor(sparsity_config=config)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    common.record(path, plain, weights)


def main() -> None:
    # down_proj has K = 256, at most twice the group size: there the tool leaves scales in their order.
    quantized(
        "ct-marlin-24",
        common.llama(intermediate_size=256),
        "marlin-24",
        scheme(["Linear"], 4, 128),
        two_four=True,
    )
    quantized(
        "ct-marlin-24-channel",
        common.llama(intermediate_size=384),
        "marlin-24",
        scheme(["re:.*down_proj"], 4, 128),  # K = 384: reordered
        scheme(["Linear"], 8, -1),
        two_four=True,
    )
    small = {"hidden_size": 64, "intermediate_size": 128}
    bf16 = torch.bfloat16
    quantized("ct-pack", common.llama(bf16, **small), "pack-quantized", scheme(["Linear"], 4, 32, symmetric=False))
    quantized("ct-pack-actorder", common.llama(**small), "pack-quantized", scheme(["Linear"], 4, 32, actorder="group"))
    quantized("ct-pack-24", common.llama(**small), "pack-quantized", scheme(["Linear"], 8, -1), two_four=True)
    sparse("ct-bitmask", common.llama(bf16, **small), bitmask=True)
    sparse("ct-dense-24", common.llama(bf16, **small), bitmask=False)


if __name__ == "__main__":
    main()
