"""Converts a whole model of marlin-24, and compares it with its dequantized twin: weights to the bit, greedy tokens.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.14.0.1
    VENV/bin/python tests/data/checkpoints/check_marlin24.py make MODEL FOLDER
    python tests/data/checkpoints/check_marlin24.py compare FOLDER          where sparse_marlin is installed

MODEL is a dense checkpoint, such as the one that ``sparse_marlin.samples.sample_model()`` puts into the cache. ``make``
writes FOLDER/marlin-24, by compressed-tensors in the last version that writes it, and FOLDER/twin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import common
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT, NEW_TOKENS = "The history of computing begins with", 16


@torch.no_grad()
def make(source: Path, folder: Path) -> None:
    import make_compressed_tensors as tool
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle import apply_quantization_config

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    twin = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    common.prune_24(model)
    groups = {"group_0": tool.scheme(["Linear"], 4, -1)}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="marlin-24")
    apply_quantization_config(model, config)
    for name, module in common.linears(model).items():
        weights = module.quantization_scheme.weights
        tool.set_parameters(module, weights)
        twin.get_submodule(name).weight.data.copy_(tool.reference(module, weights, torch.float16))
    twin.save_pretrained(folder / "twin")
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="marlin-24")
    compressor.compress_model(model)
    model.save_pretrained(folder / "marlin-24", max_shard_size="20MB")
    compressor.update_config(folder / "marlin-24")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "marlin-24")


@torch.no_grad()
def compare(folder: Path) -> None:
    import sparse_marlin

    source = folder / "marlin-24"
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    twin = AutoModelForCausalLM.from_pretrained(folder / "twin", dtype=torch.float32).eval()
    expected = twin.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(expected[0]))
    paths = [source]
    for target in ("sparse-marlin", "pack-quantized"):
        paths.append(folder / target)
        if not paths[-1].exists():
            sparse_marlin.convert(source, paths[-1], target)
    for path in paths:
        model = sparse_marlin.load(path)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, sparse_marlin.CompressedLinear)}
        for name, layer in layers.items():
            weight = layer.dequantize(torch.float16).float()
            assert torch.equal(weight, twin.get_submodule(name).weight), f"{path.name}: other weights in {name}"
        tokens = model.float().generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(tokens, expected), f"{path.name}: other tokens, {tokenizer.decode(tokens[0])}"
        print(f"{path.name}: {len(layers)} layers with the twin's weights, {NEW_TOKENS} greedy tokens equal")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    elif len(sys.argv) == 3 and sys.argv[1] == "compare":
        compare(Path(sys.argv[2]))
    else:
        raise SystemExit(__doc__)
