"""Damaged checkpoints of other tools: refused by a text that names file and tensor, and nothing is written."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved import change
from torch import Tensor

import sparse_marlin
from sparse_marlin.checkpoints import CheckpointError, convert, describe

LAYER = "model.layers.0.mlp.down_proj"
BROAD = [
    "gptq-int8",
    "gptq-v1-asym-actorder",
    "awq",
    "ct-pack",
    "ct-pack-actorder",
    "ct-bitmask",
    "ct-marlin-24",
    "marlin",
    "marlin-24",
]  # every kind of tensor once


def leaves(name: str) -> list[str]:
    stored = load_file(fixtures.DATA / name / "model.safetensors")
    return sorted(n.removeprefix(f"{LAYER}.") for n in stored if n.startswith(LAYER + "."))


def refused(path: Path, *parts: str) -> str:
    """Converts, which must fail without a trace; returns the text."""
    before = sorted(p.name for p in path.parent.iterdir())
    bits = 4 if "compressed" in {n.rpartition(".")[2] for n in load_file(path / "model.safetensors")} else None
    with pytest.raises(CheckpointError) as error:
        convert(path, path.parent / "out", bits=bits, progress=False)
    assert sorted(p.name for p in path.parent.iterdir()) == before
    for part in parts:
        assert part in str(error.value)
    with pytest.raises(CheckpointError):
        sparse_marlin.load(path)
    return str(error.value)


def other_dtype(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t.to(torch.int16 if t.dtype != torch.int16 else torch.int32)


HEADER_DAMAGE: dict[str, Callable[[dict[str, Tensor], str], object]] = {
    "missing": lambda t, n: t.pop(n),
    "truncated": lambda t, n: t.update({n: t[n][:-1]}),
    "longer": lambda t, n: t.update({n: torch.cat([t[n], t[n][:1]])}),
    "dtype": lambda t, n: t.update({n: other_dtype(t[n])}),
    "dimensions": lambda t, n: t.update({n: t[n].reshape(1, *t[n].shape)}),
    "empty": lambda t, n: t.update({n: t[n][:0]}),
}


@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name in BROAD for leaf in leaves(name)])
def test_every_tensor(name: str, leaf: str, tmp_path: Path) -> None:
    path = fixtures.copy(name, tmp_path / "m")
    pristine = (path / "model.safetensors").read_bytes()
    for damage in HEADER_DAMAGE.values():
        fixtures.edit_tensors(path, lambda t, d=damage: d(t, f"{LAYER}.{leaf}"))  # type: ignore[misc]
        refused(path, str(path), LAYER, leaf)
        (path / "model.safetensors").write_bytes(pristine)


@pytest.mark.parametrize("name", BROAD)
def test_swapped_within_a_layer(name: str, tmp_path: Path) -> None:
    path = fixtures.copy(name, tmp_path / "m")
    first, second = [leaf for leaf in leaves(name) if leaf not in ("bias",)][:2]

    def swap(t: dict[str, Tensor]) -> None:
        a, b = f"{LAYER}.{first}", f"{LAYER}.{second}"
        t[a], t[b] = t[b], t[a]

    fixtures.edit_tensors(path, swap)
    assert "missing" not in refused(path, LAYER, first)


@pytest.mark.parametrize("name", fixtures.ALL)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    if name == "ct-dense-24":
        return  # it has none
    path = fixtures.copy(name, tmp_path / "m")
    stored = load_file(path / "model.safetensors")
    (leaf,) = [n for n in leaves(name) if n != "bias" and stored[f"{LAYER}.{n}"].is_floating_point()]
    fixtures.edit_tensors(path, lambda t: t[f"{LAYER}.{leaf}"].view(-1)[3:4].fill_(value))
    refused(path, "model.safetensors", f"tensor {LAYER}.{leaf} holds values that are not finite")


def put(name: str, leaf: str, edit: Callable[[Tensor], object], text: str) -> Any:
    return pytest.param(name, leaf, edit, text, id=f"{name}-{leaf}")


@pytest.mark.parametrize(
    ("name", "leaf", "edit", "text"),
    [
        put("ct-pack", "weight_shape", lambda t: t[0].fill_(63), r"weight_shape must be \[64, 128\].*got \[63, 128\]"),
        put("ct-bitmask", "shape", lambda t: t[1].fill_(64), r"shape must be \[64, 128\]"),
        put("ct-bitmask", "bitmask", lambda t: t[5, 3].fill_(0b00110111), "exactly two of every four"),
        put("ct-marlin-24", "meta", lambda t: t[1, 7].fill_(0x4445), "two positions do not increase"),
        put("marlin-24", "B_meta", lambda t: t[0, 0].fill_(0), "two positions do not increase"),
        put("gptq-v1", "g_idx", lambda t: t[9].fill_(-1), r"g_idx names a group outside 0\.\.1"),
        put("gptq-v1", "g_idx", lambda t: t[9].fill_(2), r"g_idx names a group outside 0\.\.1"),
        put("gptq-v1", "g_idx", lambda t: t[9].fill_(1), "desc_act is false"),
        put("gptq-v1", "qzeros", lambda t: t[0, 2].fill_(0x77777776), "sym is true .* not all 8"),
        put("ct-pack-actorder", "weight_g_idx", lambda t: t[1].fill_(-1), r"g_idx names a group outside 0\.\.3"),
    ],
)
def test_values_that_cannot_be(name: str, leaf: str, edit: Any, text: str, tmp_path: Path) -> None:
    path = fixtures.copy(name, tmp_path / "m")
    fixtures.edit_tensors(path, lambda t: edit(t[f"{LAYER}.{leaf}"]))
    with pytest.raises(CheckpointError, match=f"model.safetensors: the tensors of {LAYER} are damaged: .*{text}"):
        sparse_marlin.load(path)
    refused(path)


# -------------------------------------------------------------------------------------------------------------- configs

Q = "quantization_config"
CT = f"{Q}/config_groups/group_0"


@pytest.mark.parametrize(
    ("name", "edit", "text"),
    [
        ("gptq-v1", change(f"{Q}/bits", 8), "wrong in .*qweight"),
        ("gptq-v1", change(f"{Q}/bits", 2), "2-bit weights cannot be held.*sparse-marlin compress"),
        ("gptq-v1", change(f"{Q}/bits", 3), "3-bit weights cannot be held"),
        ("gptq-v1", change(f"{Q}/bits", 4.0), "bit"),
        ("gptq-v1", change(f"{Q}/bits", "4"), "bit"),
        ("gptq-v1", change(f"{Q}/bits", ...), "bits is missing"),
        ("gptq-v1", change(f"{Q}/group_size", 64), "wrong in .*scales"),
        ("gptq-v1", change(f"{Q}/group_size", 0), "group_size must be -1 or a positive number, got 0"),
        ("gptq-v1", change(f"{Q}/group_size", "all"), "group_size must be"),
        ("gptq-v1", change(f"{Q}/group_size", 100), r"groups of 100 columns .* cannot be held"),
        ("gptq-v1", change(f"{Q}/checkpoint_format", "gptq_v2"), "zero points are not all 8"),
        ("gptq-v1", change(f"{Q}/checkpoint_format", "os.system"), "checkpoint_format must be one of gptq, gptq_v2"),
        ("gptq-v1", change(f"{Q}/pack_dtype", "int64"), "pack_dtype must be one of int32"),
        ("gptq-v1", change(f"{Q}/sym", "yes"), "sym must be one of True, False"),
        ("gptq-v1", change(f"{Q}/adapter", {"name": "lora"}), "adapter is"),
        ("gptq-int8-asym", change(f"{Q}/sym", True), "sym is true in config.json"),
        ("gptq-v1-asym-actorder", change(f"{Q}/desc_act", False), "desc_act is false"),
        ("awq", change(f"{Q}/version", "gemv"), "version must be one of gemm, got 'gemv'"),
        ("awq", change(f"{Q}/bits", 8), "AWQ weights have 4 bits"),
        ("awq", change(f"{Q}/zero_point", False), "zero points are not all 8"),
        ("awq", change(f"{Q}/group_size", 128), "wrong in .*scales"),
        ("marlin", change(f"{Q}/group_size", 64), "group_size must be one of -1, 128"),
        ("marlin", change(f"{Q}/group_size", -1), "wrong in .*down_proj.s must be"),
        ("marlin", change(f"{Q}/desc_act", True), "desc_act is true"),
        ("marlin", change(f"{Q}/is_marlin_format", False), r"unexpected in .*_proj\.B"),
        ("marlin-24", change(f"{Q}/checkpoint_format", "marlin"), "missing: .*down_proj.B "),
        ("marlin-24", change(f"{Q}/bits", 8), "wrong in .*B_24"),
        ("ct-pack", change(f"{CT}/weights/num_bits", 8), "wrong in .*weight_packed"),
        ("ct-pack", change(f"{CT}/weights/num_bits", 3), "3-bit weights cannot be held"),
        ("ct-pack", change(f"{CT}/weights/symmetric", True), "unexpected in .*weight_zero_point"),
        ("ct-pack", change(f"{CT}/weights/group_size", 64), "wrong in .*weight_scale"),
        ("ct-pack", change(f"{CT}/weights/strategy", "channel"), "wrong in .*weight_scale"),
        ("ct-pack", change(f"{CT}/weights/strategy", "tensor"), "config_groups.group_0: strategy must be one of"),
        ("ct-pack", change(f"{CT}/weights/type", "float"), "type must be one of int"),
        ("ct-pack", change(f"{CT}/weights/actorder", "group"), "missing: .*weight_g_idx"),
        ("ct-pack", change(f"{CT}/weights", None), "group_0 must be an object with weights"),
        ("ct-pack", change(f"{CT}/input_activations", {"num_bits": 8}), "whose activations are quantized"),
        ("ct-pack", change(f"{CT}/format", "marlin-24"), "no group in config_groups describes"),
        ("ct-pack", change(f"{Q}/format", "__import__('os')"), "format must be one of"),
        ("ct-pack", change(f"{Q}/config_groups", {}), "no group in config_groups describes"),
        ("ct-pack", change(f"{Q}/config_groups", []), "no group in config_groups describes"),
        ("ct-pack", change(f"{Q}/kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is"),
        ("ct-pack-actorder", change(f"{CT}/weights/actorder", "weight"), "unexpected in .*weight_g_idx"),
        ("ct-bitmask", change(f"{Q}/sparsity_config/format", "dense"), "stored as a bitmask"),
        ("ct-bitmask", change(f"{Q}/sparsity_config/format", "sparse-bitmask"), "format must be one of"),
        ("ct-bitmask", change(f"{Q}/sparsity_config", "2:4"), "sparsity_config must be an object"),
        ("ct-marlin-24", change(f"{CT}/weights/group_size", 64), "scale_packed"),
        ("awq", change(f"{Q}/quant_method", "bitsandbytes"), "quant_method 'bitsandbytes'; this version reads"),
        ("awq", change(f"{Q}/quant_method", "torchao"), "pickled"),
        ("awq", change(f"{Q}/quant_method", ["awq"]), "this version reads"),
        ("awq", change(f"{Q}/quant_method", ...), "this version reads"),
        ("awq", change(Q, "awq"), "quantization_config must be an object"),
        ("awq", change(Q, ...), "unexpected in .*qweight"),
        ("awq", change("hidden_size", 10**12), "hidden_size is 1000000000000"),
        ("awq", change("num_hidden_layers", 10**9), "num_hidden_layers is 1000000000"),
        ("awq", change("dtype", "int8"), "dtype must be one of"),
        ("awq", change("intermediate_size", 128), "wrong in .*down_proj.qweight"),
        ("awq", change("tie_word_embeddings", True), "lm_head.weight differs"),
    ],
)
def test_config_that_contradicts(name: str, edit: Any, text: str, tmp_path: Path) -> None:
    path = fixtures.copy(name, tmp_path / "m")
    fixtures.edit_config(path, edit)
    with pytest.raises(CheckpointError, match=f"(?s)^{path}.*{text}"):
        sparse_marlin.load(path)
    refused(path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "re:(.*a){99}", "*"])
def test_patterns_of_a_config_are_not_run(pattern: str, tmp_path: Path) -> None:
    """Regular expressions can take forever; which layers are stored how is seen in the headers."""
    path = fixtures.copy("ct-pack", tmp_path / "m")
    fixtures.edit_config(path, lambda c: c[Q]["config_groups"]["group_0"].update(targets=[pattern]))
    sparse_marlin.load(path)
    path = fixtures.copy("gptq-v1", tmp_path / "g")
    fixtures.edit_config(path, lambda c: c[Q].update(dynamic={f"+:{pattern}": {"bits": 8}}))
    expected = fixtures.reference("gptq-v1")["weights"]
    assert fixtures.digests(sparse_marlin.load(path), expected) == {n: e["sha256"] for n, e in expected.items()}


def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = fixtures.copy("gptq-v1", tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not read, since unpickling can run any code"):
        sparse_marlin.load(path)


def test_names_in_an_index_cannot_leave_the_directory(tmp_path: Path) -> None:
    path = fixtures.copy("gptq-v1", tmp_path / "m")
    names = list(load_file(path / "model.safetensors"))
    (path / "model.safetensors").rename(tmp_path / "model.safetensors")
    for escape in ("../model.safetensors", str(tmp_path / "model.safetensors"), "a/../../model.safetensors", 7, None):
        index = {"weight_map": dict.fromkeys(names, escape)}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"index.json: tensor .* which is no shard's name"):
            sparse_marlin.load(path)


def test_a_bias_that_looks_like_a_mask_is_not_dropped(tmp_path: Path) -> None:
    path = fixtures.copy("gptq-v1", tmp_path / "m")
    mask = "model.layers.0.attn.bias"
    fixtures.edit_tensors(path, lambda t: t.update({mask: torch.ones(1, 1, 4, 4)}))
    sparse_marlin.load(path)
    fixtures.edit_tensors(path, lambda t: t.update({mask: torch.ones(4)}))
    refused(path, f"unexpected in model.safetensors: {mask}")


def test_experts_that_the_model_holds_otherwise(tmp_path: Path) -> None:
    path = fixtures.copy("gptq-v1", tmp_path / "m")
    stray = "model.layers.0.mlp.experts.0.up_proj.qweight"
    fixtures.edit_tensors(path, lambda t: t.update({stray: torch.zeros(2, 2)}))
    refused(path, f"{stray} (LlamaForCausalLM of the installed transformers has no module")


# ------------------------------------------------------------------------------------------------------------- fuzzing


def junk(rng: random.Random) -> Any:
    return rng.choice([None, True, False, 0, -1, 1, 3, 16, 1 << 40, 0.5, "", "x", "../x", [], {}, [1], {"a": 1}, 1e400])


def mutate_config(rng: random.Random, path: Path) -> str:
    file = path / "config.json"
    if rng.random() < 0.2:
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(bytes(data))
        return "a byte of config.json"
    config = json.loads(file.read_text())
    target: Any = config
    while True:
        key = rng.choice(list(target))
        if not isinstance(target[key], dict) or not target[key] or rng.random() < 0.1:
            break
        target = target[key]
    if rng.random() < 0.3:
        del target[key]
        what = f"{key} deleted"
    else:
        target[key] = junk(rng)
        what = f"{key} = {target[key]!r}"
    file.write_text(json.dumps(config))
    return what


def mutate_header(rng: random.Random, path: Path) -> str:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    what = rng.choice(["length", "header", "end"])
    if what == "length":
        data[rng.randrange(8)] ^= 1 << rng.randrange(8)
    elif what == "header":
        data[8 + rng.randrange(size)] = rng.randrange(256)
    else:
        del data[rng.randrange(len(data)) :]
    file.write_bytes(bytes(data))
    return f"{what} of the file"


def mutate_tensors(rng: random.Random, path: Path) -> str:
    file = path / "model.safetensors"
    tensors = load_file(file)
    a, b = rng.sample(sorted(tensors), 2)
    what = rng.choice(["drop", "swap", "rename", "cut", "transpose", "cast", "nan"])
    t = tensors[a]
    if what == "drop":
        del tensors[a]
    elif what == "swap":
        if tensors[b].shape == t.shape and tensors[b].dtype == t.dtype:
            return "nothing"  # other values in the right place: no reader could know
        tensors[a], tensors[b] = tensors[b], t
    elif what == "rename":
        tensors[a + rng.choice(["x", ".y", " "])] = tensors.pop(a)
    elif what == "cut":
        tensors[a] = t[: rng.randrange(len(t))]
    elif what == "transpose":
        if t.dim() != 2 or t.shape[0] == t.shape[1]:
            return "nothing"
        tensors[a] = t.t()
    elif what == "cast":
        tensors[a] = t.to(rng.choice([torch.int64, torch.uint8, torch.int16]))
    elif not t.is_floating_point() or a.endswith(("norm.weight", "bias", "lm_head.weight", "embed_tokens.weight")):
        return "nothing"
    else:
        t.view(-1)[rng.randrange(t.numel())] = torch.nan
    save_file({n: v.contiguous() for n, v in tensors.items()}, file)
    return f"{what} {a} {b}"


MUTATIONS = (mutate_tensors, mutate_config, mutate_header)  # the last ones leave files that cannot be edited again


@pytest.mark.parametrize("name", ["gptq-v1", "awq", "ct-pack", "ct-marlin-24", "ct-bitmask", "marlin-24"])
def test_fuzz(name: str, tmp_path: Path) -> None:
    """Mutated checkpoints are refused, or load as the same weights: no other exception, no other weights."""
    expected = fixtures.reference(name)["weights"]
    hashes = {layer: e["sha256"] for layer, e in expected.items()}
    rng = random.Random(name)
    refusals = 0
    for i in range(45):
        path = fixtures.copy(name, tmp_path / str(i))
        chosen = [m for m in MUTATIONS if rng.random() < 0.5] or [rng.choice(MUTATIONS)]
        what = [mutate(rng, path) for mutate in chosen]
        text = ""
        try:
            describe(path)
            model = sparse_marlin.load(path)
        except CheckpointError as e:
            text = str(e)
        except Exception as e:
            pytest.fail(f"{what}: {type(e).__name__}: {e}")
        if text:
            refusals += 1
            assert str(path) in text, what
        else:
            assert fixtures.digests(model, expected) == hashes, what
    assert refusals > 15
