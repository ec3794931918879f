"""Small random models and a tokenizer as they come from disk: built in their dtype, and able to go back there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from sparse_marlin import compress

VOCABULARY = 96


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # so that logits differ visibly
    }
    config = LlamaConfig(**{**settings, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def compress_blocks(model: Any) -> Any:
    """Compresses the Linears of the blocks without calibration, under different schemes."""
    options = [("2:4", 4, 32), (None, 4, 64), ("2:4", 8, -1), (None, 8, 32)]
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and m is not model.get_output_embeddings()]
    for i, name in enumerate(names):
        replace(model, name, compress(model.get_submodule(name), *options[i % len(options)]))
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per printable ASCII character."""
    characters = {chr(32 + i): i for i in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    inner = Tokenizer(WordLevel(characters, unk_token="<unk>"))
    inner.pre_tokenizer = Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>")


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(60).view(2, 30) % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets, or with ... deletes, a value deep in config.json."""

    def edit(config: dict[str, Any]) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        target: Any = config
        for key in parents:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value

    return edit
