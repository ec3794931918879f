"""Makes the fixtures llmc-*, by llm-compressor: pack-quantized as its present versions write it.

python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0    # brings compressed-tensors 0.19.0, transformers 5.17.0
VENV/bin/python tests/data/checkpoints/make_llmcompressor.py
"""

from __future__ import annotations

import tempfile

import common
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM


def make(name: str, model: nn.Module, actorder: str | None, **weights: object) -> None:
    path = common.fresh(name)
    generator = torch.Generator().manual_seed(0)
    data = Dataset.from_list(
        [
            {"input_ids": torch.randint(0, 32, (64,), generator=generator).tolist(), "attention_mask": [1] * 64}
            for _ in range(8)
        ]
    )
    args = {"type": "int", "dynamic": False, "actorder": actorder, **weights}
    recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": args}}, ignore=["lm_head"])
    schemes: dict[str, QuantizationScheme] = {}
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=model.dtype)
        oneshot(
            model=model,
            tokenizer=common.tokenizer(),
            dataset=data,
            recipe=recipe,
            num_calibration_samples=8,
            max_seq_length=64,
        )
        for layer, m in common.linears(model).items():
            schemes[layer] = m.quantization_scheme
        plain = type(model)(model.config).to(model.dtype)
        plain.load_state_dict(model.state_dict(), strict=False)
        model.save_pretrained(path, save_compressed=True)
    stored = load_file(path / "model.safetensors")
    dequantized = {}
    for layer, scheme in schemes.items():
        tensors = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(layer + ".")}
        dequantized[layer] = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    common.record(path, plain, dequantized)


def main() -> None:
    small = {"hidden_size": 64, "intermediate_size": 128}
    make(
        "llmc-int4",
        common.llama(torch.bfloat16, **small),
        "weight",
        num_bits=4,
        strategy="group",
        group_size=32,
        symmetric=True,
    )
    make(
        "llmc-int8-asym", common.llama(**small), None, num_bits=8, strategy="channel", group_size=None, symmetric=False
    )


if __name__ == "__main__":
    main()
