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
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

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
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.utils import WeightsMapper

from sparse_marlin import CompressedLinear, Scheme, compress, load, save
from sparse_marlin.checkpoints import CheckpointError
from sparse_marlin.checkpoints.native import quantization_config
from sparse_marlin.integrations.vllm import SparseMarlinConfig, SparseMarlinLinearMethod, register
from sparse_marlin.packed import PackedWeight
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
    model = Qwen2ForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    return model


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
        return LLM(str(path), distributed_executor_backend="uni", **(settings | options))

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
    generated = model.generate(tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, len(PROMPT) :]
    return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0], generated.tolist()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled(tmp_path: Path, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """vLLM compiles the model ahead of time, which takes it as one graph, without breaks."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    save(saved.compress_blocks(qwen2()), tmp_path / "m")
    want, tokens = expect(load(tmp_path / "m", dtype=getattr(torch, dtype)))
    with compilation_counter.expect(num_aot_compiles=1):
        logprobs, generated = run(engine(tmp_path / "m", dtype=dtype, enforce_eager=False))
    torch.testing.assert_close(logprobs, want, rtol=0, atol=2e-5 if dtype == "float32" else 0.1)
    if dtype == "float32":
        assert generated == tokens


def test_graphs_of_other_weights_are_not_reused(tmp_path: Path, engine: Callable[..., Any]) -> None:
    """vLLM finds compiled models by a hash of their config, which does not say whether there is a g_idx."""
    hashes = []
    for act_order in (False, True, True):
        save(compress_all(llama(), lambda _, order=act_order: (DENSE, order)), tmp_path / "m", overwrite=True)
        hashes.append(engine(tmp_path / "m", dtype="float32").llm_engine.vllm_config.compute_hash())
        cleanup_dist_env_and_memory()
    assert hashes[0] != hashes[1] == hashes[2]
