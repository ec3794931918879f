"""What the scripts that make the fixtures here share: the model, and what is recorded of it.

Each script writes one directory per checkpoint: what the tool itself saved, and ``reference.json`` with

    weights    SHA-256 of each compressed layer's weight as the tool dequantizes it, row-major, and its dtype
    logits     the tool's logits (or those of its dequantized weights) for the tokens 0 .. 11, in float32

so that the tests can hold what this library makes of the checkpoint against what the tool makes of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TOKENS = 12


def llama(dtype: torch.dtype = torch.float16, **changes: Any) -> LlamaForCausalLM:
    """A random Llama; ``changes`` go into its config."""
    settings = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(7)
    config = LlamaConfig(**{**settings, **changes})
    return LlamaForCausalLM(config).to(dtype).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Tools want one; it is not used."""
    words = {chr(65 + i): i for i in range(31)} | {"<unk>": 31}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>")


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The Linears of the blocks."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n}


def prune_24(model: nn.Module) -> None:
    """Makes the Linears of the blocks 2:4, by magnitude."""
    for m in linears(model).values():
        quads = m.weight.data.view(-1, 4)
        drop = quads.abs().float().argsort(1)[:, :2]
        quads.scatter_(1, drop, 0)


def fresh(name: str) -> Path:
    """The empty directory for a fixture."""
    path = HERE / name
    shutil.rmtree(path, ignore_errors=True)
    return path


@torch.no_grad()
def record(path: Path, model: nn.Module, weights: Mapping[str, Tensor], logits: Tensor | None = None) -> None:
    """Writes ``reference.json``.

    Args:
        model: computes the logits, its Linears having ``weights``, unless ``logits`` are given.
        weights: dequantized, [out_features, in_features], by layer.
    """
    if logits is None:
        # In float32, since half precision depends on the machine; built anew, for rotary frequencies that are exact.
        twin = LlamaForCausalLM(model.config).float().eval()
        twin.load_state_dict({**model.state_dict(), **{f"{name}.weight": w for name, w in weights.items()}})
        logits = twin(torch.arange(TOKENS).unsqueeze(0)).logits[0]
    reference = {
        "weights": {
            name: {"sha256": digest(w), "dtype": str(w.dtype).removeprefix("torch.")} for name, w in weights.items()
        },
        "logits": [[round(float(v), 5) for v in row] for row in logits],
    }
    (path / "reference.json").write_text(json.dumps(reference) + "\n")
    for file in path.iterdir():
        if file.is_dir() or (
            file.name not in ("config.json", "reference.json", "quantize_config.json")
            and (not file.name.endswith((".safetensors", ".index.json")))
        ):
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
