"""vLLM's own engine on checkpoints of the library, and its layers as several ranks would fill them."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import saved
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_prepare import PLAN, fake_form, fake_gemm
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, for the tests to look into
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor import parameter as vllm_parameter
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.utils import WeightsMapper

from sparse_marlin import CompressedLinear, Scheme, linear, load, runtime, save
from sparse_marlin.checkpoints import CheckpointError
from sparse_marlin.integrations.vllm import SparseMarlinConfig, SparseMarlinLinearMethod, register
from sparse_marlin.packed import PackedWeight
from sparse_marlin.quantization import quantization_config
from sparse_marlin.scheme import AdapterScheme

PROMPT = list(range(3, 43))
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def llama(**options: Any) -> Any:
    return saved.llama(head_dim=32, **options)  # what vLLM's attention on the CPU takes


def qwen2() -> Any:
    """Biases of queries, keys and values; the head is tied to the embedding."""
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=saved.VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return tiny.with_biases(Qwen2ForCausalLM(config))


def random_packed(n: int, k: int, scheme: Scheme, act_order: bool = False) -> PackedWeight:
    """A weight of random integers; scales in float32 do not survive a cast to half precision."""
    codes = torch.randint(1 << scheme.num_bits, (n, k), dtype=torch.uint8)
    groups = scheme.num_groups(k)
    zeros = None if scheme.symmetric else torch.randint(1 << scheme.num_bits, (n, groups), dtype=torch.uint8)
    g_idx = torch.randperm(k).to(torch.int32) % groups if act_order else None
    mask = torch.rand(n, k // 4, 4).argsort(2).view(n, k) < 2 if scheme.sparsity else None
    scales = (0.5 + torch.rand(n, groups)) / (1 << scheme.num_bits)
    return PackedWeight.pack(codes, scales, scheme, mask, zeros, g_idx)


def compress_all(model: Any, choose: Callable[[str], tuple[Scheme, bool] | None]) -> Any:
    """Compresses the Linears of the blocks; ``choose`` says how, and whether with act-order."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head" and (chosen := choose(name)):
            scheme, act_order = chosen
            packed = random_packed(module.out_features, module.in_features, scheme, act_order)
            saved.replace(model, name, CompressedLinear(packed, module.bias).to(torch.float32))
    return model


DENSE, ZEROS = Scheme(4, 32, None), Scheme(4, 32, None, symmetric=False, dtype=torch.float32)
SPARSE, SPARSE8 = Scheme(4, 64, "2:4"), Scheme(8, -1, "2:4")


def act_order_and_plain(name: str) -> tuple[Scheme, bool] | None:
    """Queries stay plain; keys and values have the same scheme, but each its own order of columns."""
    return None if name.endswith("q_proj") else (ZEROS, name.endswith(("k_proj", "v_proj", "down_proj")))


# The model, the number of weights that q, k and v become, and that of gate and up.
MODELS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "2:4": (lambda: compress_all(llama(tie_word_embeddings=True), lambda _: (SPARSE, False)), 1, 1),
    "mixed": (lambda: saved.compress_blocks(llama()), 3, 2),
    "zero points, biases": (lambda: compress_all(qwen2(), lambda _: (ZEROS, False)), 1, 1),
    "mixed, biases": (lambda: saved.compress_blocks(qwen2()), 3, 2),
    "act-order, plain": (lambda: compress_all(qwen2(), act_order_and_plain), 3, 1),
    "neighbours": (
        lambda: compress_all(llama(), lambda name: (SPARSE8 if name.endswith(("q_proj", "up_proj")) else DENSE, False)),
        2,
        2,
    ),
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine, and frees it after the test."""

    def make(path: Path, **options: Any) -> Any:
        settings = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
        return LLM(str(path), **({"distributed_executor_backend": "uni"} | settings | options))

    yield make
    gc.collect()
    cleanup_dist_env_and_memory()


def run(llm: Any) -> tuple[Tensor, list[int]]:
    """The log-probabilities of the prompt's tokens after the first, and what is generated greedily."""
    settings = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    (result,) = llm.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)
    logprobs = [found[token].logprob for found, token in zip(result.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    return torch.tensor(logprobs), list(result.outputs[0].token_ids)


def expect(model: Any) -> tuple[Tensor, list[int]]:
    """The same by the library itself."""
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].float().log_softmax(-1)
    model.generation_config.eos_token_id = None
    generated = model.generate(tokens, max_new_tokens=8, do_sample=False)[0, len(PROMPT) :]
    return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0], generated.tolist()


