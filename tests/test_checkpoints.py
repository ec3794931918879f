"""Saving and loading: bit-equal round trips, and a clear refusal of everything that is not what it should be."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from safetensors.torch import load_file, save_file
from saved import change
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaForSequenceClassification, PhiConfig, Qwen3Config

from sparse_marlin import CompressedLinear, Scheme, compress, load, save
from sparse_marlin.checkpoints import CheckpointError, describe, files, is_checkpoint, native
from sparse_marlin.packed import PackedWeight
from sparse_marlin.scheme import AdapterScheme

Q_PROJ = "model.layers.0.self_attn.q_proj"  # 2:4 INT4 in saved.compress_blocks
K_PROJ = "model.layers.0.self_attn.k_proj"  # dense INT4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "model"
    torch.manual_seed(1)
    save(saved.compress_blocks(saved.llama()), path)
    return path


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, to be damaged."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in pristine.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


# -------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loaded_logits_are_bit_equal(tmp_path: Path, dtype: torch.dtype, tied: bool, bias: bool) -> None:
    model = saved.llama(dtype, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    if bias:
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                nn.init.normal_(p)
    saved.compress_blocks(model)
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(saved.logits(loaded), saved.logits(model))
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs)
    for name, t in mine.items():
        assert theirs[name].dtype == t.dtype
        assert torch.equal(theirs[name], t), name
    for name, layer in model.named_modules():
        if isinstance(layer, CompressedLinear):
            other = loaded.get_submodule(name)
            assert (other.scheme, other.bias is not None) == (layer.scheme, bias)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in stored) == (not tied)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Gemma2Config(head_dim=16, query_pre_attn_scalar=16, pad_token_id=0), id="gemma2"),
        pytest.param(PhiConfig(partial_rotary_factor=0.5), id="phi"),
        pytest.param(Qwen3Config(head_dim=16), id="qwen3"),
    ],
)
def test_other_architectures(tmp_path: Path, config: Any) -> None:
    """Embedding scales, partial rotary embeddings: buffers that are computed and never stored."""
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size = 64, 128, 2, 96
    config.num_attention_heads, config.num_key_value_heads, config.layer_types = 4, 2, ["full_attention"] * 2
    model = saved.compress_blocks(AutoModelForCausalLM.from_config(config).eval())
    save(model, tmp_path / "m")
    assert torch.equal(saved.logits(load(tmp_path / "m")), saved.logits(model))


def test_act_order_and_zero_points(tmp_path: Path) -> None:
    model = saved.llama()
    scheme = Scheme(4, 32, None, symmetric=False)
    n, k = model.get_submodule(Q_PROJ).weight.shape
    packed = PackedWeight.pack(
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        torch.rand(n, k // 32) / 8,
        scheme,
        zero_point=torch.randint(0, 16, (n, k // 32), dtype=torch.uint8),
        g_idx=torch.randperm(k).to(torch.int32) % (k // 32),
    )
    saved.replace(model, Q_PROJ, CompressedLinear(packed).to(torch.float32))
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert torch.equal(saved.logits(loaded), saved.logits(model))
    assert loaded.get_submodule(Q_PROJ).g_idx is not None


def test_saving_what_was_loaded_gives_the_same_files(pristine: Path, tmp_path: Path) -> None:
    save(load(pristine), tmp_path / "again")
    for file in pristine.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_scales_are_stored_in_the_precision_of_the_scheme_where_exact(tmp_path: Path) -> None:
    model = saved.compress_blocks(saved.llama())
    inexact = model.get_submodule(K_PROJ)
    inexact.scales.data.mul_(1 + 2**-20)
    save(model, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert stored[f"{Q_PROJ}.scales"].dtype == torch.float16
    assert stored[f"{K_PROJ}.scales"].dtype == torch.float32
    assert torch.equal(load(tmp_path / "m").get_submodule(K_PROJ).scales, inexact.scales)


def test_compressed_head_of_a_tied_model(tmp_path: Path) -> None:
    model = saved.compress_blocks(saved.llama(tie_word_embeddings=True))
    model.lm_head = compress(model.lm_head, None, 8, 32)
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert torch.equal(saved.logits(loaded), saved.logits(model))
    assert model.config.tie_word_embeddings, "saving must not change the model"
    assert not loaded.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_chosen_at_load(checkpoint: Path, dtype: torch.dtype) -> None:
    loaded = load(checkpoint, dtype=dtype)
    assert {p.dtype for p in loaded.parameters() if p.is_floating_point()} == {dtype}
    reference = load(checkpoint)
    for name, layer in reference.named_modules():
        if isinstance(layer, CompressedLinear):
            assert torch.equal(loaded.get_submodule(name).scales, layer.scales.to(dtype))
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32, "rounded rotary frequencies ruin long contexts"
    assert saved.logits(loaded).dtype == dtype


def test_dtype_that_layers_cannot_compute_in(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        load(checkpoint, dtype=torch.float64)


def test_a_parameter_kept_in_float32_stays_so(tmp_path: Path) -> None:
    model = saved.compress_blocks(saved.llama(torch.bfloat16))
    model.model.norm.weight.data = torch.rand(64)
    save(model, tmp_path / "m")
    for loaded in (load(tmp_path / "m"), load(tmp_path / "m", dtype=torch.float16)):
        assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_SHARD_BYTES", 20_000)
    model = saved.compress_blocks(saved.llama(tie_word_embeddings=True))
    save(model, tmp_path / "m")
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 3
    assert not (tmp_path / "m" / "model.safetensors").exists()
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 20_000
    assert torch.equal(saved.logits(load(tmp_path / "m")), saved.logits(model))

    index = tmp_path / "m" / "model.safetensors.index.json"
    text = index.read_text()
    edit_json(index, lambda v: v["weight_map"].update({f"{Q_PROJ}.qweight": "../model.safetensors"}))
    with pytest.raises(CheckpointError, match="no shard's name"):
        load(tmp_path / "m")
    index.write_text(text)
    edit_json(index, lambda v: v["weight_map"].pop(f"{Q_PROJ}.qweight"))
    with pytest.raises(CheckpointError, match=r"unexpected \['model.layers.0.self_attn.q_proj.qweight'\]"):
        load(tmp_path / "m")
    index.write_text(text)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        load(tmp_path / "m")


def test_tokenizer_and_generation_config_travel_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = saved.compress_blocks(saved.llama())
    model.generation_config.max_new_tokens = 7
    save(model, tmp_path / "m", tokenizer=saved.tokenizer())
    assert load(tmp_path / "m").generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "m")("!a")["input_ids"] == [1, 65]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_loaded_tensors_do_not_live_in_the_file(checkpoint: Path) -> None:
    """A model mapped from its file would crash when the file is replaced."""
    model = load(checkpoint)
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    assert sum(p.numel() for p in model.parameters()) > 0


def test_describe_reads_no_weights(checkpoint: Path) -> None:
    description = describe(checkpoint)
    assert all(p.is_meta for p in description.model.parameters())
    assert len(description.layers) == 14
    assert description.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- damaged contents


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def poison(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t[3, 1] = value
        return t

    return change


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        pytest.param(drop(f"{Q_PROJ}.meta"), f"missing: {Q_PROJ}.meta", id="missing"),
        pytest.param(drop("model.norm.weight"), "missing: model.norm.weight", id="missing dense"),
        pytest.param(
            lambda t: t.update({"stray": torch.zeros(2)}), "unexpected in model.safetensors: stray", id="unexpected"
        ),
        pytest.param(
            lambda t: t.update({f"{Q_PROJ}.bias": torch.zeros(64)}), f"unexpected .*{Q_PROJ}.bias", id="unexpected bias"
        ),
        pytest.param(put(f"{Q_PROJ}.qweight", lambda t: t[:-1]), f"wrong .*{Q_PROJ}.qweight must be", id="shape"),
        pytest.param(put(f"{Q_PROJ}.qweight", lambda t: t.char()), f"wrong .*{Q_PROJ}.qweight must be", id="dtype"),
        pytest.param(put(f"{Q_PROJ}.scales", lambda t: t.int()), f"wrong .*{Q_PROJ}.scales must be", id="scales dtype"),
        pytest.param(
            put("model.norm.weight", lambda t: t.long()), "wrong .*model.norm.weight must be", id="norm dtype"
        ),
        pytest.param(
            put(f"{Q_PROJ}.scales", poison(torch.nan)), f"tensor {Q_PROJ}.scales holds .* not finite", id="NaN"
        ),
        pytest.param(
            put(f"{Q_PROJ}.scales", poison(torch.inf)), f"tensor {Q_PROJ}.scales holds .* not finite", id="inf"
        ),
        pytest.param(put(f"{Q_PROJ}.meta", poison(0x44 ^ 0x11)), f"tensors of {Q_PROJ} are damaged", id="metadata"),
    ],
)
def test_damaged_tensors(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], object], text: str) -> None:
    edit_tensors(checkpoint, edit)
    with pytest.raises(CheckpointError, match=f"(?s)model.*{text}"):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or no valid"):
        load(checkpoint)


def tamper(header: dict[str, Any], how: str) -> None:
    first = header[f"{Q_PROJ}.qweight"]
    begin, end = first["data_offsets"]
    if how == "beyond the end":
        first["data_offsets"] = [begin, end + (1 << 40)]
    elif how == "backwards":
        first["data_offsets"] = [end, begin]
    elif how == "overlap":
        first["data_offsets"] = header[f"{K_PROJ}.qweight"]["data_offsets"]
    else:
        first["shape"] = [1 << 62, 8]


@pytest.mark.parametrize("how", ["beyond the end", "backwards", "overlap", "huge shape", "length", "no JSON"])
def test_tampered_header(checkpoint: Path, how: str) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    raw, data = content[8 : 8 + size], content[8 + size :]
    if how == "no JSON":
        raw = b"#" * size
    elif how != "length":
        header = json.loads(raw)
        tamper(header, how)
        raw = json.dumps(header).encode()
    length = 1 << 60 if how == "length" else len(raw)
    file.write_bytes(length.to_bytes(8, "little") + raw + data)
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or no valid"):
        load(checkpoint)


GROUPS = "quantization_config/groups"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change("quantization_config/format_version", 3), "format_version 3 is newer than 2.*upgrade"),
        (change("quantization_config/format_version", "1"), "format_version must be a positive integer, got '1'"),
        (change("quantization_config/format_version", ...), "format_version must be"),
        (change("quantization_config/quant_method", "gptqq"), "quant_method 'gptqq'; this version reads"),
        (change("quantization_config", ...), f"missing: {Q_PROJ}.weight"),
        (change("quantization_config", "sparse_marlin"), "quantization_config must be an object"),
        (change("quantization_config/extra", 1), "must have exactly the keys"),
        (change(GROUPS, []), "at least one group"),
        (change(f"{GROUPS}/0/modules", "model"), "must be a list of names"),
        (change(f"{GROUPS}/0/modules/0", K_PROJ), f"twice: {K_PROJ}"),
        (change(f"{GROUPS}/0/modules/0", "model.layers.7.q_proj"), r"model.layers.7.q_proj, which does not exist"),
        (change(f"{GROUPS}/0/modules/0", "model.norm"), r"model.norm, which is a LlamaRMSNorm, not a Linear"),
        (change(f"{GROUPS}/0/modules/0", ...), r"unexpected .*is not among the modules"),
        (change(f"{GROUPS}/0/scheme/num_bits", 3), "bits must be one of 4, 8, got 3"),
        (change(f"{GROUPS}/0/scheme/dtype", "os.system"), "dtype must be one of"),
        (change(f"{GROUPS}/0/scheme/group_size", 128), "cannot be stored as|wrong in"),
        (change("dtype", "float64"), "dtype must be one of"),
        (change("model_type", "no_such_model"), "does not know the model_type 'no_such_model'"),
        (change("hidden_size", "large"), "does not describe a causal LM"),
        (change("num_hidden_layers", 3), "missing: model.layers.2"),
        (change("hidden_size", 128), "wrong in model.safetensors"),
    ],
)
def test_damaged_config(checkpoint: Path, edit: Callable[[dict[str, Any]], None], text: str) -> None:
    edit_json(checkpoint / "config.json", edit)
    with pytest.raises(CheckpointError, match=f"(?s)model.*{text}"):
        load(checkpoint)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"must hold a JSON object"):
        load(tmp_path)
    assert not is_checkpoint(tmp_path)


def test_nothing_in_a_checkpoint_is_executed(checkpoint: Path) -> None:
    """Neither code beside the weights, nor attention kernels that a config names on a hub."""
    ran = checkpoint / "ran"
    (checkpoint / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")

    def edit(config: dict[str, Any]) -> None:
        config["auto_map"] = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
        config["attn_implementation"] = config["_attn_implementation"] = "someone/kernels"

    edit_json(checkpoint / "config.json", edit)
    model: Any = load(checkpoint)
    assert not ran.exists()
    assert model.config._attn_implementation in ("sdpa", "eager")


# ------------------------------------------------------------------------------------------------------------- refusals


def test_save_never_replaces_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    model = saved.compress_blocks(saved.llama())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="something else than a checkpoint"):
            save(model, tmp_path, overwrite=overwrite)
        with pytest.raises(FileExistsError, match="not a directory"):
            save(model, tmp_path / "notes.txt", overwrite=overwrite)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        save(model, tmp_path / "no" / "parent")
    save(model, tmp_path / "empty")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "notes.txt"]


def test_overwrite_is_all_or_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {f.name: f.read_bytes() for f in checkpoint.iterdir()}
    model = saved.compress_blocks(saved.llama())
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save(model, checkpoint)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(native, "write_tensors", fail)
        with pytest.raises(OSError, match="disk full"):
            save(model, checkpoint, overwrite=True)
    assert {f.name: f.read_bytes() for f in checkpoint.iterdir()} == before
    (checkpoint / "stale").write_text("")
    save(model, checkpoint, overwrite=True)
    assert torch.equal(saved.logits(load(checkpoint)), saved.logits(model))
    assert not (checkpoint / "stale").exists()
    assert [p.name for p in checkpoint.parent.iterdir()] == [checkpoint.name], "scratch directories were left behind"


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save(saved.compress_blocks(saved.llama()), tmp_path / "m")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o755
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "m").iterdir()} == {0o644}


def test_models_that_cannot_be_loaded_again_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no compressed layer"):
        save(saved.llama(), tmp_path / "m")
    with pytest.raises(ValueError, match="only models of transformers"):
        save(nn.Sequential(compress(nn.Linear(64, 64))), tmp_path / "m")
    mixed = saved.compress_blocks(saved.llama())
    mixed.get_submodule(Q_PROJ).to(torch.float16)
    with pytest.raises(ValueError, match=r"one dtype, got 13 in torch.float32, 1 in torch.float16"):
        save(mixed, tmp_path / "m")
    classifier = LlamaForSequenceClassification(saved.llama().config)
    saved.replace(classifier, Q_PROJ, compress(classifier.get_submodule(Q_PROJ), "2:4", 4, 32))
    with pytest.raises(ValueError, match=r"missing: lm_head|not as LlamaForSequenceClassification"):
        save(classifier, tmp_path / "m")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ adapters

UP_PROJ = "model.layers.1.mlp.up_proj"


def with_adapters(bits: int, dtype: torch.dtype = torch.float32) -> Any:
    """Adapters on all but the layers named k_proj."""
    torch.manual_seed(1)
    model = saved.llama(dtype)
    for name, m in list(model.named_modules()):
        if type(m) is nn.Linear and "layers" in name:
            rank = 0 if "k_proj" in name else 16
            saved.replace(model, name, compress(m, group_size=64, adapter_rank=rank, adapter_bits=bits))
    return model


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, bits: int) -> None:
    model = with_adapters(bits, dtype)
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert torch.equal(saved.logits(loaded), saved.logits(model))
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs) and sum("adapter" in n for n in mine) == 12 * (2 if bits == 16 else 4)
    assert all(theirs[n].dtype == t.dtype and torch.equal(theirs[n], t) for n, t in mine.items())
    stored = load_file(tmp_path / "m" / "model.safetensors")
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    floats = {t.dtype for n, t in stored.items() if "adapter" in n and t.is_floating_point()}
    assert floats == {half}  # however the model computes
    save(loaded, tmp_path / "again")
    for file in (tmp_path / "m").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("bits", [4, 16])
def test_the_config_and_describe_tell_the_adapters(tmp_path: Path, bits: int) -> None:
    save(with_adapters(bits), tmp_path / "m")
    block = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert block["format_version"] == 2
    assert [g["adapter"] for g in block["groups"]] == [{"rank": 16, "num_bits": bits}, None]
    checkpoint = describe(tmp_path / "m")
    assert checkpoint.layers[UP_PROJ].adapter == AdapterScheme(16, bits)
    assert checkpoint.layers[K_PROJ].adapter is None
    stored = sum(t.nbytes for n, t in checkpoint.files.tensors.items() if n.startswith(f"{UP_PROJ}."))
    assert checkpoint.layer_nbytes(UP_PROJ) == stored
    adapter = checkpoint.read_adapter(UP_PROJ)
    assert adapter is not None and adapter.scheme == AdapterScheme(16, bits)


def test_a_model_without_adapters_is_stored_as_ever(pristine: Path) -> None:
    """So that earlier versions of the library read it."""
    block = json.loads((pristine / "config.json").read_text())["quantization_config"]
    assert block["format_version"] == 1
    assert all(set(g) == {"scheme", "modules"} for g in block["groups"])


def test_adapters_that_their_scheme_cannot_hold_exactly(tmp_path: Path) -> None:
    model = with_adapters(16)
    trained = model.get_submodule(UP_PROJ).adapter
    trained.a.data.mul_(1 + 2**-20)
    save(model, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert stored[f"{UP_PROJ}.adapter.a"].dtype == torch.float32
    assert stored[f"{UP_PROJ}.adapter.b"].dtype == torch.float16
    assert torch.equal(load(tmp_path / "m").get_submodule(UP_PROJ).adapter.a, trained.a)


@pytest.fixture(scope="module", params=[4, 16])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapted") / "model"
    save(with_adapters(request.param), path)
    return path


@pytest.mark.parametrize("how", ["missing", "shape", "dtype", "nan", "more"])
def test_damaged_adapters(adapted: Path, tmp_path: Path, how: str) -> None:
    for leaf in [n for n in load_file(adapted / "model.safetensors") if n.startswith(f"{UP_PROJ}.adapter.")]:
        copy = tmp_path / leaf
        copy.mkdir()
        for file in adapted.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())

        def edit(t: dict[str, torch.Tensor], leaf: str = leaf) -> None:
            if how == "missing":
                del t[leaf]
            elif how == "shape":
                t[leaf] = t[leaf][:-1].contiguous()
            elif how == "dtype":
                t[leaf] = t[leaf].to(torch.int16)
            elif how == "more":
                t[f"{K_PROJ}.adapter.a"] = torch.zeros(16, 64)
            elif t[leaf].is_floating_point():
                t[leaf][0, 0] = torch.nan
            else:
                t[leaf.replace("qweight", "scales")][0, 0] = torch.inf

        edit_tensors(copy, edit)
        text = {"missing": f"missing: {leaf}", "nan": "holds values that are not finite", "more": "no such adapter"}
        with pytest.raises(CheckpointError, match=rf"(?s){copy}.*{text.get(how, f'wrong in .*{leaf} must be')}"):
            load(copy)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change(f"{GROUPS}/0/adapter", ...), "must have exactly the keys adapter, modules, scheme"),
        (change(f"{GROUPS}/0/adapter", None), r"unexpected .*gives model\..* no such adapter"),
        (change(f"{GROUPS}/1/adapter", {"rank": 16, "num_bits": 16}), f"missing: {K_PROJ}.adapter.a"),
        (change(f"{GROUPS}/0/adapter", "16"), "an adapter needs exactly the keys"),
        (change(f"{GROUPS}/0/adapter/extra", 1), "an adapter needs exactly the keys"),
        (change(f"{GROUPS}/0/adapter/rank", 8), "wrong in .*adapter"),
        (change(f"{GROUPS}/0/adapter/rank", 0), "rank of an adapter must be a positive integer, got 0"),
        (change(f"{GROUPS}/0/adapter/rank", 1 << 60), "rank 1152921504606846976 is larger than the weight"),
        (change(f"{GROUPS}/0/adapter/num_bits", 8), "adapter_bits must be one of 4, 16, got 8"),
        (change("quantization_config/format_version", 1), "must have exactly the keys modules, scheme"),
    ],
)
def test_a_config_that_contradicts_the_adapters(
    adapted: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], text: str
) -> None:
    for file in adapted.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", edit)
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        load(tmp_path)
