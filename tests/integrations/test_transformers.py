"""``from_pretrained`` and ``save_pretrained`` of transformers, beside ``load`` and ``save`` of the library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import validate_quantization_for_training

from sparse_marlin import CompressedLinear, Scheme, compress, load, patch_model, save
from sparse_marlin.checkpoints import CheckpointError
from sparse_marlin.integrations.transformers import SparseMarlinConfig, SparseMarlinQuantizer
from sparse_marlin.linear import compressed_layers
from sparse_marlin.packed import PackedWeight
from sparse_marlin.quantization import note_in_config

Q_PROJ = "model.layers.0.self_attn.q_proj"  # 2:4 INT4 in saved.compress_blocks


ON_CPU = ("model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
ON_DISK = {"model.layers.0": "disk", **dict.fromkeys(ON_CPU, "cpu")}


def from_pretrained(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "model"
    torch.manual_seed(1)
    save(saved.compress_blocks(saved.llama()), path)
    return path


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same modules with the same tensors, and so the same logits."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert t.dtype == b[name].dtype and torch.equal(t, b[name]), name
    assert torch.equal(saved.logits(one), saved.logits(other))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_loads_what_load_loads(pristine: Path, dtype: torch.dtype | None, device_map: str | None) -> None:
    model = from_pretrained(pristine, **({"dtype": dtype} if dtype else {}), device_map=device_map)
    assert isinstance(model.get_submodule(Q_PROJ), CompressedLinear)
    assert not any(p.requires_grad for p in model.get_submodule(Q_PROJ).parameters())
    assert_same(model, load(pristine, dtype=dtype))


def variant(kind: str) -> Any:
    torch.manual_seed(2)
    if kind == "tied":
        return saved.compress_blocks(saved.llama(tie_word_embeddings=True))
    if kind == "biases":
        return saved.compress_blocks(tiny.with_biases(saved.llama(attention_bias=True)))
    if kind == "scales":  # float32 ones, which float16 does not hold
        model = saved.compress_blocks(saved.llama())
        model.get_submodule(Q_PROJ).scales.data.mul_(1 + 2**-20)
        return model
    if kind == "head":
        model = saved.compress_blocks(saved.llama(tie_word_embeddings=True))
        model.lm_head = compress(model.lm_head, None, 8, 32)
        return model
    if kind.startswith("columns"):  # whose 2:4 indices, or INT4 codes, do not fill whole bytes
        k = int(kind[7:])
        model = saved.llama(intermediate_size=k)
        down = "model.layers.0.mlp.down_proj"
        saved.replace(model, down, compress(model.get_submodule(down), "2:4" if k % 4 == 0 else None, 4, -1))
        return model
    model = saved.llama()
    linear = model.get_submodule(Q_PROJ)
    if kind.startswith("adapters"):
        packed = compress(linear, group_size=64, adapter_rank=16, adapter_bits=int(kind[8:]))
    else:
        n, k = linear.weight.shape
        zero_point = torch.randint(0, 16, (n, k // 32), dtype=torch.uint8)
        g_idx = torch.randperm(k).to(torch.int32) % (k // 32)
        codes, scales = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.rand(n, k // 32) / 8
        scheme = Scheme(4, 32, None, symmetric=False)
        packed = CompressedLinear(PackedWeight.pack(codes, scales, scheme, zero_point=zero_point, g_idx=g_idx)).to(
            torch.float32
        )
    saved.replace(model, Q_PROJ, packed)
    return model


@pytest.mark.parametrize(
    "kind", ["tied", "biases", "scales", "head", "columns100", "columns101", "act-order", "adapters4", "adapters16"]
)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    model = variant(kind)
    save(model, tmp_path / "ours")
    loaded = from_pretrained(tmp_path / "ours")
    assert_same(loaded, load(tmp_path / "ours"))
    assert torch.equal(saved.logits(loaded), saved.logits(model))
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert_same(load(tmp_path / "theirs"), loaded)
    assert_same(from_pretrained(tmp_path / "theirs"), loaded)
    blocks = [json.loads((tmp_path / p / "config.json").read_text())["quantization_config"] for p in ("ours", "theirs")]
    assert blocks[0] == blocks[1]


def test_save_pretrained_of_what_load_has_loaded(pristine: Path, tmp_path: Path) -> None:
    model = load(pristine)
    model.save_pretrained(tmp_path / "m")
    assert_same(from_pretrained(tmp_path / "m"), model)


@pytest.mark.parametrize("options", [{"sparsity": "2:4"}, {"sparsity": None, "bits": 8}, {"adapter_rank": 16}], ids=str)
def test_save_pretrained_of_what_patch_model_has_compressed(tmp_path: Path, options: dict[str, Any]) -> None:
    model = saved.llama()
    patch_model(model, group_size=32, calibration=[torch.arange(40)], progress=False, **options)
    model.save_pretrained(tmp_path / "theirs")
    assert_same(from_pretrained(tmp_path / "theirs"), model)
    save(model, tmp_path / "ours")
    blocks = [json.loads((tmp_path / p / "config.json").read_text())["quantization_config"] for p in ("ours", "theirs")]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("name", ["gptq-v1-asym-actorder", "ct-marlin-24"])
def test_save_pretrained_of_other_formats(tmp_path: Path, name: str) -> None:
    model = load(Path(__file__).parents[1] / "data" / "checkpoints" / name)
    model.save_pretrained(tmp_path / "m")
    assert_same(from_pretrained(tmp_path / "m"), model)


def test_config_of_what_is_no_longer_compressed() -> None:
    model = saved.compress_blocks(saved.llama())
    note_in_config(model)
    assert model.config.quantization_config["quant_method"] == "sparse_marlin"
    for name, layer in compressed_layers(model).items():
        saved.replace(model, name, nn.Linear(layer.in_features, layer.out_features))
    note_in_config(model)
    assert not hasattr(model.config, "quantization_config")


def test_generates(pristine: Path) -> None:
    tokens = torch.arange(8)[None]
    texts = [m.generate(tokens, max_new_tokens=6, do_sample=False) for m in (load(pristine), from_pretrained(pristine))]
    assert texts[0].shape == (1, 14) and torch.equal(*texts)


def test_what_the_quantizer_says_of_itself(pristine: Path) -> None:
    quantizer = from_pretrained(pristine).hf_quantizer
    assert isinstance(quantizer, SparseMarlinQuantizer)
    assert quantizer.is_serializable() and quantizer.is_compileable and not quantizer.is_trainable


def test_offloads_to_disk(pristine: Path, tmp_path: Path) -> None:
    model = from_pretrained(pristine, device_map=ON_DISK, offload_folder=tmp_path)
    assert model.get_submodule(Q_PROJ).qweight.is_meta
    assert torch.equal(saved.logits(model), saved.logits(load(pristine)))


def test_compiles_without_graph_breaks(pristine: Path) -> None:
    model, tokens = from_pretrained(pristine), torch.arange(8)[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_as_what_load_loads(pristine: Path, dtype: torch.dtype) -> None:
    assert_same(from_pretrained(pristine).to(dtype), load(pristine).to(dtype))
    assert_same(from_pretrained(pristine, dtype=dtype).to(torch.float32), load(pristine, dtype=dtype).to(torch.float32))


def test_trainer_refuses(pristine: Path) -> None:
    """Compressed layers have nothing to train; the flag that this needs forbids half() and float(), not to()."""
    model = from_pretrained(pristine)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(model)
    with pytest.raises(ValueError, match=r"`\.half\(\)` is not supported for quantized model"):
        model.half()


# ------------------------------------------------------------------------------------------------------------ on a GPU


def on_gpu(path: Path) -> Any:
    return from_pretrained(path, dtype=torch.float16, device_map="cuda")


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.double()).norm() / want.double().norm())


@pytest.mark.cuda
def test_gpu_computes_what_the_cpu_computes(pristine: Path) -> None:
    model, tokens = on_gpu(pristine), torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert error(model(tokens.cuda()).logits, load(pristine)(tokens).logits) < 0.02
    layers = compressed_layers(model)
    assert layers and all(layer.qweight is None for layer in layers.values())  # the kernels have them


@pytest.mark.cuda
def test_what_a_gpu_has_used_is_saved_as_it_came(pristine: Path, tmp_path: Path) -> None:
    model = on_gpu(pristine)
    with torch.no_grad():
        model(torch.arange(8, device="cuda")[None])
    model.save_pretrained(tmp_path / "m")
    assert_same(load(tmp_path / "m"), load(pristine, dtype=torch.float16))


@pytest.mark.cuda
def test_gpu_generates_with_a_static_cache(pristine: Path) -> None:
    """transformers compiles the decoding step then, with CUDA graphs."""
    model, tokens = on_gpu(pristine), torch.arange(8, device="cuda")[None]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    want = model.generate(tokens, **options)
    assert want.shape == (1, 20)
    for _ in range(2):
        assert torch.equal(model.generate(tokens, cache_implementation="static", **options), want)


# ------------------------------------------------------------------------------------------------------------- damage


def poisoned(t: Tensor, value: float) -> Tensor:
    t[3, 1] = value
    return t


@pytest.mark.parametrize("device_map", [None, ON_DISK], ids=["memory", "disk"])
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (f"{Q_PROJ}.meta", None, f"missing: {Q_PROJ}.meta"),
        ("model.norm.weight", None, "missing: model.norm.weight"),
        (f"{Q_PROJ}.bias", lambda _: torch.zeros(64), f"unexpected .*{Q_PROJ}.bias"),
        (f"{Q_PROJ}.qweight", lambda t: t[:-1], f"wrong .*{Q_PROJ}.qweight must be"),
        (f"{Q_PROJ}.scales", lambda t: t.int(), f"wrong .*{Q_PROJ}.scales must be"),
        (f"{Q_PROJ}.scales", lambda t: poisoned(t, torch.nan), f"{Q_PROJ}.scales holds .* not finite"),
        (f"{Q_PROJ}.meta", lambda t: poisoned(t, 0x55), f"{Q_PROJ} are damaged"),
    ],
)
def test_damaged_tensors(
    pristine: Path,
    tmp_path: Path,
    device_map: dict[str, str] | None,
    name: str,
    change: Callable[[Any], Tensor] | None,
    text: str,
) -> None:
    tensors = {n: t.clone() for n, t in load_file(pristine / "model.safetensors").items()}
    before = tensors.pop(name, None)
    if change:
        tensors[name] = change(before).contiguous()
    (tmp_path / "config.json").write_bytes((pristine / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offloaded")


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (saved.change("quantization_config/format_version", 3), "format_version 3 is newer than 2.*upgrade"),
        (saved.change("quantization_config/extra", 1), "must have exactly the keys"),
        (saved.change("quantization_config/groups/0/modules/0", "model.norm"), "model.norm, which is a LlamaRMSNorm"),
        (saved.change("quantization_config/groups/0/scheme/num_bits", 3), "bits must be one of 4, 8, got 3"),
    ],
)
def test_damaged_config(pristine: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], text: str) -> None:
    config = json.loads((pristine / "config.json").read_text())
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((pristine / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_dtype_that_layers_cannot_compute_in(pristine: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16, float32, got torch\.float64"):
        from_pretrained(pristine, dtype=torch.float64)


def test_transformers_does_not_compress(pristine: Path, tmp_path: Path) -> None:
    saved.llama().save_pretrained(tmp_path)
    block = json.loads((pristine / "config.json").read_text())["quantization_config"]
    with pytest.raises(ValueError, match="sparse_marlin"):
        from_pretrained(tmp_path, quantization_config=SparseMarlinConfig(**block))


def test_layers_cut_for_tensor_parallelism_are_refused(pristine: Path) -> None:
    class Shard(Tensor):
        pass

    model = from_pretrained(pristine)
    layer = model.get_submodule(Q_PROJ)
    layer.qweight = nn.Parameter(layer.qweight.detach().as_subclass(Shard), requires_grad=False)
    with pytest.raises(NotImplementedError, match=f"{Q_PROJ} was cut for tensor parallelism"):
        model.hf_quantizer.postprocess_model(model)


def test_without_this_library_transformers_says_what_is_unknown(pristine: Path) -> None:
    """It goes on with random weights: that it must be imported is in the README."""
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(pristine)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "Unknown quantization type, got sparse_marlin" in result.stdout + result.stderr
