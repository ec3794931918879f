"""Makes the fixtures gptq-* and awq, by GPTQModel: GPTQ in both versions, and AWQ.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0
    VENV/bin/pip install --no-deps gptqmodel==7.7.0    # asks for a newer torch than it needs
    VENV/bin/pip install accelerate datasets defuser device-smi dill jinja2 logbar maturin ninja pillow protobuf \
        pyarrow pypcre requests threadpoolctl tokenicer torchao
    VENV/bin/python tests/data/checkpoints/make_gptqmodel.py [FIXTURE ...]

Where gptqmodel finds no compiler for its extensions, its sources on PYTHONPATH serve as well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import common
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from torch import Tensor, nn


def make(name: str, model: nn.Module, **options: Any) -> None:
    if sys.argv[1:] and name not in sys.argv[1:]:
        return
    path = common.fresh(name)
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(0, 32, (64,), generator=generator).tolist(), "attention_mask": [1] * 64}
        for _ in range(16)
    ]
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        common.tokenizer().save_pretrained(base)
        work = GPTQModel.load(base, QuantizeConfig(offload_to_disk=False, **options), device="cpu", dtype=model.dtype)
        work.quantize(data, batch_size=1)
        work.save(str(path))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["meta"].pop("offload_to_disk_path", None)  # of the machine it ran on
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "quantize_config.json").unlink()
    backend = BACKEND.TORCH_AWQ if name == "awq" else BACKEND.TORCH
    loaded = GPTQModel.load(str(path), backend=backend, device="cpu", dtype=model.dtype).model
    weights = {
        layer: dequantized(m).t().contiguous().detach() for layer, m in loaded.named_modules() if hasattr(m, "qweight")
    }
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)  # AWQ changes norms too
    common.record(path, model, weights)


def dequantized(layer: Any) -> Tensor:
    if hasattr(layer, "dequantize_weight"):
        return layer.dequantize_weight()
    return dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)


def main() -> None:
    make("awq", common.llama(torch.bfloat16), bits=4, group_size=32, sym=False, quant_method="awq", format="gemm")
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    make("gptq-v1", common.llama(), bits=4, group_size=128, desc_act=False, sym=True)
    make("gptq-v1-asym-actorder", common.llama(**small), bits=4, group_size=32, desc_act=True, sym=False)
    make("gptq-v2-asym", common.llama(**small), bits=4, group_size=64, desc_act=False, sym=False, format="gptq_v2")
    biased = common.llama(**small, attention_bias=True)
    for layer, p in biased.named_parameters():
        if layer.endswith("bias"):
            nn.init.normal_(p)
    make("gptq-int8", biased, bits=8, group_size=-1, desc_act=False, sym=True, act_group_aware=False)
    make("gptq-int8-asym", common.llama(**small), bits=8, group_size=32, desc_act=False, sym=False)
    make("gptq-3bit", common.llama(**small), bits=3, group_size=32, desc_act=False, sym=True)


if __name__ == "__main__":
    main()
