"""Exports the fixtures as pack-quantized, and records the exports that compressed-tensors reads as they are meant.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1
    VENV/bin/pip install --editable .
    VENV/bin/python tests/data/checkpoints/check_export.py

``export.json`` gets the hash of each exported file and its config, once compressed-tensors decompresses it to exactly
the weights of the source, and transformers to a model with the same logits. The tests hold every export against it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import common
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from sparse_marlin.checkpoints import convert


@torch.no_grad()
def check(source: Path, out: Path) -> dict[str, object]:
    convert(source, out, "pack-quantized", progress=False)
    reference = json.loads((source / "reference.json").read_text())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    # Dequantizing while it loads, transformers takes the first of the config's groups for every layer; and keeping them
    # compressed, it has no room for packed zero points. Each export can be read in one of the two ways.
    alike = len(config["config_groups"]) == 1
    options = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if alike else {}
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto", **options)
    state = model.state_dict()
    for layer, expected in reference["weights"].items():
        module = model.get_submodule(layer)
        if not alike:
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            weight = PackedQuantizationCompressor.decompress(tensors, module.quantization_scheme)["weight"]
            state[f"{layer}.weight"] = weight
        assert common.digest(state[f"{layer}.weight"].detach()) == expected["sha256"], f"{source.name}: {layer} differs"
    without_storage = json.loads((source / "config.json").read_text())
    del without_storage["quantization_config"]
    twin = common.LlamaForCausalLM(common.LlamaConfig.from_dict(without_storage)).float().eval()
    twin.load_state_dict({n: state[n] for n in twin.state_dict()})
    logits = twin(torch.arange(common.TOKENS).unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, torch.tensor(reference["logits"]), rtol=0, atol=1e-4)
    return {
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "quantization_config": config,
    }


def main() -> None:
    known = {}
    for source in sorted(p for p in common.HERE.iterdir() if (p / "reference.json").is_file()):
        if "actorder" in source.name or source.name in ("gptq-3bit", "ct-bitmask", "ct-dense-24"):
            continue  # these are refused
        with tempfile.TemporaryDirectory() as scratch:
            known[source.name] = check(source, Path(scratch) / "out")
        print(source.name, "is read as it is meant")
    (common.HERE / "export.json").write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