def assert_as_close_as_load(logprobs: Tensor, path: Path) -> None:
    """In bfloat16 they err by no more than twice what the library itself does, both against float32."""
    exact, ours = (expect(load(path, dtype=dtype))[0] for dtype in (torch.float32, torch.bfloat16))
    assert float((logprobs - exact).norm()) < 2 * float((ours - exact).norm()) < 0.2 * float(exact.norm())


def submodule(llm: Any, name: str) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model().get_submodule(name)


@pytest.mark.parametrize("kind", MODELS)
def test_computes_what_load_computes(tmp_path: Path, engine: Callable[..., Any], kind: str) -> None:
    build, qkv, gate_up = MODELS[kind]
    save(build(), tmp_path / "m")
    want, tokens = expect(load(tmp_path / "m", dtype=torch.float32))
    llm = engine(tmp_path / "m", dtype="float32")
    logprobs, generated = run(llm)
    torch.testing.assert_close(logprobs, want, rtol=0, atol=2e-5)
    assert generated == tokens
    assert len(submodule(llm, f"{ATTENTION}.qkv_proj").parts) == qkv
    assert len(submodule(llm, f"{MLP}.gate_up_proj").parts) == gate_up
    assert type(submodule(llm, f"{MLP}.down_proj").parts[0]) is CompressedLinear


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": saved.VOCABULARY,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "fused as they are stored": Phi3Config(intermediate_size=96, num_key_value_heads=1, pad_token_id=0, **SIZES),
    "biases everywhere": OPTConfig(ffn_dim=96, word_embed_proj_dim=64, **SIZES),
    "queries, keys and values by head": GPTNeoXConfig(intermediate_size=96, **SIZES),
    "plain experts": Qwen3MoeConfig(
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=1,
        head_dim=32,
        **SIZES,
    ),
    "half of the last byte": LlamaConfig(intermediate_size=101, **SIZES),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_architectures(tmp_path: Path, engine: Callable[..., Any], kind: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for p in model.parameters():  # so that logits differ visibly, and biases are not zero
        nn.init.normal_(p, std=0.2)
    if kind == "half of the last byte":
        compress_all(model, lambda _: (Scheme(4, -1, None), False))
    else:
        saved.compress_blocks(model)
    save(model, tmp_path / "m")
    want, tokens = expect(load(tmp_path / "m", dtype=torch.float32))
    logprobs, generated = run(engine(tmp_path / "m", dtype="float32"))
    torch.testing.assert_close(logprobs, want, rtol=0, atol=2e-5)
    assert generated == tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled(tmp_path: Path, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """vLLM compiles the model ahead of time, which takes it as one graph, without breaks."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    save(saved.compress_blocks(qwen2()), tmp_path / "m")
    with compilation_counter.expect(num_aot_compiles=1):
        logprobs, generated = run(engine(tmp_path / "m", dtype=dtype, enforce_eager=False))
    if dtype == "bfloat16":
        assert_as_close_as_load(logprobs, tmp_path / "m")
    else:
        want, tokens = expect(load(tmp_path / "m", dtype=torch.float32))
        torch.testing.assert_close(logprobs, want, rtol=0, atol=2e-5)
        assert generated == tokens


def test_kernels_are_prepared_before_compilation(
    tmp_path: Path, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operator of the kernels replaced by one that runs on the CPU."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    save(compress_all(llama(), lambda name: (SPARSE if "mlp" in name else DENSE, False)), tmp_path / "m")
    dtypes = []
    monkeypatch.setattr(runtime, "plan_for", lambda _, dtype: dtypes.append(dtype) or PLAN)
    monkeypatch.setattr(linear, "to_kernel", fake_form)
    library = torch.library.Library("sparse_marlin", "IMPL")
    library.impl("gemm", fake_gemm, "CPU")
    try:
        with compilation_counter.expect(num_aot_compiles=1):
            llm = engine(tmp_path / "m", dtype="bfloat16", enforce_eager=False)
        logprobs, _ = run(llm)
    finally:
        library._destroy()
    assert_as_close_as_load(logprobs, tmp_path / "m")
    assert dtypes == [torch.bfloat16] * 8  # of two blocks
    assert submodule(llm, f"{ATTENTION}.qkv_proj").parts[0].qweight is None
    assert PLAN in json.dumps(llm.llm_engine.vllm_config.additional_config)


def test_graphs_of_other_weights_are_not_reused(tmp_path: Path, engine: Callable[..., Any]) -> None:
    """vLLM finds compiled models by a hash of their config, which does not say whether there is a g_idx."""
    hashes = []
    for act_order in (False, True, True):
        save(compress_all(llama(), lambda _, order=act_order: (DENSE, order)), tmp_path / "m", overwrite=True)
        hashes.append(engine(tmp_path / "m", dtype="float32").llm_engine.vllm_config.compute_hash())
        cleanup_dist_env_and_memory()
    assert hashes[0] != hashes[1] == hashes[2]


# -------------------------------------------------------------------------------------------------- tensor parallelism


def test_two_ranks(tmp_path: Path, engine: Callable[..., Any]) -> None:
    save(saved.compress_blocks(qwen2()), tmp_path / "m")
    want, tokens = expect(load(tmp_path / "m", dtype=torch.float32))
    llm = engine(tmp_path / "m", dtype="float32", tensor_parallel_size=2, distributed_executor_backend="mp")
    logprobs, generated = run(llm)
    torch.testing.assert_close(logprobs, want, rtol=0, atol=2e-5)
    assert generated == tokens


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Sets the rank and the number of ranks that vLLM's layers are built for."""

    def become(rank: int, size: int) -> None:
        for module in (vllm_linear, vllm_parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    with set_current_vllm_config(VllmConfig()):
        become(0, 1)
        yield become


QKV, DOWN = f"{ATTENTION}.qkv_proj", f"{MLP}.down_proj"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def config_of(modules: dict[str, Scheme]) -> SparseMarlinConfig:
    config = SparseMarlinConfig(modules)
    config.packed_modules_mapping = FUSED
    return config


def fill(layer: Any, stored: dict[str, Tensor], *shard: Any) -> None:
    """As vLLM's models do with the tensors of a checkpoint."""
    for leaf, t in stored.items():
        param = getattr(layer, leaf)
        param.weight_loader(param, t, *shard)


def finish(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_weight(module: CompressedLinear, *want: PackedWeight) -> None:
    """The tensors of these weights, one below the other; scales as they are computed with."""
    got = module.packed.tensors()
    assert got.keys() == want[0].tensors().keys()
    for leaf, t in got.items():
        each = [w.tensors()[leaf] for w in want]
        assert torch.equal(t, each[0] if leaf == "g_idx" else torch.cat(each).to(t.dtype)), leaf
        assert type(t) is Tensor  # the kernels take no subclass


SCHEMES = [DENSE, ZEROS, SPARSE, SPARSE8, Scheme(8, 32, None), Scheme(4, -1, None, symmetric=False)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_are_cut(ranks: Callable[[int, int], None], scheme: Scheme, size: int) -> None:
    """By heads; where there are more ranks than heads of keys, several have the same."""
    parts = {
        "q": random_packed(128, 64, scheme),
        "k": random_packed(64, 64, scheme),
        "v": random_packed(64, 64, scheme),
    }
    bias = {name: torch.randn(w.out_features) for name, w in parts.items()}
    x = torch.randn(3, 64)
    for rank in range(size):
        ranks(rank, size)
        layer = vllm_linear.QKVParallelLinear(
            64, 32, 4, 2, quant_config=config_of({f"{ATTENTION}.{n}_proj": scheme for n in parts}), prefix=QKV
        )
        for name, packed in parts.items():
            fill(layer, packed.tensors() | {"bias": bias[name]}, name)
        (module,) = finish(layer).parts
        heads = min(size, 2)
        cuts = {"q": (rank, size), "k": (rank * heads // size, heads), "v": (rank * heads // size, heads)}
        own = [packed.shard(0, *cuts[name]) for name, packed in parts.items()]
        assert_weight(module, *own)
        own_bias = [b.chunk(cuts[name][1])[cuts[name][0]] for name, b in bias.items()]
        want = x @ torch.cat([w.dequantize(torch.float32) for w in own]).T + torch.cat(own_bias)
        torch.testing.assert_close(layer(x)[0], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_are_cut(ranks: Callable[[int, int], None], scheme: Scheme, size: int) -> None:
    """The outputs of the ranks, of which only the first adds the bias, sum up to that of the layer."""
    packed, bias, x = random_packed(48, 256, scheme), torch.randn(48), torch.randn(3, 256)
    total = torch.zeros(3, 48)
    for rank in range(size):
        ranks(rank, size)
        layer = vllm_linear.RowParallelLinear(
            256,
            48,
            reduce_results=False,
            skip_bias_add=False,
            bias=False,
            quant_config=config_of({DOWN: scheme}),
            prefix=DOWN,
        )
        layer.bias = nn.Parameter(bias, requires_grad=False)  # vLLM refuses one beside reduce_results=False
        fill(layer, packed.tensors())
        assert_weight(finish(layer).parts[0], packed.shard(1, rank, size))
        total += layer(x.chunk(size, 1)[rank])[0]
    torch.testing.assert_close(total, x @ packed.dequantize(torch.float32).T + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_parts_that_differ(ranks: Callable[[int, int], None], size: int) -> None:
    """2:4 beside act-order beside a plain weight, and each with its part of the bias."""
    q, k, v = random_packed(128, 64, SPARSE), random_packed(64, 64, ZEROS, act_order=True), torch.randn(64, 64)
    bias, x = [torch.randn(128), torch.randn(64), torch.randn(64)], torch.randn(3, 64)
    config = config_of({f"{ATTENTION}.q_proj": SPARSE, f"{ATTENTION}.k_proj": ZEROS})
    for rank in range(size):
        ranks(rank, size)
        layer = vllm_linear.QKVParallelLinear(64, 32, 4, 2, quant_config=config, prefix=QKV)
        for name, stored, b in zip("qkv", (q.tensors(), k.tensors(), {"weight": v}), bias, strict=True):
            fill(layer, stored | {"bias": b}, name)
        sparse, dense, plain = finish(layer).parts
        assert_weight(sparse, q.shard(0, rank, size))
        assert_weight(dense, k.shard(0, rank, size))
        assert torch.equal(plain.weight, v.chunk(size)[rank])
        weights = [w.chunk(size)[rank] for w in (q.dequantize(torch.float32), k.dequantize(torch.float32), v)]
        want = x @ torch.cat(weights).T + torch.cat([b.chunk(size)[rank] for b in bias])
        torch.testing.assert_close(layer(x)[0], want, rtol=1e-5, atol=1e-4)
        for t in (sparse.qweight, sparse.meta, dense.qweight, dense.scales, plain.weight):
            assert t.untyped_storage().nbytes() == t.nbytes  # nothing keeps the common tensors alive


@pytest.mark.parametrize(
    ("k", "scheme", "size", "text"),
    [
        (192, SPARSE, 2, r"part 0 of 2 along dim 1 of size 192: possible counts \[1, 3\]"),
        (96, DENSE, 2, r"possible counts \[1, 3\]"),
        (100, Scheme(4, -1, "2:4"), 5, r"possible counts \[1\]"),
        (102, Scheme(4, -1, None), 6, r"possible counts \[1, 3, 17, 51\]"),
    ],
)
def test_cuts_within_a_group_or_a_byte_are_refused(
    ranks: Callable[[int, int], None], k: int, scheme: Scheme, size: int, text: str
) -> None:
    ranks(0, size)
    with pytest.raises(ValueError, match=f"{DOWN}, with tensor parallelism over {size} ranks: .*{text}"):
        vllm_linear.RowParallelLinear(k, 48, bias=False, quant_config=config_of({DOWN: scheme}), prefix=DOWN)


def test_columns_of_act_order_are_not_cut(ranks: Callable[[int, int], None]) -> None:
    ranks(0, 2)
    layer = vllm_linear.RowParallelLinear(128, 48, bias=False, quant_config=config_of({DOWN: ZEROS}), prefix=DOWN)
    with pytest.raises(NotImplementedError, match=f"{DOWN} has a g_idx"):
        fill(layer, random_packed(48, 128, ZEROS, act_order=True).tensors())


def test_replicated(ranks: Callable[[int, int], None]) -> None:
    packed = random_packed(48, 101, Scheme(4, -1, None))  # half of the last byte is used
    ranks(1, 2)
    layer = vllm_linear.ReplicatedLinear(
        101, 48, bias=False, quant_config=config_of({DOWN: packed.scheme}), prefix=DOWN
    )
    fill(layer, packed.tensors())
    assert_weight(finish(layer).parts[0], packed)


def test_parts_that_are_stored_as_one(ranks: Callable[[int, int], None]) -> None:
    """As in Phi-3, whose gate and up are one Linear in transformers too."""
    packed, name = random_packed(128, 64, SPARSE), f"{MLP}.gate_up_proj"
    ranks(1, 2)
    layer = vllm_linear.MergedColumnParallelLinear(
        64, [64, 64], bias=False, quant_config=config_of({name: SPARSE}), prefix=name
    )
    fill(layer, packed.tensors())
    assert_weight(finish(layer).parts[0], packed.shard(0, 1, 4), packed.shard(0, 3, 4))


# ----------------------------------------------------------------------------------------------------------- refusals


def test_registered_once() -> None:
    register()
    register()
    assert QUANTIZATION_METHODS.count("sparse_marlin") == 1
    assert get_quantization_config("sparse_marlin") is SparseMarlinConfig


def test_what_the_config_says_of_itself() -> None:
    config = SparseMarlinConfig.from_config(quantization_config({"a": (SPARSE, None), "b": (DENSE, None)}))
    assert config.modules == {"a": SPARSE, "b": DENSE} and config.get_name() == "sparse_marlin"
    assert config.get_min_capability() == 80 and torch.bfloat16 in config.get_supported_act_dtypes()


def test_names_of_vllm(ranks: Callable[[int, int], None]) -> None:
    config = config_of({f"{ATTENTION}.q_proj": SPARSE})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    kinds = []
    for prefix in (f"language_model.{QKV}", QKV):
        layer = vllm_linear.QKVParallelLinear(64, 32, 4, 2, quant_config=config, prefix=prefix)
        kinds.append(type(layer.quant_method))
    assert kinds == [SparseMarlinLinearMethod, vllm_linear.UnquantizedLinearMethod]


def test_adapters_are_refused() -> None:
    block = quantization_config({"a": (SPARSE, None), "b": (SPARSE, AdapterScheme(4))})
    with pytest.raises(NotImplementedError, match="1 modules have adapters, such as b, which vLLM does not run"):
        SparseMarlinConfig.from_config(block)


@pytest.mark.parametrize(("module", "prefix"), [("lm_head", "lm_head"), (f"{MLP}.experts.0.up_proj", f"{MLP}.experts")])
def test_what_is_no_linear_is_refused(module: str, prefix: str) -> None:
    config = config_of({module: SPARSE})
    assert config.get_quant_method(nn.Identity(), "model.embed_tokens") is None
    with pytest.raises(NotImplementedError, match=f"{module} is compressed, but under vLLM it belongs to a Identity"):
        config.get_quant_method(nn.Identity(), prefix)


def test_parts_that_are_not_those_of_vllm(ranks: Callable[[int, int], None]) -> None:
    name = f"{MLP}.gate_up_proj"
    with pytest.raises(NotImplementedError, match="has 3 parts, but its weights are stored as 2"):
        vllm_linear.MergedColumnParallelLinear(
            64, [64, 64, 64], bias=False, quant_config=config_of({f"{MLP}.up_proj": SPARSE}), prefix=name
        )


def filled(ranks: Callable[[int, int], None], change: Callable[[dict[str, Tensor]], Any]) -> Any:
    """A layer with the tensors of one weight, after a change to these."""
    tensors = random_packed(48, 64, SPARSE).tensors()
    change(tensors)
    layer = vllm_linear.RowParallelLinear(64, 48, bias=False, quant_config=config_of({DOWN: SPARSE}), prefix=DOWN)
    fill(layer, tensors)
    return layer


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("meta"), f"{DOWN}.meta is missing"),
        (lambda t: t.update(scales=t["scales"].int()), f"{DOWN}.scales must be torch.float32, got torch.int32"),
        (lambda t: t.update(qweight=t["qweight"][:-1]), rf"{DOWN}.qweight is \[48, 16\] here, and a tensor \[47, 16\]"),
        (lambda t: t["scales"].fill_(torch.nan), f"scales of {DOWN} hold values that are not finite"),
        (lambda t: t["meta"].fill_(0x55), f"tensors of {DOWN} are damaged: meta holds a quad"),
    ],
)
def test_damaged_tensors(
    ranks: Callable[[int, int], None], change: Callable[[dict[str, Tensor]], Any], text: str
) -> None:
    """What can be seen of tensors from anywhere, such as a hub."""
    with pytest.raises(CheckpointError, match=text):
        finish(filled(ranks, change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t["k"].pop("meta"), "k_proj.meta is missing"),
        (lambda t: t["v"].update(meta=t["q"]["meta"][:64]), r"v_proj has no such tensor, got a meta \[64, 8\]"),
        (lambda t: t["k"].update(qweight=t["k"]["qweight"][:, :8]), r"k_proj has 16 columns, got a qweight \[64, 8\]"),
        (lambda t: t["v"].update(scales=t["v"]["scales"][:, :1]), r"v_proj has 2 columns, got a scales \[64, 1\]"),
        (lambda t: t["q"].update(qweight=t["q"]["qweight"].repeat(1, 2)), "q_proj has 16 columns, got a qweight"),
    ],
)
def test_damaged_tensors_of_parts(
    ranks: Callable[[int, int], None], change: Callable[[dict[str, dict[str, Tensor]]], Any], text: str
) -> None:
    schemes = {"q": Scheme(4, 32, "2:4"), "k": Scheme(4, 32, "2:4"), "v": Scheme(4, 32, None)}
    tensors = {n: random_packed(128 if n == "q" else 64, 64, scheme).tensors() for n, scheme in schemes.items()}
    change(tensors)
    config = config_of({f"{ATTENTION}.{n}_proj": scheme for n, scheme in schemes.items()})
    layer = vllm_linear.QKVParallelLinear(64, 32, 4, 2, bias=False, quant_config=config, prefix=QKV)

    def load_all() -> None:
        for name, stored in tensors.items():
            fill(layer, stored, name)
        finish(layer)

    with pytest.raises(CheckpointError, match=text):
        load_all()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "model"
    torch.manual_seed(1)
    save(saved.compress_blocks(llama()), path)
    return path


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("model.norm.weight", None, "missing: model.norm.weight"),
        (f"{ATTENTION}.q_proj.bias", lambda _: torch.zeros(128), "unexpected .*q_proj.bias"),
        (f"{ATTENTION}.q_proj.qweight", lambda t: torch.cat([t, t]), "wrong .*q_proj.qweight must be"),
        (
            f"{ATTENTION}.q_proj.scales",
            lambda t: t.fill_(torch.inf),
            f"scales of {ATTENTION}.q_proj hold .* not finite",
        ),
    ],
)
def test_damaged_files(
    pristine: Path,
    tmp_path: Path,
    engine: Callable[..., Any],
    name: str,
    change: Callable[[Any], Tensor] | None,
    text: str,
) -> None:
    tensors = load_file(pristine / "model.safetensors")
    before = tensors.pop(name, None)
    if change:
        tensors[name] = change(before)
    (tmp_path / "config.json").write_bytes((pristine / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"(?s){text}"):
        engine(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (saved.change("quantization_config/format_version", 3), "format_version 3 is newer than 2.*upgrade"),
        (saved.change("quantization_config/groups/0/scheme/num_bits", 3), "bits must be one of 4, 8, got 3"),
        (saved.change("quantization_config/groups/0/modules/0", "model.norm"), "model.norm, which is a LlamaRMSNorm"),
    ],
)
def test_damaged_config(
    pristine: Path, tmp_path: Path, engine: Callable[..., Any], edit: Callable[[dict[str, Any]], None], text: str
) -> None:
    config = json.loads((pristine / "config.json").read_text())
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((pristine / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"(?s){text}"):
        engine(tmp_path, dtype="float32")
