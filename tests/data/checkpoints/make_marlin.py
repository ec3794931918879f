"""Makes the fixtures marlin and marlin-24: by AutoGPTQ's pack for original Marlin, by vLLM's for gptq_marlin_24.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0
    VENV/bin/pip download --no-deps auto-gptq==0.7.1 vllm==0.6.0 --dest WHEELS
    VENV/bin/python tests/data/checkpoints/make_marlin.py WHEELS

Neither runs without a GPU of its time, or beside today's torch. So their packing functions are taken out of the wheels,
and run on tensors as the tools call them; the directory around the tensors is written here, with the config that each
of them looks for.
"""

from __future__ import annotations

import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import common
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_UTILS = "vllm/model_executor/layers/quantization/utils"


class _Anything(types.ModuleType):
    """Stands for what the packing functions import and do not use."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


def module(wheels: Path, pattern: str, source: str, name: str) -> Any:
    """A module run from a wheel's text."""
    (wheel,) = wheels.glob(pattern)
    with zipfile.ZipFile(wheel) as z:
        code = z.read(source)
    loaded = types.ModuleType(name)
    loaded.__package__ = name.rpartition(".")[0]
    sys.modules[name] = loaded
    exec(compile(code, source, "exec"), loaded.__dict__)
    return loaded


def write(name: str, model: nn.Module, tensors: dict[str, Tensor], weights: dict[str, Tensor], **config: Any) -> None:
    path = common.fresh(name)
    path.mkdir()
    model.config.architectures = ["LlamaForCausalLM"]
    settings = json.loads(model.config.to_json_string())
    settings["dtype"] = "float16"
    settings["quantization_config"] = {"quant_method": "gptq", "group_size": 128, "bits": 4, **config}
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    plain = {n: t for n, t in model.state_dict().items() if n.removesuffix(".weight") not in weights}
    save_file({**plain, **tensors}, path / "model.safetensors", metadata={"format": "pt"})
    common.record(path, model, weights)


@torch.no_grad()
def marlin(wheels: Path) -> None:
    source = "auto_gptq/nn_modules/qlinear/qlinear_marlin.py"
    qlinear = module(wheels, "auto_gptq-*.whl", source, "auto_gptq_marlin")
    model = common.llama(intermediate_size=256)
    tensors, weights = {}, {}
    for name, linear in common.linears(model).items():
        n, k = linear.weight.shape
        groups = linear.weight.data.float().view(n, -1, 128)
        scales = (groups.abs().amax(2) / 7).half()
        codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).int()  # integers know no -0
        weights[name] = (codes.half() * scales.unsqueeze(2)).view(n, k)
        linear.weight.data = weights[name]
        layer = qlinear.QuantLinear.__new__(qlinear.QuantLinear)  # the constructor asks for a GPU
        nn.Module.__init__(layer)
        layer.infeatures, layer.outfeatures, layer.group_size, layer.bias = k, n, 128, None
        layer.B, layer.s = torch.empty(k // 16, 2 * n, dtype=torch.int32), torch.empty(k // 128, n, dtype=torch.half)
        layer.pack(linear, scales)
        tensors |= {f"{name}.B": layer.B, f"{name}.s": layer.s}
    write("marlin", model, tensors, weights, is_marlin_format=True, sym=True, desc_act=False)


@torch.no_grad()
def marlin_24(wheels: Path) -> None:
    def part(file: str) -> Any:
        return module(wheels, "vllm-*.whl", f"{_UTILS}/{file}.py", f"vllm_utils.{file}")

    for name in ("vllm", "vllm.scalar_type", "vllm.model_executor.layers.quantization.qqq", "vllm.platforms"):
        sys.modules[name] = _Anything(name)
    uint4b8 = types.SimpleNamespace(
        bias=8,
        size_bits=4,
        max=lambda: 7,
        min=lambda: -8,
        has_bias=lambda: True,
        is_integer=lambda: True,
        is_signed=lambda: False,
    )
    sys.modules["vllm.scalar_type"].scalar_types = types.SimpleNamespace(uint4b8=uint4b8, uint8b128=None)  # type: ignore[attr-defined]
    sys.modules["vllm.model_executor.layers.quantization.qqq"].MARLIN_QQQ_SUPPORTED_NUM_BITS = [4]  # type: ignore[attr-defined]
    sys.modules["vllm_utils"] = types.ModuleType("vllm_utils")
    sys.modules["vllm_utils.marlin_utils"] = _Anything("vllm_utils.marlin_utils")
    sys.modules["vllm_utils.marlin_utils"].GPTQ_MARLIN_TILE = 16  # type: ignore[attr-defined]
    part("quant_utils")
    part("marlin_utils_test")
    pack = part("marlin_utils_test_24").marlin_24_quantize
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment, method-assign]  it would put a mask on a GPU
    model = common.llama(intermediate_size=256)
    tensors, weights = {}, {}
    for name, linear in common.linears(model).items():
        reference, words, meta, scales = pack(linear.weight.data.t().contiguous(), uint4b8, 128)
        weights[name] = reference.t().contiguous()
        tensors |= {f"{name}.B_24": words, f"{name}.B_meta": meta, f"{name}.s": scales}
    write("marlin-24", model, tensors, weights, checkpoint_format="marlin_24", sym=True, desc_act=False)


if __name__ == "__main__":
    marlin(Path(sys.argv[1]))
    marlin_24(Path(sys.argv[1]))
